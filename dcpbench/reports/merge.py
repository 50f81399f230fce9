"""How repeats of a point become one value, and which values were not measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from dcpbench.records.stats import agreement
from dcpbench.show.text import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pandas as pd

    from dcpbench.records.record import Interval


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


def worst(pick: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """What `max` or `min` picks of those that are known."""
    known = [v for v in values if v is not None]
    return pick(known) if known else None


def spread(intervals: list[Interval]) -> float | None:
    """Largest relative difference of any two repeats' medians (stats.agreement); None for a single one."""
    ordered = sorted(intervals, key=lambda interval: interval.median)
    return agreement(ordered[0], ordered[-1]) if len(ordered) > 1 else None
