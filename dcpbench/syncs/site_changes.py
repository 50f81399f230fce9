"""Compare two reports of `syncs`: which sites are gone or new, and which wait more or less than before. No text is made here.

Sites are matched by fingerprint, which holds no line, and what is left by everything in it but the file. Counts per step are
compared exactly, as by the gate. Times are compared by the mean bubble per step, and where neither report has one, by the mean
wait; a change below a relative and an absolute threshold is noise.
"""

from __future__ import annotations

import collections
import enum
import itertools
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from dcpbench.syncs.gating.baseline import build_entry, group_by_fingerprint
from dcpbench.syncs.gating.gate import SLACK, list_phase_counts
from dcpbench.syncs.site_text import get_site_name
from dcpbench.syncs.sync_report import sum_known

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.syncs.sync_report import Report, Site


class ChangeKind(enum.StrEnum):
    """Name what happened to a site, worst first."""

    NEW = "new"
    WORSE = "worse"
    BETTER = "better"
    GONE = "gone"
    SAME = "same"


class Reason(enum.StrEnum):
    """Name the quantity by which a site is worse or better."""

    COUNT = "count"
    BUBBLE = "bubble"
    WAIT = "wait"


FAILING = (ChangeKind.NEW, ChangeKind.WORSE)


class SiteCost(msgspec.Struct, frozen=True, kw_only=True):
    """A site in one report. Times are means over all steps of all traces, or over traces where none marks steps."""

    rule: str
    kind: str
    name: str  # function, or the range, operator or call without one
    file: str = ""
    line: int | None = None
    op: str = ""
    count: int = 0  # occurrences in all traces
    count_per_step: float | None = None
    count_per_phase: dict[str, float] = {}
    outside: int = 0
    bubble_us: float | None = None  # GPU idle time in a step that removing the waits would win, at most
    wait_us: float | None = None


class SiteChange(msgspec.Struct, frozen=True, kw_only=True):
    """A site of either report, and what happened to it."""

    kind: ChangeKind
    reason: Reason | None = None  # None unless it is worse or better
    old: SiteCost | None = None
    new: SiteCost | None = None
    moved: bool = False  # True if its file has another name
    allowed: str = ""  # reason for which it may synchronise; such a site never fails. Empty without permission.

    @property
    def latest(self) -> SiteCost:
        """Return the site as it is in the new report, or else was in the old one."""
        found = self.new or self.old
        assert found is not None
        return found


class ReportChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a comparison."""

    old_steps: int  # steps of all traces; 0 without marked steps
    new_steps: int
    old_bubble_us: float | None  # sum over all compared sites, per step
    new_bubble_us: float | None
    changes: list[SiteChange]  # new and worse sites first
    reasons: list[str] = []  # why the reports cannot be compared; empty if they can

    def count(self, kind: ChangeKind) -> int:
        """Return the number of sites to which this happened."""
        return sum(change.kind is kind for change in self.changes)

    @property
    def failing(self) -> list[SiteChange]:
        """Return the new and worse sites that are not allowed."""
        return [change for change in self.changes if change.kind in FAILING and not change.allowed]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """By how much the time of a step must differ to count."""

    share: float = 0.2  # relative difference, as a share of the smaller time
    microseconds: float = 10.0


def compare_reports(old: Report, new: Report, thresholds: Thresholds, reasons: Iterable[str] = ()) -> ReportChanges:
    """Compare two reports after permissions of their sites were set.

    Sites of the profiler itself, of warm-up only and those that only may block are left out. `reasons` state why one of the
    reports cannot answer.
    """
    sides = [_count_steps(report) for report in (old, new)]
    marked = [any(trace.steps for trace in report.traces) for report in (old, new)]
    pairs = _match_sites(_group_sites(old), _group_sites(new))
    changes = [_judge(before, after, sides, thresholds) for before, after in pairs]
    order = list(ChangeKind)
    changes.sort(key=lambda c: (order.index(c.kind), -(c.latest.bubble_us or 0.0), c.latest.file, c.latest.name))
    return ReportChanges(
        old_steps=sides[0] if marked[0] else 0,
        new_steps=sides[1] if marked[1] else 0,
        old_bubble_us=_sum_bubbles(old, [change.old for change in changes]),
        new_bubble_us=_sum_bubbles(new, [change.new for change in changes]),
        changes=changes,
        reasons=list(dict.fromkeys([*reasons, *_explain_uneven_steps(marked)])),
    )


def _sum_bubbles(report: Report, costs: Sequence[SiteCost | None]) -> float | None:
    """Return the bubble of all sites in a step: 0 without a site, if GPU work was recorded; None if it is unknown."""
    sites = [cost for cost in costs if cost is not None]
    if not sites and any(trace.gpu_busy_us is not None for trace in report.traces):
        return 0.0
    return sum_known(cost.bubble_us for cost in sites)


def _explain_uneven_steps(marked: Sequence[bool]) -> list[str]:
    if marked[0] == marked[1]:
        return []
    side = "old" if marked[1] else "new"
    advice = "name the range around a step with --step-range '^NAME'."
    return [f"The {side} side marks no steps and the other one does, so that counts cannot be compared: {advice}"]


def _count_steps(report: Report) -> int:
    """Return the steps of all traces, or without steps the number of traces."""
    traces = [trace for trace in report.traces if not trace.front_end]
    return sum(trace.steps or 0 for trace in traces) or len(traces) or 1


Sites = list["Site"]


def _group_sites(report: Report) -> dict[str, Sites]:
    """Group the sites that can count, and allowed ones, by fingerprint."""
    return group_by_fingerprint(s for s in report.sites if not (s.own or s.may_block or s.warmup_only))


def _match_sites(old: dict[str, Sites], new: dict[str, Sites]) -> list[tuple[Sites, Sites]]:
    """Return pairs of the old and the new sites of a place; one of both is empty if it is new or gone."""
    pairs = [(sites, new[key]) for key, sites in old.items() if key in new]
    left = _group_by_place(sites for key, sites in old.items() if key not in new)
    right = _group_by_place(sites for key, sites in new.items() if key not in old)
    for place in dict.fromkeys([*left, *right]):
        pairs += _pair_files(left.get(place, []), right.get(place, []))
    return pairs


def _group_by_place(groups: Iterable[Sites]) -> dict[object, list[Sites]]:
    """Group sites by all of their fingerprint but the file; sites without a name are groups of their own."""
    found: dict[object, list[Sites]] = collections.defaultdict(list)
    for sites in groups:
        site = sites[0]
        place: object = (site.rule, site.function, site.range, tuple(site.op_chain), site.direction)
        found[place if site.function else (site.fingerprint,)].append(sites)
    return found


def _pair_files(old: list[Sites], new: list[Sites]) -> list[tuple[Sites, Sites]]:
    """Pair the sites of one place in files with other names, those with the longest common end of their paths first."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    ranked = sorted(
        ((_rate_likeness(a[0], b[0]), i, j) for i, a in enumerate(old) for j, b in enumerate(new)),
        key=lambda rated: (-rated[0][0], -rated[0][1], rated[1], rated[2]),
    )
    for _, i, j in ranked:
        if i not in pairs and j not in taken:
            pairs[i] = j
            taken.add(j)
    return [
        *((old[i], new[j]) for i, j in pairs.items()),
        *((sites, []) for i, sites in enumerate(old) if i not in pairs),
        *(([], sites) for j, sites in enumerate(new) if j not in taken),
    ]


