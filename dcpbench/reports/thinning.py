"""What a figure shows of more points than it can hold: lengths and loads evenly picked, and the fastest layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

MOST_MODELS = 12
MOST_RUNS = 6
MOST_LENGTHS = 9
MOST_LINES = 16
MOST_LOADS = 48
"""Of one figure: models and runs with figures of their own, panels, lines in a panel, and points of a line."""


def thinned(
    points: pd.DataFrame, along: str = "concurrency", *, rate: str = "output_tok_s"
) -> tuple[pd.DataFrame, str]:
    """The points that a figure shows, and in words how many of what that is; empty where it is all of them."""
    said: list[str] = []
    lengths = points.drop_duplicates("rest").sort_values(["input_typical", "rest"], kind="stable")["rest"].tolist()
    points = _only(points, "rest", evenly(lengths, MOST_LENGTHS), len(lengths), "lengths", said)
    loads = sorted(set(points[along].dropna()))
    points = _only(points, along, evenly(loads, MOST_LOADS), len(loads), "loads", said)
    series = points["run"].astype(str).str.cat(points["label"].astype(str), sep="\n")
    fastest = points[rate].astype(float).groupby(series).max().sort_values(ascending=False, kind="stable")
    if len(fastest) > MOST_LINES:
        points = points[series.isin(set(fastest.index[:MOST_LINES]))]
        said.append(f"the {MOST_LINES} fastest of {len(fastest):,} layouts")
    return points, f" (shown: {', '.join(said)}; all in points.csv)" if said else ""


def evenly(values: Sequence[Any], most: int) -> list[Any]:
    """The first, the last and evenly picked ones between, at most so many."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]


def first_of(points: pd.DataFrame, column: str, most: int) -> list[Any]:
    """The values of a column that have the most points, in order of appearance."""
    if points.empty:
        return []
    counts = points[column].value_counts(sort=True)
    kept = set(counts.index[:most])
    return [value for value in dict.fromkeys(points[column]) if value in kept]


def _only(points: pd.DataFrame, column: str, kept: list[Any], found: int, what: str, said: list[str]) -> pd.DataFrame:
    if len(kept) == found:
        return points
    said.append(f"{len(kept)} of {found:,} {what}")
    return points[points[column].isin(set(kept))]
