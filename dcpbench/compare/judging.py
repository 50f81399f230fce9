"""Judge two sides: compute the effects of all rows, correct for all of them, and find what would decide the rest."""

from __future__ import annotations

import dataclasses
import math
import statistics
import zlib
from typing import TYPE_CHECKING, Any, Literal

from dcpbench.compare import effects
from dcpbench.compare.environments import differences, layers_held, marks
from dcpbench.compare.model import WORST_FIRST, Broken, Comparison, PointResult, Row
from dcpbench.compare.samples import Requests, comparable, error_of, requests_of
from dcpbench.compare.sides import apart, match
from dcpbench.compare.words import count_launches
from dcpbench.errors import UsageError
from dcpbench.plan.grid import point_name
from dcpbench.records.metrics import compared
from dcpbench.records.record import forecast, functional
from dcpbench.show.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.compare.model import Workload
    from dcpbench.compare.sides import Matched, Pair
    from dcpbench.points.point import Point
    from dcpbench.records.metrics import Error, Metric
    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run

    Sampled = tuple[Record, Requests]  # a record with its step samples, and its requests

CPU_REASON = "ran on a CPU, whose times say nothing about performance; --allow-cpu judges them all the same"
NO_ENDS = "a forecast has no bounds for this metric; measure the layout to judge it"
WITHIN_ENDS = "it lies within the ends of the forecast; measure the layout to judge it"
NO_SAMPLES = "the records hold no samples, so nothing shows how this scatters; measure at least 4 launches of each side"
MAX_LOG = 700.0  # exp of more does not fit into a double


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Define how two sides are compared."""

    margin: float = 0.01  # two values within this share of each other count as the same
    alpha: float = 0.05  # chance of any FASTER or SLOWER if nothing differs
    launch_noise: float | None = None  # standard deviation of the difference of two launches, if the user knows it
    metrics: Sequence[str] = ()
    across: Sequence[str] = ()
    paired: bool = False
    allow_cpu: bool = False


@dataclasses.dataclass
class _Test:
    """Hold a row that gets a verdict from its effect."""

    row: Row
    effect: effects.Effect


def judge(a: Sequence[Run], b: Sequence[Run], options: Options) -> Comparison:
    """Compare B with A: every metric of every point that both have.

    Raises UsageError if they have no point in common, and for `paired` sides of different length.
    """
    if options.paired and len(a) != len(b):
        raise UsageError(
            f"--paired needs as many launches of A as of B, not {len(a)} and {len(b)}; leave it out to compare sides "
            "that are not made in pairs."
        )
    matched = match(a, b, options.across)
    if not matched.pairs:
        raise UsageError(_nothing(matched))
    tests: list[_Test] = []
    points = [_point(pair, options, a, b, tests) for pair in matched.pairs]
    _decide(tests, options)
    points.sort(key=lambda p: p.rank)
    rows = [row for p in points for row in p.rows]
    cpu = any(functional(r) for pair in matched.pairs for r in pair.records)
    return Comparison(
        a=[printable(x.name) for x in a],
        b=[printable(x.name) for x in b],
        paired=options.paired,
        across=list(options.across),
        margin=options.margin,
        alpha=options.alpha,
        launch_noise=options.launch_noise,
        tests=len(tests),
        counts={v: n for v in WORST_FIRST if (n := sum(row.verdict == v for row in rows))},
        cpu=cpu,
        forecast=any(point.forecast for point in points),
        performance=not cpu or options.allow_cpu,
        differences=differences(matched.pairs),
        points=points,
        only_a=[name_of(r.point) for r in matched.only_a],
        only_b=[name_of(r.point) for r in matched.only_b],
        broken=[*(_broken(r, "a") for r in matched.broken_a), *(_broken(r, "b") for r in matched.broken_b)],
        notes=_notes(a, b, points, options, matched),
        layers_held=layers_held(matched.pairs),
    )


def name_of(point: Point) -> str:
    """Return the point's name in one line, without the repeat."""
    mode = f", {point.load.mode}" if point.load else ""
    try:
        name = point_name(point).partition(", repeat ")[0]
    except (ArithmeticError, ValueError, UsageError):
        name = f"{point.model} tp{point.tp}·dp{point.dp}·dcp{point.dcp} {point.backend} {point.exchange}"
    return printable(name[:300] + ("" if name.endswith(mode) else mode[:20]))


