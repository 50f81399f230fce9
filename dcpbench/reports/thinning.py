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
    for column, by, most in (("rest", ["input_typical", "rest"], MOST_LENGTHS), (along, [along], MOST_LOADS)):
        values = points.drop_duplicates(column).sort_values(by, kind="stable")[column].dropna().tolist()
        kept = evenly(values, most)
        if len(kept) < len(values):
            said.append(f"{len(kept)} of {len(values):,} {'lengths' if column == 'rest' else 'loads'}")
            points = points[points[column].isin(set(kept))]
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
