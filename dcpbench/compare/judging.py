"""Judge two sides: compute the effects of all rows, correct for all of them, and find what would decide the rest."""

from __future__ import annotations

import dataclasses
import math
import statistics
import zlib
from typing import TYPE_CHECKING, Any

from dcpbench.compare import effects
from dcpbench.compare.comparison import WORST_FIRST, Comparison, OneSidedPoint, PointResult, Row, Uncompared
from dcpbench.compare.comparison_text import count_launches
from dcpbench.compare.environments import collect_warnings, count_layers_held, find_differences
from dcpbench.compare.sampling_error import Requests, estimate_error, get_comparable, read_record_requests
from dcpbench.compare.sides import find_fields_apart, match_points
from dcpbench.errors import UsageError
from dcpbench.plan.grid import format_point_name
from dcpbench.records.metrics import list_compared_metrics
from dcpbench.records.record import is_forecast, is_functional
from dcpbench.show.text import format_count, make_printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.compare.comparison import SideName, Workload
    from dcpbench.compare.sides import Matched, Pair, Side
    from dcpbench.points.point import Point
    from dcpbench.records.metrics import Error, Metric
    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run

    Sampled = tuple[Record, Requests]  # a record with its step samples, and its requests

CPU_REASON = "ran on a CPU, and CPU times say nothing about performance; --allow-cpu judges them all the same"
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


def judge_sides(a: Sequence[Run], b: Sequence[Run], options: Options) -> Comparison:
    """Compare B with A: every metric of every point that both have.

    Raise UsageError if they have no point in common, for `paired` sides of different length, and if no point has any of
    the metrics in `options`.
    """
    if options.paired and len(a) != len(b):
        raise UsageError(
            f"--paired needs as many launches of A as of B, not {len(a)} and {len(b)}; leave it out to compare sides "
            "that are not made in pairs."
        )
    matched = match_points(a, b, options.across)
    if not matched.pairs:
        raise UsageError(_explain_no_match(matched))
    tests: list[_Test] = []
    points = [_compare_point(pair, options, a, b, tests) for pair in matched.pairs]
    missing_metrics = _find_missing_metrics(points, options.metrics)
    _decide_verdicts(tests, options)
    points.sort(key=lambda p: p.rank)
    rows = [row for p in points for row in p.rows]
    cpu = any(is_functional(r) for pair in matched.pairs for r in pair.records)
    return Comparison(
        a=[make_printable(x.name) for x in a],
        b=[make_printable(x.name) for x in b],
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
        differences=find_differences(matched.pairs),
        points=points,
        only_a=[format_point(r.point) for r in matched.only_a],
        only_b=[format_point(r.point) for r in matched.only_b],
        broken=[*(_make_broken(r, "a") for r in matched.broken_a), *(_make_broken(r, "b") for r in matched.broken_b)],
        notes=[
            *_make_notes(a, b, points, options, matched),
            *(f"--metric {name}: no point has it on both sides." for name in missing_metrics),
        ],
        layers_held=count_layers_held(matched.pairs),
    )


def format_point(point: Point) -> str:
    """Return the point's name in one line, without the repeat."""
    mode = f", {point.load.mode}" if point.load else ""
    try:
        name = format_point_name(point, repeated=False)
    except (ArithmeticError, ValueError, UsageError):
        name = f"{point.model} tp{point.tp}·dp{point.dp}·dcp{point.dcp} {point.backend} {point.exchange}"
    return make_printable(name[:300] + ("" if name.endswith(mode) else mode[:20]))


def _find_missing_metrics(points: Sequence[PointResult], names: Sequence[str]) -> list[str]:
    """Return the names of metrics that no point has on both sides. Raise UsageError if these are all `names`."""
    missing = [name for name in names if not any(point.find_row(name) for point in points)]
    if missing and len(missing) == len(names):
        known = dict.fromkeys(m.option for point in points for m in list_compared_metrics(point.workload))
        raise UsageError(
            f"--metric {','.join(names)}: no point has it on both sides; give some of {', '.join(known)}, or leave it out."
        )
    return missing


