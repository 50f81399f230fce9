"""Read the two sides of a comparison as launches, one per run folder, and match their points."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.compare.comparison import SIDES
from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.axes import Role
from dcpbench.points.point import AXES, LOAD_AXES
from dcpbench.records.folder import RECORDS_FILE, find_runs
from dcpbench.records.record import get_device, is_forecast
from dcpbench.records.runs import compute_measurement_digest, read_run
from dcpbench.reports.joined_runs import find_device_names
from dcpbench.show.text import fit_name, format_list, make_natural_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dcpbench.compare.comparison import SideName
    from dcpbench.points.point import Point
    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run

MAX_POINTS = 10_000  # maximum number of points that both sides share; each takes milliseconds
FIELDS = tuple(  # fields of a point and its load that `across` may ignore; live is never compared with replay
    axis.name for axis in (*AXES, *LOAD_AXES) if axis.name not in ("repeat", "workload", "mode")
)


Side = list[tuple["Run", list["Record"]]]  # records of a point by launch; launches without the point are left out


@dataclasses.dataclass(frozen=True)
class Pair:
    """Hold a point that both sides have."""

    a: Side
    b: Side

    @property
    def point(self) -> Point:
        """Point of A, first repeat."""
        return self.a[0][1][0].point

    @property
    def records(self) -> list[Record]:
        """Return the records of both sides."""
        return [record for _, found in (*self.a, *self.b) for record in found]

    @property
    def forecasts(self) -> list[SideName]:
        """Sides of which any record is a forecast."""
        sides = zip(SIDES, (self.a, self.b), strict=True)
        return [name for name, side in sides if any(is_forecast(record) for _, found in side for record in found)]

    @property
    def shares_records(self) -> bool:
        """Return True if a record of A is also one of B, as in a copy of its folder."""
        a, b = ({one for _, found in side for r in found if (one := _compute_identity(r))} for side in (self.a, self.b))
        return not a.isdisjoint(b)


@dataclasses.dataclass(frozen=True)
class Matched:
    """Hold all points of two sides, matched."""

    pairs: list[Pair]
    only_a: list[Record]  # records of points that the other side lacks, one for each
    only_b: list[Record]
    broken_a: list[Record]  # points that ran in B and not in A, as A's record, which has the reason
    broken_b: list[Record]


def read_side(paths: Sequence[Path]) -> list[Run]:
    """Read the launches at these paths: run folders, their records.jsonl, or folders that hold several runs.

    A folder that is named twice counts once. Raise RecordsError if a path holds no records.
    """
    folders = [inside for path in paths for inside in _find_launches(path)]
    unique = {folder.resolve(): folder for folder in folders}
    launches = []
    for folder in unique.values():
        run = read_run(folder)
        if not run.records:
            raise RecordsError(f"{folder} holds no records yet; wait for its run, or name another one.")
        launches.append(run)
    return launches


def match_points(a: Sequence[Run], b: Sequence[Run], across: Sequence[str] = ()) -> Matched:
    """Match points of A with the same points of B; without the fields in `across` several points may be the same.

    Raise UsageError for fields that no point has, if a point could be compared with several, if a side has points of several GPUs, and
    for too many points.
    """
    if unknown := [name for name in across if name not in FIELDS]:
        raise UsageError(f"--across {unknown[0]}: no point has that; give some of {', '.join(FIELDS)}.")
    sides = [_group_by_point(launches, across) for launches in (a, b)]
    if across:
        _check_one_each(sides, across)
    devices = find_device_names([*a, *b])
    for name, side in zip("AB", sides, strict=True):
        _check_one_device(side, name, devices)
    keys = list(dict.fromkeys([*sides[0], *sides[1]]))
    found = Matched([], [], [], [], [])
    for key in keys:
        left, right = (side.get(key, []) for side in sides)
        if not left or not right:
            (found.only_a if left else found.only_b).append((left or right)[0][1][0])
            continue
        ran = [
            [(launch, ok) for launch, records in side if (ok := [r for r in records if has_results(r)])]
            for side in (left, right)
        ]
        if all(ran):
            found.pairs.append(Pair(*ran))
        elif any(ran):
            (found.broken_b if ran[0] else found.broken_a).append((right if ran[0] else left)[0][1][0])
    if len(found.pairs) > MAX_POINTS:
        raise UsageError(
            f"{len(found.pairs):,} points are in both, more than the {MAX_POINTS:,} that are compared at once; "
            "compare folders that hold fewer."
        )
    return found


def find_differing_fields(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Return the fields with different values on the two sides: the differences between two variants of one sweep."""
    points = [[r.point for launch in side for r in launch.records] for side in (a, b)]
    values = ([p.get_values(~Role.REPEAT) for p in side] for side in points)
    taken = [{name: {str(v.get(name)) for v in side} for name in FIELDS} for side in values]
    return [name for name in FIELDS if taken[0][name] != taken[1][name]]


