"""The points that are exported: which there are, what to call them, and which of them may pass as measured."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from dcpbench.points.names import REPLAY, UNKNOWN, WHOLE
from dcpbench.records import metrics
from dcpbench.records.record import forecast, functional, origin
from dcpbench.reports import words
from dcpbench.show.text import short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run

FUNCTIONAL, REPLAYED, EMULATED = "functional", "replay", "emulated"
"""Standings of what is no measurement of speed."""
WRONG = ("graph_differs", "inaccurate")
"""Marks of points that computed something else than they should."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One record of a run."""

    run: str
    folder: Path
    """Where the record's files lie."""
    record: Record

    @property
    def origin(self) -> str:
        """The tool that measured it."""
        return origin(self.record)

    @property
    def device(self) -> str:
        """`NVIDIA H200`, `CPU`, or nothing where nobody says."""
        return self.record.environment.device if self.record.environment else ""

    @property
    def standing(self) -> str:
        """`functional` for a run on a CPU, `replay` for what was computed in virtual time, `emulated` where one rank stood
        for all, or nothing.
        """
        if functional(self.record):
            return FUNCTIONAL
        if forecast(self.record):
            return EMULATED
        load = self.record.point.load
        return REPLAYED if load is not None and load.mode == REPLAY else ""

    @property
    def point_id(self) -> str:
        """The same 12 digits for all repeats of a point, other ones for every other point."""
        return digest(self.record.point.same_but_repeat())


def of_runs(runs: Sequence[Run]) -> list[Measured]:
    """Return every point of these runs, the last record of each."""
    return [Measured(run.name, run.folder, record) for run in runs for record in run.records]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a format cannot carry, or must not."""

    reason: str
    """Completes `3 points left out: …`."""
    holds: Callable[[Measured], bool]


DID_NOT_RUN = Rule("did not run", lambda m: m.record.outcome != "ok" or not (m.record.metrics or m.record.serve))
DECODE_STEPS = Rule(
    "decode steps, which have no requests", lambda m: m.record.serve is None or m.record.point.load is None
)
ON_CPU = Rule("functional runs on a CPU, whose times mean nothing", lambda m: m.standing == FUNCTIONAL)
IN_REPLAY = Rule("replays, which are computed and not measured", lambda m: m.standing == REPLAYED)
IN_EMULATION = Rule("forecasts, of which one rank ran and its wire was modelled", lambda m: m.standing == EMULATED)
COMPUTED_WRONG = Rule("computed something wrong (see their marks)", lambda m: bool(set(WRONG) & set(m.record.marks)))
PUBLIC = (DID_NOT_RUN, ON_CPU, IN_REPLAY, IN_EMULATION, COMPUTED_WRONG)
"""What never goes to where results of others stand beside ours."""


def sieve(points: Iterable[Measured], *rules: Rule) -> tuple[list[Measured], Counter[str]]:
    """The points that no rule holds for, and how many each first rule kept out."""
    kept: list[Measured] = []
    left_out: Counter[str] = Counter()
    for point in points:
        reason = next((rule.reason for rule in rules if rule.holds(point)), None)
        if reason is None:
            kept.append(point)
        else:
            left_out[reason] += 1
    return kept, left_out


def by_point(points: Iterable[Measured]) -> list[list[Measured]]:
    """Repeats of a point together, in order of their first; never one that was measured with one that was not."""
    groups: dict[tuple[str, str, str, str], list[Measured]] = {}
    for m in points:
        groups.setdefault((m.run, m.origin, m.standing, m.record.point.same_but_repeat()), []).append(m)
    return list(groups.values())


def values(group: Sequence[Measured]) -> list[metrics.Value]:
    """What is known of a point, in the order of the catalogue; what was not measured, or is no number, is left out."""
    return metrics.values([m.record for m in group], metrics.exported())


def names(groups: Sequence[Sequence[Measured]]) -> list[str]:
    """A name for each point, different from all others and the same whenever the same points are exported.

    `deepseek-v3 tp4·dcp4 ag_rs flashinfer bf16, decode: 8 × 4,000`; the run in front where there are several.
    """
    several = len({group[0].run for group in groups}) > 1
    plain = [_name(group[0], several=several) for group in groups]
    count = Counter(plain)
    return [f"{n} #{group[0].point_id[:6]}" if count[n] > 1 else n for n, group in zip(plain, groups, strict=True)]


def digest(text: str) -> str:
    """12 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _name(m: Measured, *, several: bool) -> str:
    point = m.record.point
    in_layout = point.dp > 1 or point.ep in (WHOLE, UNKNOWN)
    ep = "" if in_layout else f"ep {point.ep}"  # this name must not change: histories of others match on it
    who = [point.model, point.layout_name, ep, point.exchange_label(), point.backend, point.precision, point.settings]
    if point.load is None:
        load = f"{point.workload}: {point.concurrency:,} × {point.context:,}"
    else:
        load = f"{point.workload}: {words.served(point)}"
    standing = f" [{m.standing}]" if m.standing else ""
    run = f"{short(m.run)}: " if several else ""
    return f"{run}{' '.join(short(w) for w in who if w)}, {short(load)}{standing}"
