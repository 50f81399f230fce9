"""Format the numbers and sentences that all forms of a comparison share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.comparison import WORST_FIRST
from dcpbench.compare.effects import MIN_LAUNCHES
from dcpbench.show.model_fit import format_no_fit, format_range
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.compare.comparison import Comparison, Row

CPU_NOTE = "CPU: functional run; its times say nothing about performance."
LARGE = 1000
MAX_UNMATCHED = 10  # points of one side that are listed


def format_label(row: Row) -> str:
    """Return the metric with its unit."""
    return row.title if row.unit in row.title else f"{row.title} {row.unit}"


def format_factor(ratio: float) -> str:
    """Return `1.031`, and large ratios to three digits."""
    return f"{ratio:.3f}" if ratio < LARGE else f"{ratio:.3g}"


def format_ratio(row: Row) -> str:
    """Return `1.031`; empty for small counts and for values that cannot be divided."""
    return "" if row.ratio is None or row.absolute else format_factor(row.ratio)


def format_change(row: Row) -> str:
    """Return `27.56 → 20.52 ms, ratio 0.7446 [0.7411, 0.7481]`; without a ratio for small counts and if A is 0."""
    bounds = "" if row.low is None or row.high is None else f" [{row.low:.4g}, {row.high:.4g}]"
    ratio = "" if row.ratio is None or row.absolute else f", ratio {row.ratio:.4f}{bounds}"
    return f"{format_short_number(row.a, 4)} → {format_short_number(row.b, 4)} {row.unit}{ratio}"


def format_interval(row: Row) -> str:
    """Return `0.998…1.004`; empty without an interval."""
    if row.low is None or row.high is None:
        return ""
    return "…".join(f"{x:.3f}" if x < LARGE else f"{x:.2g}" for x in (row.low, row.high))


def format_verdicts(counts: Mapping[str, int]) -> str:
    """Return the number of rows by verdict, worst first: `2 SLOWER, 10 SAME`."""
    return ", ".join(f"{counts[v]} {v}" for v in WORST_FIRST if v in counts)


def format_summary(c: Comparison) -> str:
    """Return the verdicts in one line."""
    return f"{format_verdicts(c.counts) or 'nothing'} in {format_count(len(c.points), 'point')}, B against A."


def format_forecast_note(c: Comparison) -> str:
    """Return which figures are forecasts, and what follows for their verdicts; empty if all were measured."""
    of = [point for point in c.points if point.forecast]
    if not of:
        return ""
    sides = format_list(sorted({side.upper() for point in of for side in point.forecast}))
    where = "" if len(of) == len(c.points) else f" in {len(of):,} of {format_count(len(c.points), 'point')}"
    without = list(dict.fromkeys(title for point in of for title in point.without_ends))
    rest = f" Not judged, as forecasts have no ends for it: {', '.join(without)}." if without else ""
    return (
        f"Forecast: one rank ran for all of {sides}{where}, and communication was modelled; verdicts and intervals of times and "
        f"rates hold up to the ends of forecasts.{rest}"
    )


def format_no_fit_note(c: Comparison) -> str:
    """Return on which side the whole model does not fit, with the layers that were held; empty if all layers were held."""
    several = len({held.model for held in c.layers_held}) > 1
    sides: dict[tuple[str, str, str], list[str]] = {}
    for held in c.layers_held:
        what = (held.model if several else "", format_range([held.fewest, held.most]), str(held.layers))
        sides.setdefault(what, []).append(held.side.upper())
    parts = [
        f"{format_no_fit(count, layers)} ({', '.join(filter(None, (model, format_list(of))))})"
        for (model, count, layers), of in sides.items()
    ]
    return format_capitalized(f"{'; '.join(parts)}.") if parts else ""


def list_notes(c: Comparison) -> list[str]:
    """Return the conditions of all figures, which appear in the first lines of each form of a comparison."""
    return [note for note in (format_no_fit_note(c), CPU_NOTE if c.cpu else "", format_forecast_note(c)) if note]


def count_launches(n: int, more: str = "") -> str:
    """Return `1 launch`, `3 more launches`."""
    return f"{n:,} {more}{'launch' if n == 1 else 'launches'}"


def format_method(c: Comparison) -> str:
    """Return how verdicts were reached, in a sentence or two."""
    if not c.tests:
        return "No time or rate was judged."
    paired = ", paired by round" if c.paired else ""
    assumed = (
        ""
        if c.launch_noise is None
        else f" Where a side has fewer than {MIN_LAUNCHES} launches, two launches of the same thing are assumed to differ by "
        f"{c.launch_noise * 100:g} % (--launch-noise)."
    )
    return (
        f"{format_count(c.tests, 'test')} of {count_launches(len(c.a))} against {len(c.b)}{paired}; verdicts and intervals are "
        f"corrected for all of them: if nothing differs, at most {c.alpha * 100:g} % of comparisons show any FASTER or "
        f"SLOWER. SAME: within {c.margin * 100:g} %.{assumed}"
    )


def format_gate(c: Comparison) -> str:
    """Return what --fail-on found, in one line; empty without it."""
    if not c.rules:
        return ""
    rules = ", ".join(c.rules)
    unjudged, undecided = len(c.unjudged), sum(f.status == "undecided" for f in c.findings)
    more = f"; {undecided} undecided" if undecided else ""
    if c.fails:
        return f"{format_count(len(c.fails), 'failure')} by --fail-on {rules}{f'; {unjudged} not judged' if unjudged else ''}{more}."
    if unjudged:
        return f"--fail-on {rules}: {unjudged} could not be judged, so the gate is UNDECIDED (exit code 3){more}."
    return f"--fail-on {rules}: {'nothing is proven worse' if undecided else 'passed'}{more}."


def list_unmatched(c: Comparison) -> list[str]:
    """Return the points that could not be compared, one line each."""
    lines = [f"did not run in {b.side.upper()}: {b.name}: {b.outcome}: {b.reason}" for b in c.broken]
    for side, names in (("A", c.only_a), ("B", c.only_b)):
        lines += [f"only in {side}: {name}" for name in names[:MAX_UNMATCHED]]
        if len(names) > MAX_UNMATCHED:
            lines.append(f"only in {side}: {len(names) - MAX_UNMATCHED} more")
    return lines