def _point(pair: Pair, options: Options, a: Sequence[Run], b: Sequence[Run], tests: list[_Test]) -> PointResult:
    point, other = pair.point, pair.b[0][1][0].point
    workload: Workload = "serve" if point.load else "decode"
    found = PointResult(
        name=name_of(point),
        other_name=name_of(other) if name_of(other) != name_of(point) else "",
        workload=workload,
        forecast=pair.forecasts,
        mode=printable(point.load.mode[:20]) if point.load else "",
        cpu=any(map(functional, pair.records)),
        marks_a=marks(r for _, rs in pair.a for r in rs),
        marks_b=marks(r for _, rs in pair.b for r in rs),
    )
    sampled: dict[int, Sampled] = {}
    unjudged: list[_Test] = []
    for metric in compared(workload, options.metrics):
        kind = metric.errors.get(workload)
        left, right = ([_values(metric, kind, side) for side in sides] for sides in (pair.a, pair.b))
        if not any(left) or not any(right):
            if any(left) or any(right):
                found.not_compared.append(f"{metric.brief} (absent in {'B' if any(left) else 'A'})")
            continue
        if kind is None:
            found.rows.append(_counted(metric, left, right, options.margin))
            continue
        sides = [
            {
                launch.name: e
                for (launch, records), vs in zip(side, values, strict=True)
                if vs and (e := _estimate(metric, kind, launch, records, sampled))
            }
            for side, values in ((pair.a, left), (pair.b, right))
        ]
        test = _test(metric, sides, options, [x.name for x in a], [x.name for x in b])
        found.rows.append(test.row)
        if metric.name == "step_ms":
            found.output_tok_s = (point.concurrency * 1e3 / test.row.a, point.concurrency * 1e3 / test.row.b)
        unsure = _unsure(metric, pair)
        if found.cpu and not options.allow_cpu:
            test.row.reason = CPU_REASON
        elif unsure is None:
            test.row.reason = NO_ENDS
            found.without_ends.append(metric.brief)
        else:
            test.effect = dataclasses.replace(test.effect, below=unsure[0], above=unsure[1])
            (tests if test.effect.variance is not None else unjudged).append(test)
    for test in unjudged:
        _explain(test, options)
    return found


def _unsure(metric: Metric, pair: Pair) -> tuple[float, float] | None:
    """Return by how much the logarithm of the ratio may be lower and higher due to forecasts; 0 without one, None
    without ends.

    The ends that are furthest off count, as if forecasts of A and of B erred independently: no record has the error
    that both share.
    """
    reach = [[_reach(metric, r) for _, records in side for r in records if forecast(r)] for side in (pair.a, pair.b)]
    if any(one is None for side in reach for one in side):
        return None
    (below_a, above_a), (below_b, above_b) = (
        [max((one[i] for one in side if one), default=0.0) for i in (0, 1)] for side in reach
    )
    return below_b + above_a, above_b + below_a


def _reach(metric: Metric, record: Record) -> tuple[float, float] | None:
    """Return how far the ends of a forecast lie below and above its value, in logarithms; None if it has none."""
    value, ends = metric.value(record), metric.ends(record)
    if not value or ends is None or not min(value, *ends) > 0:
        return None if value else (0.0, 0.0)
    return max(0.0, math.log(value / ends[0])), max(0.0, math.log(ends[1] / value))


def _values(metric: Metric, kind: Error | None, side: tuple[Run, list[Record]]) -> list[float]:
    return [v for record in side[1] if (v := comparable(metric, record, sampled=kind is not None)) is not None]


def _estimate(
    metric: Metric, kind: Error, launch: Run, records: Sequence[Record], sampled: dict[int, Sampled]
) -> effects.Estimate | None:
    """Return the estimate of a metric by one launch; `sampled` caches the samples of its records between metrics."""
    values, errors = [], []
    seed = zlib.crc32(metric.option.encode())  # the same on both sides, for draws of the same requests
    for record in records:
        value = comparable(metric, record, sampled=True)
        if value is None:
            continue
        if id(record) not in sampled:
            sampled[id(record)] = launch.whole(record), requests_of(record, launch.folder)
        values.append(value)
        errors.append(error_of(metric, kind, *sampled[id(record)], seed))
    return effects.estimate(values, errors) if values else None


