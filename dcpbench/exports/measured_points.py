"""Select the points that are exported, name them, and decide which of them count as measured."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from dcpbench.points.names import MOE_EP, UNKNOWN
from dcpbench.records import metrics
from dcpbench.records.record import WRONG_RESULTS, get_origin, is_forecast, is_functional
from dcpbench.reports import load_labels
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from dcpbench.records.record import Record

FUNCTIONAL, REPLAYED, EMULATED = "functional", "replay", "emulated"  # `standing` of points without a measured speed


@dataclasses.dataclass(frozen=True)
class MeasuredPoint:
    """Hold one record of a run."""

    run: str
    folder: Path  # folder of the record's files
    record: Record

    @property
    def origin(self) -> str:
        """Return the tool that measured it."""
        return get_origin(self.record)

    @property
    def device(self) -> str:
        """Return `NVIDIA H200`, `CPU`, or an empty string if it is unknown."""
        return self.record.environment.device if self.record.environment else ""

    @property
    def standing(self) -> str:
        """Return `functional` for a CPU, `replay`, `emulated` if one rank ran for all, else an empty string."""
        if is_functional(self.record):
            return FUNCTIONAL
        if is_forecast(self.record):
            return EMULATED
        return REPLAYED if self.record.point.replayed else ""

    @property
    def point_id(self) -> str:
        """Return 12 digits that are equal for all repeats of a point, and different for every other point."""
        return compute_digest(self.record.point.get_key_without_repeat())


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describe a kind of point that a format cannot or must not carry."""

    reason: str  # reason that completes `3 points left out: …`
    holds: Callable[[MeasuredPoint], bool]


DID_NOT_RUN = Rule("without a result", lambda m: m.record.outcome != "ok" or not (m.record.metrics or m.record.serve))
DECODE_STEPS = Rule(
    "of decode steps, which have no requests", lambda m: m.record.serve is None or m.record.point.load is None
)
ON_CPU = Rule("from a functional run on a CPU, which does not measure performance", lambda m: m.standing == FUNCTIONAL)
IN_REPLAY = Rule("from a replay, which is computed and not measured", lambda m: m.standing == REPLAYED)
IN_EMULATION = Rule(
    "from a forecast, for which one rank ran and communication was modelled", lambda m: m.standing == EMULATED
)
COMPUTED_WRONG = Rule(
    "with wrong computation (see their warnings)", lambda m: bool(set(WRONG_RESULTS) & set(m.record.warnings))
)
PUBLIC = (DID_NOT_RUN, ON_CPU, IN_REPLAY, IN_EMULATION, COMPUTED_WRONG)  # points never published next to others


def filter_points(points: Iterable[MeasuredPoint], *rules: Rule) -> tuple[list[MeasuredPoint], Counter[str]]:
    """Return the points to which no rule applies, and the number of points excluded by each first matching rule."""
    kept: list[MeasuredPoint] = []
    left_out: Counter[str] = Counter()
    for point in points:
        reason = next((rule.reason for rule in rules if rule.holds(point)), None)
        if reason is None:
            kept.append(point)
        else:
            left_out[reason] += 1
    return kept, left_out


def group_repeats(points: Iterable[MeasuredPoint]) -> list[list[MeasuredPoint]]:
    """Group repeats of a point, in order of their first; measured points are never grouped with others."""
    groups: dict[tuple[str, str, str, str], list[MeasuredPoint]] = {}
    for m in points:
        groups.setdefault((m.run, m.origin, m.standing, m.record.point.get_key_without_repeat()), []).append(m)
    return list(groups.values())


def collect_values(group: Sequence[MeasuredPoint]) -> list[metrics.Value]:
    """Return the known and finite values of a point, in the order of the catalogue."""
    return metrics.merge_values([m.record for m in group], metrics.list_exported_metrics())


def make_names(groups: Sequence[Sequence[MeasuredPoint]]) -> list[str]:
    """Return a unique name for each point that is the same whenever the same points are exported.

    `deepseek-v3 tp4·dcp4 ag_rs flashinfer bf16, decode: 8 × 4,000`; the run comes first if there are several.
    """
    several = len({group[0].run for group in groups}) > 1
    plain = [_make_name(group[0], several=several) for group in groups]
    count = Counter(plain)
    return [f"{n} #{group[0].point_id[:6]}" if count[n] > 1 else n for n, group in zip(plain, groups, strict=True)]


def compute_digest(text: str) -> str:
    """Return 12 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _make_name(m: MeasuredPoint, *, several: bool) -> str:
    point = m.record.point
    in_layout = point.dp > 1 or point.ep in (MOE_EP, UNKNOWN)
    ep = "" if in_layout else f"ep {point.ep}"  # this name must not change: histories of others match on it
    who = [
        point.model,
        point.layout_name,
        ep,
        point.format_exchange_label(),
        point.backend,
        point.precision,
        point.settings,
    ]
    if point.load is None:
        load = f"{point.workload}: {point.concurrency:,} × {point.context:,}"
    else:
        load = f"{point.workload}: {load_labels.format_served_load(point)}"
    standing = f" [{m.standing}]" if m.standing else ""
    run = f"{fit_name(m.run)}: " if several else ""
    return f"{run}{' '.join(fit_name(w) for w in who if w)}, {fit_name(load)}{standing}"
