"""How long the points that are left may take, from those that have finished."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 3
"""Finished points from which on a range is said."""
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""97.5 % quantile of Student's t for 1, 2, … degrees of freedom."""
T_95_MORE = 2.2
"""For more: 2.20 at 11, 1.96 at infinity."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Time that is left."""

    seconds: float
    low: float | None = None
    """95 % prediction interval; null with fewer than LEAST points."""
    high: float | None = None
    points: int
    """How many points it comes from."""


def estimate(durations: Sequence[float], left: int, spent: float = 0.0) -> Estimate | None:
    """Seconds until `left` more points have finished, of which one has been at work for `spent` seconds.

    Points are taken as draws of one distribution, so with m and s, mean and standard deviation of n `durations` (s
    each, from one point's end to the next one's): left · m, ± t(n - 1) · s · sqrt(left + left² / n), the prediction
    interval of a sum of new draws. What the point at work has had is taken off, m at most. Larger points that come
    last make it too short. None where nothing has finished, or nothing is left.
    """
    n = len(durations)
    if not n or left <= 0:
        return None
    mean = statistics.fmean(durations)
    had = min(max(spent, 0.0), mean)
    seconds = max(left * mean - had, 0.0)
    if n < LEAST:
        return Estimate(seconds=seconds, points=n)
    t = T_95[n - 2] if n - 2 < len(T_95) else T_95_MORE
    half = t * statistics.stdev(durations) * math.sqrt(left + left**2 / n)
    return Estimate(seconds=seconds, low=max(seconds - half, 0.0), high=seconds + half, points=n)
