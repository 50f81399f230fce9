"""Summarise one round of `ab` in a line, while the others run."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from dcpbench.compare.comparison_text import format_factor
from dcpbench.compare.sides import find_differing_fields, match_points
from dcpbench.records.metrics import COMPARED
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.records.metrics import Metric
    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run


def format_round(a: Run, b: Run) -> str:
    """Return the first metric that `compare` compares, B against A: of one point its values, of several the range of ratios.

    `step time 27.56 → 20.52 ms, B/A 0.745`; points that ran on one side only are counted.
    """
    found = match_points([a], [b], find_differing_fields([a], [b]))
    metric = COMPARED[a.records[0].point.workload][0]
    both = [(_compute_median(pair.a[0][1], metric), _compute_median(pair.b[0][1], metric)) for pair in found.pairs]
    known = [(x, y) for x, y in both if x and y is not None]
    failed = [(len(broken), side) for side, broken in (("A", found.broken_a), ("B", found.broken_b)) if broken]
    more = [f"{format_count(number, 'point')} did not run in {side}" for number, side in failed]
    return "; ".join([_format_ratios(known, metric), *more])


def _format_ratios(known: Sequence[tuple[float, float]], metric: Metric) -> str:
    if not known:
        return "nothing ran on both sides"
    ratios = sorted(y / x for x, y in known)
    if len(ratios) == 1:
        values = " → ".join(format_short_number(value, 4) for value in known[0])
        return f"{metric.title} {values} {metric.unit}, B/A {format_factor(ratios[0])}"
    ends = f"{format_factor(ratios[0])} to {format_factor(ratios[-1])}"
    return f"{metric.title} B/A {ends} in {len(ratios)} points, median {format_factor(statistics.median(ratios))}"


def _compute_median(records: Sequence[Record], metric: Metric) -> float | None:
    """Return the median over repeats."""
    values = [value for record in records if (value := metric.get_value(record)) is not None]
    return statistics.median(values) if values else None