def _rate_likeness(a: Site, b: Site) -> tuple[int, int]:
    """Return how many last parts of their paths, and how many functions of their stacks are the same."""
    ends = zip(reversed(PurePosixPath(a.file).parts), reversed(PurePosixPath(b.file).parts), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    functions = [{frame.rpartition(": ")[2] for frame in site.stack} for site in (a, b)]
    return same, len(functions[0] & functions[1])


def _judge(old: Sites, new: Sites, steps: Sequence[int], thresholds: Thresholds) -> SiteChange:
    before = _compute_cost(old, steps[0]) if old else None
    after = _compute_cost(new, steps[1]) if new else None
    allowed = next((site.allowed for site in new or old if site.allowed), "")
    if not all(site.allowed for site in new):
        allowed = ""
    if before is None or after is None:
        kind = ChangeKind.NEW if before is None else ChangeKind.GONE
        return SiteChange(kind=kind, old=before, new=after, allowed=allowed)
    kind, reason = _compare_costs(before, after, thresholds)
    return SiteChange(kind=kind, reason=reason, old=before, new=after, moved=before.file != after.file, allowed=allowed)


def _compute_cost(sites: Sites, steps: int) -> SiteCost:
    entry, first = build_entry(sites), sites[0]
    bubbles = [site.bubble_us for site in sites if site.bubble_us is not None]
    waits = [site.wait_us for site in sites if site.wait_us is not None]
    return SiteCost(
        rule=first.rule,
        kind=first.kind,
        name=get_site_name(first),
        file=first.file,
        line=first.line,
        op=first.op or first.call,
        count=sum(site.count for site in sites),
        count_per_step=entry.count_per_step,
        count_per_phase=entry.count_per_phase,
        outside=entry.outside,
        bubble_us=sum(bubbles) / steps if len(bubbles) == len(sites) else None,
        wait_us=sum(waits) / steps if len(waits) == len(sites) else None,
    )


def _compare_costs(old: SiteCost, new: SiteCost, thresholds: Thresholds) -> tuple[ChangeKind, Reason | None]:
    counts = list(_list_count_changes(old, new))
    if any(change > SLACK for change in counts):
        return ChangeKind.WORSE, Reason.COUNT
    if any(change < -SLACK for change in counts):
        return ChangeKind.BETTER, Reason.COUNT
    times = {Reason.BUBBLE: (old.bubble_us, new.bubble_us), Reason.WAIT: (old.wait_us, new.wait_us)}
    for reason, (before, after) in times.items():
        if before is None or after is None:
            continue
        more = abs(after - before)
        if more > thresholds.microseconds and more > thresholds.share * min(before, after):
            return ChangeKind.WORSE if after > before else ChangeKind.BETTER, reason
        return ChangeKind.SAME, None
    return ChangeKind.SAME, None


def _list_count_changes(old: SiteCost, new: SiteCost) -> Iterable[float]:
    """Return by how much each count grew: per step and phase, and outside of steps; in all where a side has no steps."""
    if old.count_per_step is None or new.count_per_step is None:
        return [float(new.count - old.count)]
    phases = [after - before for _, after, before in list_phase_counts(new, old)]
    return [*phases, float(new.outside - old.outside)]