def _test(
    metric: Metric, sides: Sequence[dict[str, effects.Estimate]], options: Options, a: list[str], b: list[str]
) -> _Test:
    left, right = (list(side.values()) for side in sides)
    rounds = [(sides[0][x], sides[1][y]) for x, y in zip(a, b, strict=False) if x in sides[0] and y in sides[1]]
    if options.paired and rounds:
        left, right = [x for x, _ in rounds], [y for _, y in rounds]
        effect = effects.compare_paired(left, right, options.launch_noise)
    else:
        effect = effects.compare(left, right, options.launch_noise)
    row = Row(
        **_about(metric),
        a=_exp(statistics.fmean(e.log for e in left)),
        b=_exp(statistics.fmean(e.log for e in right)),
        ratio=_exp(effect.log),
        verdict="UNDECIDED",
        launches=effect.launches,
        repeats=(sum(e.repeats for e in left), sum(e.repeats for e in right)),
    )
    return _Test(row, effect)


def _about(metric: Metric) -> dict[str, Any]:
    """Return the fields of a row that describe its metric."""
    return {
        "metric": metric.option,
        "title": metric.brief,
        "unit": metric.brief_unit,
        "higher_is_better": metric.better == "higher",
        "absolute": metric.absolute,
    }


def _decide(tests: Sequence[_Test], options: Options) -> None:
    """Correct all rows at once, then give each its interval and its verdict.

    There are two families of tests: that rows differ, and that they are the same within the margin. They are corrected
    separately, so that rejections in one family do not loosen the level of the other.
    """
    margin = math.log1p(options.margin)
    differ = [t.effect.p_differs() for t in tests]
    same = [t.effect.p_same(margin) for t in tests]
    level = effects.level(differ, options.alpha)
    same_level = effects.level(same, options.alpha)
    cut = level if effects.rejected(differ, options.alpha) else -1.0
    same_cut = same_level if effects.rejected(same, options.alpha) else -1.0
    for t, p, q in zip(tests, differ, same, strict=True):
        row = t.row
        row.judged = True
        row.p_differs, row.p_same, row.differs = p, q, p <= cut
        is_same = q <= same_cut
        tail = same_level if is_same else level / 2
        row.low, row.high = (_exp(x) for x in t.effect.interval(tail))
        row.confidence = 1 - 2 * tail
        visible = effects.find_least_visible(t.effect, level / 2)
        row.least_visible = None if visible is None else _exp(visible)
        if is_same:
            row.verdict = "SAME"
        elif row.differs and t.effect.least > margin:
            row.verdict = "FASTER" if (t.effect.log > 0) == row.higher_is_better else "SLOWER"
        else:
            _explain(t, options, level / 2)


def _explain(test: _Test, options: Options, tail: float = 0.0) -> None:
    """Give an UNDECIDED row its reason, and how many more launches would decide it."""
    row, effect, margin = test.row, test.effect, math.log1p(options.margin)
    within = effect.least <= margin < abs(effect.log) or abs(effect.log) <= margin < effect.most
    if max(effect.below, effect.above) and (effect.least <= 0 or within):
        row.reason = WITHIN_ENDS
        return
    if any(effect.missing_launches):
        row.missing_launches = effect.missing_launches
        row.more_launches = max(effect.missing_launches)
        row.reason = _explain_few(effect)
        return
    if effect.variance is None:
        row.reason = NO_SAMPLES
        row.more_launches = effects.MIN_LAUNCHES
        return
    # SAME is a family of its own, in which all rows that are the same help each other.
    row.more_launches = effects.more_launches(effect, margin, tail if abs(effect.log) > margin else options.alpha)
    row.reason = _explain_open(effect, margin, row.more_launches)
    if row.differs:
        row.reason += "; it differs, but perhaps by less than the margin"


def _explain_few(effect: effects.Effect) -> str:
    a, b = effect.launches
    if effect.paired:
        return f"{counted(a, 'round')} cannot show how launches scatter; verdicts need {effects.MIN_LAUNCHES}"
    return (
        f"{count_launches(a)} of A and {b:,} of B cannot show how launches scatter; verdicts need "
        f"{effects.MIN_LAUNCHES} of each side"
    )