def _compare_point(pair: Pair, options: Options, a: Sequence[Run], b: Sequence[Run], tests: list[_Test]) -> PointResult:
    point, other = pair.point, pair.b[0][1][0].point
    workload: Workload = "serve" if point.load else "decode"
    found = PointResult(
        name=format_point(point),
        other_name=format_point(other) if format_point(other) != format_point(point) else "",
        workload=workload,
        forecast=pair.forecasts,
        mode=make_printable(point.load.mode[:20]) if point.load else "",
        cpu=any(map(is_functional, pair.records)),
        warnings_a=collect_warnings(r for _, rs in pair.a for r in rs),
        warnings_b=collect_warnings(r for _, rs in pair.b for r in rs),
    )
    sampled: dict[int, Sampled] = {}
    unjudged: list[_Test] = []
    for metric in list_compared_metrics(workload, options.metrics):
        kind = metric.errors.get(workload)
        left, right = ([_list_values(metric, kind, side) for side in sides] for sides in (pair.a, pair.b))
        if kind is not None and _has_no_ratio(metric, kind, pair, options, found):
            continue
        if not any(left) or not any(right):
            if any(left) or any(right):
                found.not_compared.append(Uncompared(metric=metric.brief, absent_in="b" if any(left) else "a"))
            continue
        if kind is None:
            found.rows.append(_compare_counts(metric, left, right, options.margin))
            continue
        sides = [
            {
                launch.name: e
                for (launch, records), vs in zip(side, values, strict=True)
                if vs and (e := _estimate_launch(metric, kind, launch, records, sampled))
            }
            for side, values in ((pair.a, left), (pair.b, right))
        ]
        test = _make_test(metric, sides, options, [x.name for x in a], [x.name for x in b])
        found.rows.append(test.row)
        if metric.name == "step_ms":
            tokens_a, tokens_b = (p.concurrency * p.tokens_per_step for p in (point, other))
            found.output_tok_s = (tokens_a * 1e3 / test.row.a, tokens_b * 1e3 / test.row.b)
        unsure = _compute_forecast_error(metric, pair)
        if found.cpu and not options.allow_cpu:
            test.row.reason = CPU_REASON
        elif unsure is None:
            test.row.reason = NO_ENDS
            found.without_ends.append(metric.brief)
        else:
            test.effect = dataclasses.replace(test.effect, below=unsure[0], above=unsure[1])
            (tests if test.effect.variance is not None else unjudged).append(test)
    for test in unjudged:
        _explain_undecided(test, options)
    return found


def _compute_forecast_error(metric: Metric, pair: Pair) -> tuple[float, float] | None:
    """Return by how much the logarithm of the ratio may be lower and higher due to forecasts; 0 without one, None without ends.

    The ends that are furthest off count, as if forecasts of A and of B erred independently: no record has the error
    that both share.
    """
    reach = [
        [_compute_reach(metric, r) for _, records in side for r in records if is_forecast(r)]
        for side in (pair.a, pair.b)
    ]
    if any(one is None for side in reach for one in side):
        return None
    (below_a, above_a), (below_b, above_b) = (
        [max((one[i] for one in side if one), default=0.0) for i in (0, 1)] for side in reach
    )
    return below_b + above_a, above_b + below_a


def _compute_reach(metric: Metric, record: Record) -> tuple[float, float] | None:
    """Return how far the ends of a forecast lie below and above its value, in logarithms; None if it has none."""
    value, ends = metric.get_value(record), metric.get_forecast_bounds(record)
    if not value or ends is None or not min(value, *ends) > 0:
        return None if value else (0.0, 0.0)
    return max(0.0, math.log(value / ends[0])), max(0.0, math.log(ends[1] / value))


def _list_values(metric: Metric, kind: Error | None, side: tuple[Run, list[Record]]) -> list[float]:
    return [v for record in side[1] if (v := get_comparable(metric, record, sampled=kind is not None)) is not None]


def _has_no_ratio(metric: Metric, kind: Error, pair: Pair, options: Options, found: PointResult) -> bool:
    """Return True for a rate that is 0 on a side, or of different objectives, after adding it to `found`."""
    if kind == "objectives" and _has_other_objectives(pair.records):
        found.not_compared.append(Uncompared(metric=metric.brief, absent_in="b", other_objectives=True))
    elif zero := _find_zero_rates(metric, pair):
        _compare_zero_rates(metric, pair, options, found, zero)
    else:
        return False
    return True


def _compare_zero_rates(metric: Metric, pair: Pair, options: Options, found: PointResult, zero: SideName) -> None:
    """Compare rates by their ranges, because some are 0 on the side `zero`; few launches, CPU runs and forecasts are not compared."""
    left, right = ([_list_values(metric, None, launch) for launch in side] for side in (pair.a, pair.b))
    shows = not found.forecast and (options.allow_cpu or not found.cpu)
    if shows and min(sum(map(bool, side)) for side in (left, right)) >= effects.MIN_LAUNCHES:
        found.rows.append(_compare_counts(metric, left, right, options.margin))
    else:
        found.not_compared.append(Uncompared(metric=metric.brief, absent_in=zero, zero=True))


