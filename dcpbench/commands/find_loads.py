"""Search for the highest load that meets the SLO (`serve|server --find`): each measured load is a point of the run."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.commands import point_runner
from dcpbench.launch import folders
from dcpbench.plan import grid
from dcpbench.plan.load_search import (
    FoundLoad,
    MeasuredLoad,
    choose_next_load,
    get_load,
    limit_clients,
    make_layout_key,
    set_load,
)
from dcpbench.plan.serve_spec import check_objectives
from dcpbench.points.budget import engine_values, is_same_engine
from dcpbench.records.file import RecordFile
from dcpbench.records.runs import read_last_records
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from dcpbench.commands.options import Run
    from dcpbench.commands.point_runner import WorkOff
    from dcpbench.launch.launcher import JobOptions
    from dcpbench.plan.load_search import LoadRange
    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.points.budget import EnginePlan
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSearch:
    """Search the load of each layout of a run."""

    bounds: LoadRange
    slo: Mapping[str, float]
    expand: Callable[[float], Sequence[grid.Candidate]]  # points of all layouts at a load, with their repeats
    one_by_one: bool = False  # True if layouts are searched one after the other, each on one server or in one job
    _expanded: dict[float, list[grid.Candidate]] = dataclasses.field(default_factory=dict)
    _tried: set[str] = dataclasses.field(default_factory=set)  # keys of the points that this command has run
    _new: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # measured loads by layout

    def run(
        self,
        candidates: Sequence[grid.Candidate],
        folder: Path,
        options: JobOptions,
        probe: Probe,
        run: Run,
        work_off: WorkOff,
    ) -> int:
        """Measure loads until the limit of each layout is known, write the report, and return the exit code.

        `candidates` are the layouts at the lowest load. Loads that the folder has already are not measured again.
        """
        layouts = {make_layout_key(c.point, self.bounds): c.point for c in candidates}
        with folders.lock_folder(folder) as lock:
            with folders.convert_write_errors(folder):
                point_runner.prepare_folder(
                    [c for c in candidates if c.error is None], folder, options, run, None, searched=True
                )
                self._print_start(folder, probe)
                choose = functools.partial(self._choose_added_points, layouts, folder)
                while chosen := self._choose_runnable(layouts, folder):
                    engines = tuple(dict.fromkeys(c.plan for c in chosen if c.plan))
                    now = msgspec.structs.replace(options, engines=engines, lock=lock, choose_points=choose)
                    work_off([c.point for c in chosen], now, run)
            found = self._collect_results(layouts, folder)
            measured = [c for load in sorted(self._expanded) for c in self._expanded[load]]
            return point_runner.finish_run(measured, folder, probe, run, found)

    @functools.cached_property
    def _shared_plans(self) -> dict[tuple[object, ...], EnginePlan]:
        """Return the plan of each engine for the highest load, with which it runs all loads; none if a layout cannot run that load."""
        highest = self.expand(self.bounds.high)
        rejected = {engine_values(c.point) for c in highest if c.error}
        plans = {engine_values(c.point): c.plan for c in highest if c.plan}
        return {engine: plan for engine, plan in plans.items() if engine not in rejected}

    def share_plans(self, candidates: Iterable[grid.Candidate]) -> list[grid.Candidate]:
        """Return the points of a load with the plans that engines have for all loads."""
        return [
            dataclasses.replace(c, plan=self._shared_plans.get(engine_values(c.point), c.plan)) if c.plan else c
            for c in candidates
        ]

    def _expand(self, load: float) -> list[grid.Candidate]:
        """Return the points of all layouts at a load; a replay has no repeats."""
        if load not in self._expanded:
            found = self.share_plans(self.expand(load))
            self._expanded[load] = [c for c in found if not (c.point.replayed and c.point.repeat)]
        return self._expanded[load]

    def _choose_added_points(self, layouts: Mapping[str, Point], folder: Path, point: Point) -> list[Point]:
        """Return the next points that the engine of a job with this point can run; none if it is planned for one load only."""
        if engine_values(point) not in self._shared_plans:
            return []
        same = {key: one for key, one in layouts.items() if is_same_engine(one, point)}
        return [c.point for c in self._choose_runnable(same, folder)]

    def _choose_runnable(self, layouts: Mapping[str, Point], folder: Path) -> list[grid.Candidate]:
        """Return the points to run next, after recording chosen ones that cannot run; none at the end of the search."""
        while chosen := self._choose_points(layouts, folder):
            if runnable := self._reject(chosen, folder):
                return runnable
        return []

    def _choose_points(self, layouts: Mapping[str, Point], folder: Path) -> list[grid.Candidate]:
        """Return the points to run next, of each layout whose search goes on."""
        chosen: list[grid.Candidate] = []
        known = read_last_records(folder, bad=[])
        for key, loads in self._group_records(layouts, known.values()).items():
            shares = {load: one.slo_ratio for load, one in loads.items()}
            load = choose_next_load(shares, self.bounds, self._new[key], replayed=layouts[key].replayed)
            if load is None:
                continue
            at = [c for c in self._expand(load) if make_layout_key(c.point, self.bounds) == key]
            chosen += [c for c in at if not self._is_done(c.point, known)]
            self._new[key] += 1
            if chosen and self.one_by_one:
                break
        return chosen

    def _is_done(self, point: Point, known: Mapping[str, Record]) -> bool:
        record = known.get(point.get_key())
        return record is not None and (record.outcome == "ok" or point.get_key() in self._tried)

    def _reject(self, chosen: Sequence[grid.Candidate], folder: Path) -> list[grid.Candidate]:
        """Record the points that cannot run, and return the others."""
        self._tried.update(c.point.get_key() for c in chosen)
        for c in chosen:
            if c.error is not None:
                RecordFile(folder).append(c.make_rejected_record())
        return [c for c in chosen if c.error is None]

    def _group_records(
        self, layouts: Mapping[str, Point], records: Iterable[Record]
    ) -> dict[str, dict[float, MeasuredLoad]]:
        """Return the completely measured loads of each layout within the bounds."""
        found: dict[str, dict[float, list[Record]]] = {key: {} for key in layouts}
        for record in records:
            point = record.point
            counts = record.outcome == "ok" or point.get_key() in self._tried
            if point.load is None or not counts or (key := make_layout_key(point, self.bounds)) not in found:
                continue
            load = get_load(point, self.bounds)
            if self.bounds.low <= load <= self.bounds.high:
                found[key].setdefault(load, []).append(record)
        return {
            key: {
                load: MeasuredLoad(load=load, records=tuple(of), slo=self.slo)
                for load, of in sorted(loads.items())
                if len(of) >= (1 if layouts[key].replayed else self.bounds.repeats)
            }
            for key, loads in found.items()
        }

    def _collect_results(self, layouts: Mapping[str, Point], folder: Path) -> list[FoundLoad]:
        grouped = self._group_records(layouts, read_last_records(folder, bad=[]).values())
        names = _name_layouts(layouts)
        return [
            FoundLoad(
                label=names[key],
                replayed=layouts[key].replayed,
                bounds=self.bounds,
                measured=tuple(loads.values()),
            )
            for key, loads in grouped.items()
            if loads
        ]

    def _print_start(self, folder: Path, probe: Probe) -> None:
        from dcpbench.launch.progress import CPU_NOTE

        if probe.device == "cpu":
            print_stderr(CPU_NOTE)
        bounds = f"{self.bounds.low:g} to {self.bounds.format(self.bounds.high)}"
        print_stderr(f"Searching from {bounds} for the highest load that meets the SLO. Output: {folder}")


def make_search(
    bounds: LoadRange | None,
    loads: ServeLoads,
    settings: Settings,
    expand: Callable[[ServeLoads, int], Sequence[grid.Candidate]],
    *,
    one_by_one: bool = False,
) -> LoadSearch | None:
    """Return the search for the highest load that meets the SLO; None without bounds. Raise as `check_objectives` does.

    `expand` returns the points of all layouts with these loads and repeats.
    """
    if bounds is None:
        return None
    check_objectives(loads, settings.slo, settings.trace_path, each=True)
    limited = limit_clients(bounds, loads)

    def expand_load(load: float) -> Sequence[grid.Candidate]:
        return expand(set_load(loads, limited, load), limited.repeats)

    return LoadSearch(bounds=limited, slo=settings.slo, expand=expand_load, one_by_one=one_by_one)


def _name_layouts(layouts: Mapping[str, Point]) -> dict[str, str]:
    """Return the name of each layout, with its mode and lengths where others have the same name."""
    short = {
        key: " ".join(filter(None, (p.model_label, p.layout_name, p.ep_label, grid.format_path(p))))
        for key, p in layouts.items()
    }
    varied = grid.format_varied_parts([*layouts.values()])
    names = {}
    for key, point in layouts.items():
        load, alone = point.load, list(short.values()).count(short[key]) == 1
        more = f", {load.mode}, {load.input_tokens} + {load.output_tokens} tokens" if load and not alone else ""
        names[key] = short[key] + more + (varied[point.get_key()] if not alone else "")
    return names