def _explain_open(effect: effects.Effect, margin: float, more: int | None) -> str:
    """Return why enough launches do not decide a row, and what would."""
    several = "rounds" if effect.paired else "launches of each side"
    if more is not None:
        needed = counted(more, "more round") if effect.paired else f"{count_launches(more, 'more ')} of each side"
        return f"about {needed} would decide it"
    if abs(abs(effect.log) - margin) < margin / 2:
        return f"more launches cannot decide it: the ratio lies at the margin of {math.expm1(margin):.2g}"
    return f"more than {effects.MAX_LAUNCHES} {several} would be needed; find out what makes launches scatter"


def _counted(metric: Metric, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], margin: float) -> Row:
    """Compare counts, which are not sampled: the sides are the same, or their whole ranges do not overlap."""
    left, right = ([v for launch in side for v in launch] for side in (a, b))
    x, y = statistics.median(left), statistics.median(right)
    slack = 1.0 if metric.absolute else 1 + margin
    ratio = y / x if x else math.inf
    row = Row(
        **_about(metric),
        sampled=False,
        judged=True,
        a=x,
        b=y,
        ratio=ratio if math.isfinite(ratio) else None,
        verdict="UNDECIDED",
        launches=(sum(map(bool, a)), sum(map(bool, b))),
        repeats=(len(left), len(right)),
    )
    if max(*left, *right) <= min(*left, *right) * slack:
        row.verdict = "SAME"
    elif min(right) > max(left) * slack:
        row.verdict = "MORE"
    elif max(right) * slack < min(left):
        row.verdict = "FEWER"
    else:
        row.reason = "repeats of one side differ as much as the sides do"
    return row


def _exp(log: float) -> float:
    return math.exp(log) if abs(log) < MAX_LOG else (0.0 if log < 0 else math.inf)


def _broken(record: Record, side: Literal["a", "b"]) -> Broken:
    reason = printable((record.reason or "no reason was recorded")[:500])
    return Broken(name=name_of(record.point), side=side, outcome=printable(record.outcome[:20]), reason=reason)


def _notes(
    a: Sequence[Run], b: Sequence[Run], points: Sequence[PointResult], options: Options, matched: Matched
) -> list[str]:
    rows = [row for point in points for row in point.rows]
    missing = [max(row.missing_launches[side] for row in rows) if rows else 0 for side in (0, 1)]
    notes = [_ask_for_launches(missing[0], missing[1], options)] if any(missing) else []
    if {x.folder.resolve() for x in a} & {x.folder.resolve() for x in b}:
        notes.append("A and B share a folder: its records are compared with themselves.")
    elif same := sum(pair.shares_records for pair in matched.pairs):
        of = "" if same == len(matched.pairs) else f" of {same:,} of {counted(len(matched.pairs), 'point')}"
        notes.append(
            f"A and B hold the same records{of}, as copies of one run do: they are compared with themselves, which says "
            "nothing about a change."
        )
    return notes


def _ask_for_launches(a: int, b: int, options: Options) -> str:
    """Return what to type to get the launches that verdicts need."""
    if options.paired:
        return (
            f"To get verdicts, make at least {effects.MIN_LAUNCHES} rounds: repeat the `dcpbench ab` command with --rounds 8 "
            "--resume."
        )
    sides = [f"{count_launches(n, 'more ')} of {side}" for n, side in ((a, "A"), (b, "B")) if n]
    options_of = " and ".join(f"--with-{side} RUN" for n, side in ((a, "a"), (b, "b")) if n)
    return (
        f"To get verdicts, measure {' and '.join(sides)}, each with an -o of its own, and add them with {options_of}; or let "
        "`dcpbench ab` launch both sides in turn. If you know how much two launches differ, give it with --launch-noise."
    )


def _nothing(matched: Matched) -> str:
    nothing = "A and B have no measured point in common"
    if matched.broken_a or matched.broken_b:
        side, broken = ("B", matched.broken_b) if matched.broken_b else ("A", matched.broken_a)
        return f"{nothing}; in {side} {name_of(broken[0].point)} did not run: {(broken[0].reason or '')[:300]}"
    if matched.only_a and matched.only_b:
        x = matched.only_a[0]
        ways = [(apart(x.point, y.point), y) for y in matched.only_b]
        names, y = min(ways, key=lambda way: (way[0] is None, len(way[0] or ())))
        what = (
            "measure the same points in both"
            if names is None
            else f"to compare these two, add --across {','.join(names)}"
        )
        return f"{nothing}: A has {name_of(x.point)}, B has {name_of(y.point)}; {what}."
    return nothing + "; measure the same points in both."
