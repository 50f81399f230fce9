"""Compute by how much two launches of the same point may differ, depending on the server that was measured.

For dcpbench's own engine this is known (docs/reading-a-report.md). For every other server it is known only if a report
holds several launches of one of its points; until then a lead is one "in one launch each".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.show.numbers import format_percent

if TYPE_CHECKING:
    from typing import Any

COLUMN = "launch_band"  # share by which two launches of a point may differ; missing if that is not known
IN_ONE_LAUNCH = "in one launch each"
NOT_DISTINGUISHABLE = "not distinguishable"
BY_MORE = f"by more than {format_percent(REPEATS_AGREE_WITHIN)}"


def add_bands(points: pd.DataFrame, bands: dict[str, float]) -> pd.DataFrame:
    """Return the points with the band of their origin (records.launches.measure_bands)."""
    if points.empty:
        return points
    return points.assign(**{COLUMN: pd.to_numeric(points["origin"].map(bands))})


def find_band(one: pd.Series[Any], other: pd.Series[Any]) -> pd.Series[Any]:
    """Return the larger band of each pair of rows, in their order, and REPEATS_AGREE_WITHIN if one of them is not known."""
    larger = np.maximum(one.to_numpy(float), other.to_numpy(float))  # NaN if either is
    return pd.Series(np.where(np.isnan(larger), REPEATS_AGREE_WITHIN, larger), one.index)


def find_largest(points: pd.DataFrame) -> float:
    """Return the largest band of some points, and REPEATS_AGREE_WITHIN if none is known."""
    known = points[COLUMN].dropna() if COLUMN in points else pd.Series(dtype=float)
    return float(known.max()) if len(known) else REPEATS_AGREE_WITHIN


def has_single_launches(points: pd.DataFrame) -> bool:
    """Return True if any of these points comes from a server of which no two launches are known."""
    return COLUMN in points and bool(points[COLUMN].isna().any())


def format_level(points: pd.DataFrame, loads: pd.Series[Any]) -> str:
    """Return `level` if the outputs of these points are within their band at each load, else `not distinguishable`.

    Intervals that overlap do not make two layouts level: a forecast may leave a tenth between them undecided.
    """
    apart = points["output_tok_s"].groupby(loads.to_numpy()).transform("max") / points["output_tok_s"] - 1
    level = not has_single_launches(points) and bool((apart <= find_largest(points)).all())
    return "level" if level else NOT_DISTINGUISHABLE


def format_launches(points: pd.DataFrame) -> str:
    """Return `, in one launch each` if a server's launches are not known to agree; else an empty string."""
    return f", {IN_ONE_LAUNCH}" if has_single_launches(points) else ""


def format_clearly(points: pd.DataFrame) -> str:
    """Return the word for a lead that counts: `clearly`, or by how much if a server's launches are not known to agree."""
    return BY_MORE if has_single_launches(points) else "clearly"
