"""Join runs that belong together: passes over one grid (`--as-repeats`), and the runs of one engine.

A report over several engines shows each engine as one run, named after the engine, so that layouts which a server ran
in different launches are compared, and several launches of a point are its repeats.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.gpus import GPUS
from dcpbench.points.names import BACKENDS, LIBRARIES
from dcpbench.records.record import OURS, get_device, get_origin, is_imported_origin, parse_origin
from dcpbench.records.runs import Run, compute_measurement_digest
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.records.record import Origin, Record

SAME_ENVIRONMENT = ("device", "device_count", "torch", "cuda", "nccl", "flashinfer", "flash_mla", "triton")
"""Fields of the environment that runs must share to be repeats of each other."""
FLASHMLA = LIBRARIES["flashmla"]
WITHOUT_FLASHMLA = tuple(backend for backend in BACKENDS if LIBRARIES.get(backend) != FLASHMLA)  # same without FlashMLA


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """Hold all records of one engine as one run, or the imported records of one run."""

    run: Run
    sources: tuple[str, ...]  # names of the runs that the records come from
    imported: bool = False


def find_device_names(runs: Sequence[Run]) -> dict[str, str]:
    """Return the shown name of each device that dcpbench measured: `NVIDIA H200` also for `H200`, as typed for --gpu.

    Names of the same GPU are shown as the longest of them that occurs in these runs.
    """
    records = [record for run in runs for record in run.records if not is_imported_origin(get_origin(record))]
    same: dict[str, list[str]] = {}
    for name in dict.fromkeys(filter(None, map(get_device, records))):
        same.setdefault(_find_gpu(name), []).append(name)
    return {name: max(names, key=len) for names in same.values() for name in names}


def _find_gpu(device: str) -> str:
    """Return the name of a GPU of points/gpus.py, or the device without its maker's name, in small letters."""
    plain = _strip_maker(device)
    return next(
        (gpu.name.casefold() for gpu in GPUS if plain in (gpu.name.casefold(), _strip_maker(gpu.device))), plain
    )


def _strip_maker(device: str) -> str:
    return device.casefold().removeprefix("nvidia ")


def split_by_device(run: Run) -> list[Run]:
    """Return a run for each device that dcpbench measured on, as after --resume on another machine; else the run itself.

    Points of different devices are never compared. Records without a device stay with the first one, and so do imported ones,
    because their points have the device as a setting.
    """
    shown = find_device_names([run])
    own: dict[str, list[Record]] = {}
    for record in run.records:
        device = "" if is_imported_origin(get_origin(record)) else shown.get(get_device(record) or "", "")
        own.setdefault(device, []).append(record)
    rest = own.pop("", [])
    if len(own) < 2:  # noqa: PLR2004 - one device
        return [run]
    first, *others = own
    parts = [dataclasses.replace(run, name=f"{run.name} ({first})", records=[*rest, *own[first]])]
    return parts + [
        Run(name=f"{run.name} ({name})", folder=run.folder, records=own[name], path=run.path, places=run.places)
        for name in others
    ]


def format_run(name: str, engines: Sequence[EngineRun]) -> str:
    """Return `run monday`, or the name of an engine alone: `vLLM 0.26.0`."""
    measured = {engine.run.name for engine in engines if not engine.imported}
    return name if name in measured else f"run {name}"


def list_engines(runs: Sequence[Run]) -> list[str]:
    """Return the names of the engines that were measured live by dcpbench, each once; imported files are left out."""
    names = dict.fromkeys(name for run in runs for name in _name_engines(run))
    return [name for name in names if name]


def _name_engines(run: Run) -> list[str]:
    """Return the name of the engine of each record, empty for imported ones.

    A point that its server never ran has no version. It gets the name of the server that ran the other points, if there is one.
    """
    origins = [parse_origin(get_origin(record)) for record in run.records]
    versions = [origin for origin in dict.fromkeys(origins) if origin.version]

    def complete(origin: Origin) -> Origin:
        if not origin.engine or origin.version:
            return origin
        found = [known for known in versions if known.engine == origin.engine] or versions
        return found[0] if len(found) == 1 else origin

    return ["" if is_imported_origin(origin.text) else complete(origin).label for origin in origins]