def find_fields_apart(a: Point, b: Point) -> list[str] | None:
    """Return the fields that `across` has to ignore to match two points; None if it cannot, as for live and replay."""
    one, other = (p.get_values(~Role.REPEAT) for p in (a, b))
    names = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    return None if set(names) - set(FIELDS) else sorted(names, key=FIELDS.index)


def has_results(record: Record) -> bool:
    """Return True if the record has anything to compare."""
    return record.outcome == "ok" and (record.metrics is not None or record.serve is not None)


def _find_launches(path: Path) -> list[Path]:
    inside = find_runs(path)
    if not inside:
        raise RecordsError(f"{path} holds no {RECORDS_FILE}; name the folder of a run, or one that holds several runs.")
    return sorted(inside, key=lambda folder: make_natural_key(folder.name))


def _make_key(point: Point, across: Sequence[str]) -> str:
    """Return the identity of a point without its repeat and the fields in `across`."""
    return "/".join(f"{name}={value}" for name, value in point.get_values(~Role.REPEAT).items() if name not in across)


def _group_by_point(launches: Sequence[Run], across: Sequence[str]) -> dict[str, Side]:
    """Group the records of each launch by point; an exact copy of a measurement counts once."""
    found: dict[str, Side] = {}
    seen: set[bytes] = set()
    replayed: set[tuple[str, str]] = set()
    for launch in launches:
        here: dict[str, list[Record]] = {}
        for record in launch.records:
            if one := _compute_identity(record):
                if one in seen:
                    continue
                seen.add(one)
            here.setdefault(_make_key(record.point, across), []).append(record)
        for key, records in here.items():
            if not _is_repeated_replay(records, launch, replayed, key):
                found.setdefault(key, []).append((launch, records))
    return found


def _compute_identity(record: Record) -> bytes:
    """Return the identity of a measurement and its copies; empty if it is unknown when it was measured.

    Files of other tools have no start, but times of requests, which no two measurements have in common.
    """
    known = record.started_at or record.origin
    return compute_measurement_digest(record) if has_results(record) and known else b""


def _is_repeated_replay(records: Sequence[Record], launch: Run, seen: set[tuple[str, str]], key: str) -> bool:
    """Return True if these are replays with step times that an earlier launch replayed with: those are one measurement.

    Step times in the launch's own folder were measured by it.
    """
    names = {r.conditions.step_times for r in records if r.conditions and r.conditions.step_times}
    shared = {(key, name) for name in names if not (launch.folder / name).is_file()}
    known = bool(shared & seen)
    seen |= shared
    return known


def _check_one_device(side: dict[str, Side], name: str, devices: Mapping[str, str]) -> None:
    """Raise UsageError if a side ran on different GPUs: their difference would count as noise, or as a difference between A and B.

    `devices` are the shown names of devices that dcpbench measured (find_device_names).
    """
    ran = {
        device: launch.name
        for launches in side.values()
        for launch, records in launches
        for record in records
        if has_results(record) and (device := devices.get(get_device(record) or ""))
    }
    if len(ran) > 1:
        where = format_list([f"on {fit_name(device)} in {fit_name(launch)}" for device, launch in ran.items()])
        raise UsageError(
            f"points of {name} ran {where}, and one side is one variant on one kind of GPU; name runs of one GPU as A, and those of "
            "another GPU as B or in a comparison of their own."
        )


def _check_one_each(sides: Sequence[dict[str, Side]], across: Sequence[str]) -> None:
    for side, name in zip(sides, "AB", strict=True):
        for found in side.values():
            points = {record.point.get_key_without_repeat() for _, records in found for record in records}
            if len(points) > 1:
                raise UsageError(
                    f"without {', '.join(across)} several points of {name} become the same point, so that it is unclear "
                    "which one to compare; measure one value on each side (perhaps with --no-baseline)."
                )
