"""How repeats of a point become one value, and which values were not measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from dcpbench.records.metrics import METRIC
from dcpbench.records.stats import agreement
from dcpbench.show.text import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pandas as pd

    from dcpbench.records.record import Interval, Record


MERGES: dict[str, Callable[[list[float]], float]] = {
    "median": lambda values: statistics.median(map(float, values)),
    "max": max,
    "min": min,
    "first": lambda values: values[0],
}
"""By the words of the catalogue of metrics."""


def in_order(column: pd.Series) -> pd.Series:
    """What to sort a column by: numbers in texts by their size, so that `max_num_seqs=8` comes before `=32`."""
    if not any(isinstance(value, str) for value in column):
        return column
    places = {text: place for place, text in enumerate(sorted(set(column), key=natural))}
    return column.map(places)


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [float(v) for v in values if v is not None]
    return statistics.median(known) if known else None


def merged(records: Sequence[Record], *names: str) -> dict[str, float | None]:
    """Columns of these metrics: what repeats say together, and both ends of an interval where tables have them.

    An interval is the envelope of the repeats' intervals, and without these of the repeats.
    """
    row: dict[str, float | None] = {}
    for metric in (METRIC[name] for name in names):
        known = [
            (v, metric.interval(record) or (v, v)) for record in records if (v := metric.value(record)) is not None
        ]
        row[metric.name] = MERGES[metric.merged]([v for v, _ in known]) if known else None
        if metric.ranged:
            row[f"{metric.name}_low"] = min((low for _, (low, _) in known), default=None)
            row[f"{metric.name}_high"] = max((high for _, (_, high) in known), default=None)
    return row


def spread(intervals: list[Interval]) -> float | None:
    """Largest relative difference of any two repeats' medians (stats.agreement); None for a single one."""
    ordered = sorted(intervals, key=lambda interval: interval.median)
    return agreement(ordered[0], ordered[-1]) if len(ordered) > 1 else None
