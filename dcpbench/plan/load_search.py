"""Find the highest load that meets the SLO: bounds, the next load to measure, and what the measured loads show. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.counts import parse_count
from dcpbench.points.names import format_flag
from dcpbench.records.objectives import judge_latencies
from dcpbench.records.record import format_reason
from dcpbench.serving.loads import count_sessions
from dcpbench.show.text import format_capitalized, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.points.point import Point
    from dcpbench.points.structured_options import Find
    from dcpbench.records.objectives import JudgedObjective
    from dcpbench.records.record import Record, ServeMetrics

CONCURRENCY, RATE = LOADS = ("concurrency", "rate")
TOLERANCE = 0.05  # share by which the lowest load that fails is above the highest that holds, at the end of a search
MAX_LOADS = 12  # that a search measures
FACTOR = 4  # between the loads that are measured until one holds and one does not
GAP_RATIOS = (2.01, 1.4)  # ratio of neighbouring loads from which a live and a replayed load between them is checked
KNEE_SHARE = 0.1  # by which output grows at most from the knee to the highest measured load
FALLS_BY = 0.1  # share by which a latency is lower under a higher load if it does not rise with the load
FALLING_WARN_RATIO = 0.7  # share of a limit from which a latency that falls is reported
RECHECK_RATIO = 0.9  # share of a limit from which any gap next to a load is checked, as other loads in it may not hold
SCATTER = 0.05  # share of a limit by which latencies of neighbouring loads may differ without a trend
DEFAULT_BOUNDS = {CONCURRENCY: (1.0, 256.0), RATE: (0.01, 100.0)}
STARTS = {CONCURRENCY: 8.0, RATE: 1.0}
LIVE_REPEATS = 3  # default number of runs of a live load
UNITS = {CONCURRENCY: ("client", "clients"), RATE: ("request/s", "requests/s")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRange:
    """Hold the bounds of a search, and how often each live load runs."""

    name: str  # CONCURRENCY or RATE
    low: float
    high: float
    repeats: int = LIVE_REPEATS
    given: bool = False  # False for the default bounds

    @property
    def field(self) -> str:
        """Return the option that sets such a load."""
        return "concurrency" if self.name == CONCURRENCY else "request_rate"

    @property
    def start(self) -> float:
        """Return the first load to measure."""
        return min(max(STARTS[self.name], self.low), self.high)

    def divide(self, low: float, high: float) -> float | None:
        """Return a load between two, half way by their ratio; None if there is none."""
        middle = math.sqrt(low * high)
        if self.name == RATE:
            return float(f"{middle:.4g}")
        whole = float(round(middle))
        return next((load for load in (whole, whole + 1, whole - 1) if low < load < high), None)

    def lower(self, load: float) -> float:
        """Return a load that is lower by FACTOR, or the lower bound."""
        found = load / FACTOR
        return max(float(math.floor(found)) if self.name == CONCURRENCY else found, self.low)

    def is_narrow(self, low: float, high: float) -> bool:
        """Return True if the limit between two loads is known well enough."""
        return high <= low * (1 + TOLERANCE) or self.divide(low, high) is None

    def format(self, load: float) -> str:
        """Return a load with its unit, such as `12 clients`."""
        return f"{load:,.4g} {UNITS[self.name][load != 1]}"


def make_load_range(find: Find) -> LoadRange:
    """Return the bounds of `--find`. Raise UsageError."""
    given = [name for name in LOADS if getattr(find, name) is not None]
    names = given + ([] if find.load is None else [find.load])
    if len(names) != 1 or names[0] not in LOADS:
        what = f"--find {find.load}" if find.load not in (None, *LOADS) else "--find"
        raise UsageError(f"{what} searches for one of {' and '.join(LOADS)}; write for example --find concurrency.")
    name = names[0]
    repeats = LIVE_REPEATS if find.repeats is None else find.repeats
    if repeats < 1:
        raise UsageError(f"--find repeats={repeats} is not positive; write for example repeats={LIVE_REPEATS}.")
    low, high = _parse_bounds(name, getattr(find, name)) if given else DEFAULT_BOUNDS[name]
    return LoadRange(name=name, low=low, high=high, repeats=repeats, given=bool(given))


def check_search(bounds: LoadRange, given: Mapping[str, object]) -> None:
    """Raise UsageError for options that a search contradicts, and without objectives."""
    if not given.get("slo"):
        raise UsageError(
            "--find searches for the highest load that meets an SLO; add for example --slo ttft=2000,itl=60."
        )
    taken = ["request_rate", *(["concurrency"] if bounds.name == CONCURRENCY else [])]
    for name in (name for name in taken if given.get(name) is not None):
        raise UsageError(f"--find {bounds.name} and {format_flag(name)} contradict each other; leave one of them out.")
    if given.get("repeats") is not None:
        raise UsageError("--repeats is for a grid; write --find repeats=N for the runs of each load.")


def limit_clients(bounds: LoadRange, loads: ServeLoads) -> LoadRange:
    """Return the bounds with as many clients at most as there are requests or sessions.

    Raise UsageError if an upper bound was given that is higher.
    """
    if bounds.name == RATE:
        return bounds
    _, load = next(dataclasses.replace(loads, concurrency=()).iter_loads())
    most = count_sessions(load)
    if bounds.given and bounds.high > most:
        what = "sessions" if load.sessions else "requests"
        fewer = f"write concurrency={bounds.low:g}-{most}, or " if bounds.low < most else ""
        raise UsageError(
            f"--find concurrency={bounds.low:g}-{bounds.high:g}: more clients than there are {what} ({most:,}); {fewer}use "
            f"{loads.suggest_requests(10 * int(bounds.high))}."
        )
    return dataclasses.replace(bounds, high=min(bounds.high, float(most)))


def set_load(loads: ServeLoads, bounds: LoadRange, load: float) -> ServeLoads:
    """Return the loads of a grid at one load of a search."""
    if bounds.name == CONCURRENCY:
        return dataclasses.replace(loads, concurrency=(int(load),))
    return dataclasses.replace(loads, request_rate=(load,))


def get_load(point: Point, bounds: LoadRange) -> float:
    """Return the load of a point of a search."""
    assert point.load is not None
    return float(point.concurrency if bounds.name == CONCURRENCY else point.load.request_rate or 0.0)


def make_layout_key(point: Point, bounds: LoadRange) -> str:
    """Return a key that is equal for all loads of a search of one layout, and their repeats."""
    assert point.load is not None
    if bounds.name == CONCURRENCY:
        return msgspec.structs.replace(point, repeat=0, concurrency=0).get_key()
    return msgspec.structs.replace(
        point, repeat=0, load=msgspec.structs.replace(point.load, request_rate=None)
    ).get_key()


def _parse_bounds(name: str, text: str) -> tuple[float, float]:
    """Return the bounds of `1-256`. Raise UsageError for text that has none."""
    low, high = DEFAULT_BOUNDS[name]
    try:
        first, last = text.split("-")
        bounds = tuple(_parse_load(name, part) for part in (first, last))
    except ValueError:
        bounds = ()
    if not bounds or not 0 < bounds[0] < bounds[1] < math.inf:
        raise UsageError(
            f"--find {name}={text}: not two loads, the lower one first; write for example {name}={low:g}-{high:g}."
        )
    return bounds[0], bounds[1]


def _parse_load(name: str, text: str) -> float:
    """Return a number of clients or a rate. Raise ValueError for other text."""
    found = float(text) if name == RATE else parse_count(text)
    if found is None:
        raise ValueError(text)
    return float(found)


def choose_next_load(
    slo_ratios: Mapping[float, float], bounds: LoadRange, count: int, *, replayed: bool
) -> float | None:
    """Return the load to measure next, or None at the end of the search.

    `slo_ratios`: largest latency of each measured load over its limit, see MeasuredLoad.slo_ratio; a load with more than 1 does not hold.
    `count`: how many loads the search has chosen so far.

    From the start loads grow or shrink by FACTOR until one holds and a higher one does not, and are then bisected by their
    ratio. Gaps between the measured loads are checked at last, since bisection alone would never see that a latency does not rise with
    the load, or that it scatters around its limit.
    """
    if count >= MAX_LOADS:
        return None
    if not slo_ratios:
        return bounds.start
    limit, failed = find_limit({load: slo_ratio <= 1 for load, slo_ratio in slo_ratios.items()})
    if failed is None:
        return (
            _choose_check(slo_ratios, bounds, bounds.high, GAP_RATIOS[replayed])
            if limit == bounds.high
            else min(max(slo_ratios) * FACTOR, bounds.high)
        )
    if limit is None:
        return None if failed == bounds.low else bounds.lower(failed)
    if not bounds.is_narrow(limit, failed):
        return bounds.divide(limit, failed)
    return _choose_check(slo_ratios, bounds, limit, GAP_RATIOS[replayed])


def _choose_check(slo_ratios: Mapping[float, float], bounds: LoadRange, limit: float, gap: float) -> float | None:
    """Return a load between two neighbouring measured loads; None if no such pair is left, or MAX_LOADS are measured.

    A pair is left if the ratio of its loads is at least `gap`. Below `limit`, the highest load that holds, it is also left if one of
    its loads reaches a share of RECHECK_RATIO and the pair is wider than the tolerance. Pairs below `limit` come first, in descending
    order of the logarithm of their ratio over the distance of the larger share from 1 + SCATTER; then the others, widest first.
    """

    def rank(pair: tuple[float, float]) -> tuple[bool, float]:
        low, high = pair
        if low >= limit:
            return True, low / high
        return False, -math.log(high / low) / (1 - max(slo_ratios[low], slo_ratios[high]) + SCATTER)

    pairs = itertools.pairwise(sorted(slo_ratios) if len(slo_ratios) < MAX_LOADS else ())
    wide = [
        (low, high)
        for low, high in pairs
        if high >= low * gap
        or (
            high <= limit
            and max(slo_ratios[low], slo_ratios[high]) >= RECHECK_RATIO
            and not bounds.is_narrow(low, high)
        )
    ]
    return next((load for pair in sorted(wide, key=rank) if (load := bounds.divide(*pair)) is not None), None)


def find_limit(holds: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """Return the highest load up to which all measured loads hold, and the lowest that does not; None if there is none."""
    failed = min((load for load, held in holds.items() if not held), default=None)
    held = [load for load, held in holds.items() if held and (failed is None or load < failed)]
    return max(held, default=None), failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLoad:
    """Hold the runs of one load."""

    load: float
    records: Sequence[Record]
    slo: Mapping[str, float]

    @property
    def held(self) -> int:
        """Return how many of its runs meet the SLO."""
        return sum(does_hold(record, self.slo) for record in self.records)

    @property
    def holds(self) -> bool:
        """Return True if more than half of its runs meet the SLO, so that the one in the middle does."""
        return self.slo_ratio <= 1

    @property
    def slo_ratio(self) -> float:
        """Return the largest latency over its limit, of the run in the middle; the load holds up to 1.

        It is infinite for a run that left a request unanswered, or has an objective without a latency.
        """
        slo_ratios = sorted(_compute_slo_ratio(record, self.slo) for record in self.records)
        return slo_ratios[len(slo_ratios) // 2]

    @property
    def metrics(self) -> ServeMetrics | None:
        """Return the metrics of the run that decides: the one in the middle, by the worst share of a limit."""
        served = [record.serve for record in self.records if record.outcome == "ok" and record.serve is not None]
        ordered = sorted(served, key=lambda serve: _compute_excess(judge_latencies(serve, self.slo)))
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def objectives(self) -> list[JudgedObjective]:
        """Return the objectives as this load meets or misses them."""
        return judge_latencies(self.metrics, self.slo) if self.metrics else []

    @property
    def reason(self) -> str:
        """Return why the load could not be measured, or which requests were not answered; empty otherwise."""
        if self.metrics is None:
            return format_reason(self.records[0]) or self.records[0].outcome
        unanswered = (self.metrics.failed or 0) + (self.metrics.rejected or 0)
        return self._format_share(unanswered, "failed or were rejected")

    @property
    def cut_off(self) -> str:
        """Return how many requests had no full answer when the time limit of the load ended it; empty if none."""
        return self._format_share((self.metrics and self.metrics.cancelled) or 0, "cut off, with unknown latency")

    def _format_share(self, count: int, what: str) -> str:
        submitted = (self.metrics and self.metrics.submitted) or 0
        return f"{count:,} of {submitted:,} requests {what}" if count else ""

    def to_json(self) -> dict[str, object]:
        """Return the load with its results, for --json."""
        serve = self.metrics
        return {
            "load": self.load,
            "holds": self.holds,
            "runs": len(self.records),
            "runs_held": self.held,
            "objectives": [dataclasses.asdict(judged) | {"met": judged.met} for judged in self.objectives],
            "output_tok_s": serve and serve.output_tok_s,
            "steady_tok_s": serve and serve.steady_tok_s,
            "request_throughput": serve and serve.request_throughput,
            "reason": self.reason,
            "cancelled": serve and serve.cancelled,
        }


def does_hold(record: Record, slo: Mapping[str, float]) -> bool:
    """Return True if a run meets every objective and left no request unanswered."""
    serve = record.serve
    if record.outcome != "ok" or serve is None or serve.failed or serve.rejected:
        return False
    return all(judged.met for judged in judge_latencies(serve, slo))


def _compute_slo_ratio(record: Record, slo: Mapping[str, float]) -> float:
    """Return the largest latency of a run over its limit; infinite if the run does not meet the SLO for another reason."""
    slo_ratio = math.inf if record.serve is None else _compute_excess(judge_latencies(record.serve, slo))
    return slo_ratio if slo_ratio > 1 or does_hold(record, slo) else math.inf


def _compute_excess(objectives: Sequence[JudgedObjective]) -> float:
    """Return the largest latency over its limit."""
    return max((math.inf if o.ms is None else o.ms / o.limit_ms for o in objectives), default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundLoad:
    """Hold the result of a search for one layout."""

    label: str  # layout and path
    replayed: bool
    bounds: LoadRange
    measured: Sequence[MeasuredLoad]  # by load

    @property
    def holds(self) -> dict[float, bool]:
        """Return which loads hold."""
        return {one.load: one.holds for one in self.measured}

    @property
    def highest_passing_load(self) -> MeasuredLoad | None:
        """Return the highest load up to which all measured loads hold."""
        return self._get(find_limit(self.holds)[0])

    @property
    def failed(self) -> MeasuredLoad | None:
        """Return the lowest load that does not hold."""
        return self._get(find_limit(self.holds)[1])

    @property
    def higher(self) -> MeasuredLoad | None:
        """Return the highest load that holds above one that does not."""
        failed = self.failed
        return next((one for one in reversed(self.measured) if failed and one.holds and one.load > failed.load), None)

    @property
    def falling(self) -> tuple[MeasuredLoad, MeasuredLoad, int] | None:
        """Return (lower load, higher load, index of the objective) for two neighbouring loads where a latency near its limit
        falls although the load rises.
        """
        for below, above in itertools.pairwise(one for one in self.measured if one.holds):
            for number, (first, second) in enumerate(zip(below.objectives, above.objectives, strict=False)):
                near = first.ms is not None and first.ms > first.limit_ms * FALLING_WARN_RATIO
                if near and first.ms and second.ms and second.ms < first.ms * (1 - FALLS_BY):
                    return below, above, number
        return None

    @property
    def within_tolerance(self) -> bool:
        """Return True if the limit is known within the tolerance or lies beyond the bounds."""
        limit, failed = find_limit(self.holds)
        if limit is None or failed is None:
            return failed == self.bounds.low or limit == self.bounds.high
        return self.bounds.is_narrow(limit, failed)

    @property
    def unmeasured(self) -> MeasuredLoad | None:
        """Return the lowest load that does not hold if it could not be measured; None if it was."""
        return self.failed if self.failed and self.failed.metrics is None else None

    @property
    def knee(self) -> MeasuredLoad | None:
        """Return the lowest load above which output grows by KNEE_SHARE at most while a latency grows; None if there is none."""
        served = [one for one in self.measured if one.metrics is not None]
        if len(served) < 3:  # noqa: PLR2004 -- two loads have no bend between them
            return None
        last = served[-1]
        outputs = [one.metrics.output_tok_s for one in served if one.metrics]
        found = served[next(i for i, output in enumerate(outputs) if max(outputs) <= output * (1 + KNEE_SHARE))]
        grows = _compute_excess(last.objectives) > _compute_excess(found.objectives)
        return found if last.load >= found.load * GAP_RATIOS[0] and grows else None

    def _get(self, load: float | None) -> MeasuredLoad | None:
        return next((one for one in self.measured if one.load == load), None)

    def to_json(self) -> dict[str, object]:
        """Return the result for --json."""
        limit, failed, higher, knee = self.highest_passing_load, self.failed, self.higher, self.knee
        return {
            "layout": self.label,
            "find": self.bounds.name,
            "bounds": [self.bounds.low, self.bounds.high],
            "slo": dict(self.measured[0].slo),
            "limit": limit and limit.to_json(),
            "fails": failed and failed.to_json(),
            "within_tolerance": self.within_tolerance,
            "limit_measured": self.unmeasured is None,
            "deterministic": self.replayed,
            "higher_load_that_holds": higher and higher.to_json(),
            "monotone": higher is None and self.falling is None,
            "knee": knee and knee.to_json(),
            "loads": [one.to_json() for one in self.measured],
            "runs": sum(len(one.records) for one in self.measured),
        }

    def format(self) -> str:
        """Return the result in sentences."""
        return " ".join(
            filter(None, (self._format_limit(), self._format_runs(), self._format_not_monotone(), self._format_knee()))
        )

    def _format_limit(self) -> str:
        limit, failed = self.highest_passing_load, self.failed
        if limit is None:
            return f"{self.label}: no load meets the SLO; the lowest is {self._format_load(self.measured[0])}."
        text = f"{self.label}: the highest load that meets the SLO is {self._format_load(limit)}"
        if failed is None:
            return f"{text}, the upper bound of the search; the limit may be higher."
        if self.unmeasured:
            return f"{text}. {format_capitalized(self.bounds.format(failed.load))} could not be measured, so the limit may be higher: {failed.reason.rstrip('.')}."
        return f"{text}. The lowest that does not: {self._format_load(failed)}."

    def _format_load(self, one: MeasuredLoad) -> str:
        """Return a load with its latencies, or why it has none: `12 clients (TTFT p99 512 ms, ITL p99 41 ms; 310 tok/s)`."""
        parts = [", ".join(judged.format() for judged in one.objectives)]
        parts += [f"{one.metrics.output_tok_s:,.4g} tok/s"] if one.metrics else []
        parts += [
            one.reason,
            one.cut_off,
            "" if self.replayed else f"{one.held} of {len(one.records)} runs meet the SLO",
        ]
        return f"{self.bounds.format(one.load)} ({'; '.join(filter(None, parts))})"

    def _format_runs(self) -> str:
        runs = sum(len(one.records) for one in self.measured)
        text = f"{format_count(len(self.measured), 'load')}, {format_count(runs, 'run')}"
        if not self.within_tolerance:
            return f"{text}: the search ended before both were within {TOLERANCE:.0%}."
        return f"{text}; a replay is deterministic, so each load ran once." if self.replayed else f"{text}."

    def _format_not_monotone(self) -> str:
        """Return a sentence if a higher load holds and a lower one does not, or if a latency falls; empty otherwise."""
        if self.higher and self.failed:
            return (
                f"Latency does not rise with the load: {self._format_load(self.higher)} meet the SLO although "
                f"{self.bounds.format(self.failed.load)} do not, so that loads between may meet it or not."
            )
        if self.falling:
            below, above, number = self.falling
            values = [f"{one.objectives[number].format()} at {self.bounds.format(one.load)}" for one in (below, above)]
            return f"Latency does not rise with the load: {' and '.join(values)}, so that loads between them may miss the SLO."
        return ""

    def _format_knee(self) -> str:
        if self.knee is None:
            return ""
        return f"Knee: above {self.bounds.format(self.knee.load)} output grows by less than {KNEE_SHARE:.0%} while latency grows."