def _has_other_objectives(records: Sequence[Record]) -> bool:
    """Return True if goodput counts requests by different objectives."""
    served = [r.serve for r in records if r.serve and r.serve.request_goodput is not None]
    return any(serve.slo_ms != served[0].slo_ms for serve in served)


def _find_zero_rates(metric: Metric, pair: Pair) -> SideName | None:
    """Return the side on which a rate, such as goodput, is 0 in any record: it has no logarithm, and is not missing.

    A latency of 0 was not measured.
    """
    if metric.better != "higher":
        return None
    sides: tuple[tuple[SideName, Side], ...] = (("b", pair.b), ("a", pair.a))
    return next(
        (name for name, side in sides if any(metric.get_value(r) == 0 for _, records in side for r in records)), None
    )


def _estimate_launch(
    metric: Metric, kind: Error, launch: Run, records: Sequence[Record], sampled: dict[int, Sampled]
) -> effects.Estimate | None:
    """Return the estimate of a metric by one launch; `sampled` caches the samples of its records between metrics."""
    values, errors = [], []
    seed = zlib.crc32(metric.option.encode())  # the same on both sides, for draws of the same requests
    for record in records:
        value = get_comparable(metric, record, sampled=True)
        if value is None:
            continue
        if id(record) not in sampled:
            sampled[id(record)] = launch.load_with_samples(record), read_record_requests(record, launch.folder)
        values.append(value)
        errors.append(estimate_error(metric, kind, *sampled[id(record)], seed))
    return effects.estimate_launch(values, errors) if values else None


def _make_test(
    metric: Metric, sides: Sequence[dict[str, effects.Estimate]], options: Options, a: list[str], b: list[str]
) -> _Test:
    left, right = (list(side.values()) for side in sides)
    rounds = [(sides[0][x], sides[1][y]) for x, y in zip(a, b, strict=False) if x in sides[0] and y in sides[1]]
    if options.paired and rounds:
        left, right = [x for x, _ in rounds], [y for _, y in rounds]
        effect = effects.compare_paired(left, right, options.launch_noise)
    else:
        effect = effects.compare_sides(left, right, options.launch_noise)
    row = Row(
        **_describe_metric(metric),
        a=_compute_exp(statistics.fmean(e.log for e in left)),
        b=_compute_exp(statistics.fmean(e.log for e in right)),
        ratio=_compute_exp(effect.log),
        verdict="UNDECIDED",
        launches=effect.launches,
        repeats=(sum(e.repeats for e in left), sum(e.repeats for e in right)),
    )
    return _Test(row, effect)


def _describe_metric(metric: Metric) -> dict[str, Any]:
    """Return the fields of a row that describe its metric."""
    return {
        "metric": metric.option,
        "title": metric.brief,
        "unit": metric.brief_unit,
        "higher_is_better": metric.better == "higher",
        "absolute": metric.absolute,
    }


def _decide_verdicts(tests: Sequence[_Test], options: Options) -> None:
    """Correct all rows at once, then give each its interval and its verdict.

    There are two families of tests: that rows differ, and that they are the same within the margin. They are corrected
    separately, so that rejections in one family do not loosen the level of the other.
    """
    margin = math.log1p(options.margin)
    differ = [t.effect.compute_p_differs() for t in tests]
    same = [t.effect.compute_p_same(margin) for t in tests]
    level = effects.compute_level(differ, options.alpha)
    same_level = effects.compute_level(same, options.alpha)
    cut = level if effects.count_rejected(differ, options.alpha) else -1.0
    same_cut = same_level if effects.count_rejected(same, options.alpha) else -1.0
    for t, p, q in zip(tests, differ, same, strict=True):
        row = t.row
        row.judged = True
        row.p_differs, row.p_same, row.differs = p, q, p <= cut
        is_same = q <= same_cut
        tail = same_level if is_same else level / 2
        row.low, row.high = (_compute_exp(x) for x in t.effect.compute_interval(tail))
        row.confidence = 1 - 2 * tail
        visible = effects.find_min_visible(t.effect, level / 2)
        row.least_visible = None if visible is None else _compute_exp(visible)
        if is_same:
            row.verdict = "SAME"
        elif row.differs and t.effect.min_distance > margin:
            row.verdict = "FASTER" if (t.effect.log > 0) == row.higher_is_better else "SLOWER"
        else:
            _explain_undecided(t, options, level / 2)