def group_by_engine(runs: Sequence[Run], devices: Mapping[str, str], *, as_repeats: bool) -> list[EngineRun]:
    """Return a run for each engine, named after it, with the records of all runs that measured it.

    `devices` are the shown names of devices (find_device_names).

    Runs of dcpbench's own engine are joined only if hardware, software and commit are the same, and runs of a server only
    if its hardware is; with `as_repeats` they must be. Imported records keep the run that they are in.

    Raise UsageError if `as_repeats` joins runs of different environments.
    """
    groups: dict[tuple[str, object], list[Run]] = {}
    for engine, part in [part for run in runs for part in _split_by_engine(run)]:
        key = part.name if not engine else "" if as_repeats else _make_environment_key(part, devices)
        groups.setdefault((engine, key), []).append(part)
    several = Counter(engine for engine, _ in groups)
    found = []
    for (engine, _), members in groups.items():
        sources = tuple(run.name for run in members)
        joined = members[0] if len(members) == 1 else join_runs(members, check=as_repeats)
        name = engine if several[engine] == 1 else f"{engine} ({format_list(list(sources))})"
        run = dataclasses.replace(joined, name=name) if engine else joined
        found.append(EngineRun(run, sources, imported=not engine))
    return found


def _split_by_engine(run: Run) -> list[tuple[str, Run]]:
    """Return the records of each engine as a run, with the engine's name; imported records have an empty name."""
    records: dict[str, list[Record]] = {}
    for record, name in zip(run.records, _name_engines(run), strict=True):
        records.setdefault(name, []).append(record)
    if len(records) <= 1:
        return [(engine, run) for engine in records]
    return [(engine, Run(name=run.name, folder=run.folder, records=own)) for engine, own in records.items()]


def _make_environment_key(run: Run, devices: Mapping[str, str]) -> tuple[object, ...]:
    """Return what runs of an engine must share to be joined."""
    record = next((record for record in run.records if record.environment), None)
    if record is None or record.environment is None:
        return ()
    device = devices.get(record.environment.device)
    if get_origin(record) != OURS:
        return (device,)
    return (device, record.environment.git_commit, *(getattr(record.environment, name) for name in SAME_ENVIRONMENT))


def count_launches(runs: Sequence[Run], make_key: Callable[[Record], str]) -> Counter[tuple[str, str]]:
    """Return in how many runs each point was measured, by engine and key; an exact copy of a record does not count."""
    seen: set[bytes] = set()
    found: Counter[tuple[str, str]] = Counter()
    for run in runs:
        measured = set()
        for record in run.records:
            if record.outcome == "ok" and (one := compute_measurement_digest(record)) not in seen:
                seen.add(one)
                measured.add((parse_origin(get_origin(record)).label, make_key(record)))
        found.update(measured)
    return found


def join_runs(runs: list[Run], *, check: bool = True) -> Run:
    """Join the runs into one: repeat numbers continue, and a point that is rejected in all runs is rejected once.

    An exact copy of a record is not a repeat. With `check`, raise UsageError if runs were taken in different environments.
    """
    if check:
        _check_same_environment(runs)
    records: dict[str, Record] = {}
    measured: set[bytes] = set()
    passes = 0
    for run in runs:
        for record in run.records:
            if record.metrics or record.serve:
                if (one := compute_measurement_digest(record)) in measured:
                    continue
                measured.add(one)
            point = msgspec.structs.replace(record.point, repeat=record.point.repeat + passes)
            key = record.point.get_key_without_repeat() if record.outcome == "rejected" else point.get_key()
            records.setdefault(key, msgspec.structs.replace(record, point=point))
        passes += 1 + max((r.point.repeat for r in run.records), default=0)
    return Run(
        folder=runs[0].folder,
        name=" + ".join(run.name for run in runs),
        records=list(records.values()),
        replaced=sum(run.replaced for run in runs),
        truncated=any(run.truncated for run in runs),
        bad_lines=tuple(line for run in runs for line in run.bad_lines),
    )


def _check_same_environment(runs: list[Run]) -> None:
    """Raise UsageError if runs were taken in different environments; FlashMLA counts only if points may have run with it."""
    seen: dict[str, tuple[str, object]] = {}
    for run in runs:
        for record in run.records:
            for name in SAME_ENVIRONMENT if record.environment else ():
                if name == FLASHMLA and record.point.backend in WITHOUT_FLASHMLA:
                    continue
                here = getattr(record.environment, name)
                first, there = seen.setdefault(name, (run.name, here))
                if here != there:
                    raise UsageError(
                        f"--as-repeats: {name} is {there} in {first} and {here} in {run.name}, so they are not "
                        "repeats of each other. Leave --as-repeats out to show them side by side."
                    )