def _explain_undecided(test: _Test, options: Options, tail: float = 0.0) -> None:
    """Give an UNDECIDED row its reason, and how many more launches would decide it."""
    row, effect, margin = test.row, test.effect, math.log1p(options.margin)
    within = effect.min_distance <= margin < abs(effect.log) or abs(effect.log) <= margin < effect.max_distance
    if max(effect.below, effect.above) and (effect.min_distance <= 0 or within):
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
    # SAME is a separate family, in which all rows that are the same help each other.
    row.more_launches = effects.estimate_more_launches(
        effect, margin, tail if abs(effect.log) > margin else options.alpha
    )
    row.reason = _explain_open(effect, margin, row.more_launches)
    if row.differs:
        row.reason += "; it differs, but perhaps by less than the margin"


def _explain_few(effect: effects.Effect) -> str:
    a, b = effect.launches
    if effect.paired:
        return f"{format_count(a, 'round')} cannot show how launches scatter; verdicts need {effects.MIN_LAUNCHES}"
    return (
        f"{count_launches(a)} of A and {b:,} of B cannot show how launches scatter; verdicts need "
        f"{effects.MIN_LAUNCHES} of each side"
    )


def _explain_open(effect: effects.Effect, margin: float, more: int | None) -> str:
    """Return why enough launches do not decide a row, and what would."""
    several = "rounds" if effect.paired else "launches of each side"
    if more is not None:
        needed = format_count(more, "more round") if effect.paired else f"{count_launches(more, 'more ')} of each side"
        return f"about {needed} would decide it"
    if abs(abs(effect.log) - margin) < margin / 2:
        return f"more launches cannot decide it: the ratio lies at the margin of {math.expm1(margin):.2g}"
    return f"more than {effects.MAX_LAUNCHES} {several} would be needed; find out what makes launches scatter"


def _compare_counts(metric: Metric, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], margin: float) -> Row:
    """Compare counts, which are not sampled: the sides are the same, or their whole ranges do not overlap."""
    left, right = ([v for launch in side for v in launch] for side in (a, b))
    x, y = statistics.median(left), statistics.median(right)
    slack = 1.0 if metric.absolute else 1 + margin
    ratio = y / x if x else math.inf
    row = Row(
        **_describe_metric(metric),
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


def _compute_exp(log: float) -> float:
    return math.exp(log) if abs(log) < MAX_LOG else (0.0 if log < 0 else math.inf)


def _make_broken(record: Record, side: SideName) -> OneSidedPoint:
    reason = make_printable((record.reason or "no reason was recorded")[:500])
    return OneSidedPoint(
        name=format_point(record.point), side=side, outcome=make_printable(record.outcome[:20]), reason=reason
    )


def _make_notes(
    a: Sequence[Run], b: Sequence[Run], points: Sequence[PointResult], options: Options, matched: Matched
) -> list[str]:
    rows = [row for point in points for row in point.rows]
    missing = [max(row.missing_launches[side] for row in rows) if rows else 0 for side in (0, 1)]
    notes = [_suggest_launches(missing[0], missing[1], options)] if any(missing) else []
    if {x.folder.resolve() for x in a} & {x.folder.resolve() for x in b}:
        notes.append("A and B share a folder: its records are compared with themselves.")
    elif same := sum(pair.shares_records for pair in matched.pairs):
        of = "" if same == len(matched.pairs) else f" of {same:,} of {format_count(len(matched.pairs), 'point')}"
        notes.append(
            f"A and B hold the same records{of}, as copies of one run do: they are compared with themselves, which says "
            "nothing about a change."
        )
    return notes


def _suggest_launches(a: int, b: int, options: Options) -> str:
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


def _explain_no_match(matched: Matched) -> str:
    nothing = "A and B have no measured point in common"
    if matched.broken_a or matched.broken_b:
        side, broken = ("B", matched.broken_b) if matched.broken_b else ("A", matched.broken_a)
        return f"{nothing}; in {side} {format_point(broken[0].point)} did not run: {(broken[0].reason or '')[:300]}"
    if matched.only_a and matched.only_b:
        x = matched.only_a[0]
        ways = [(find_fields_apart(x.point, y.point), y) for y in matched.only_b]
        names, y = min(ways, key=lambda way: (way[0] is None, len(way[0] or ())))
        what = (
            "measure the same points in both"
            if names is None
            else f"to compare these two, add --across {','.join(names)}"
        )
        return f"{nothing}: A has {format_point(x.point)}, B has {format_point(y.point)}; {what}."
    return nothing + "; measure the same points in both."
