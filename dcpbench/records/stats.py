"""Compute medians with intervals, percentiles with floors, when to stop, and whether repeats agree. No torch, no numpy.

Intervals come from order statistics, because step times are skewed and have outliers. They allow for correlated samples.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.records import student
from dcpbench.records.autocorrelation import measure_correlation
from dcpbench.records.record import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

REPEATS_AGREE_WITHIN = 0.02  # repeats of a point agree when their medians differ by no more than this share
CONFIDENCE = 0.95  # of intervals
MIN_EFFECTIVE = 6  # independent samples without which no pair of order statistics covers the median with 95 %
FLOOR_CONFIDENCE = 0.99  # of the bound that a percentile needs (MLPerf endpoints)
MEDIAN, MAXIMUM = 50, 100
PERCENTILES = (50, 90, 95, 99)  # of latencies in records
OBJECTIVE = PERCENTILES[-1]  # percentile that an SLO bounds, where there are enough samples


def compute_median_interval(samples: Sequence[float]) -> Interval:
    """Return the median with its confidence interval; `samples` are in the order in which they were taken.

    The interval is [x_(k), x_(n+1-k)] of the sorted samples. For independent samples k is the largest one for which it
    covers the true median with 95 %: 1 - 2·P(Bin(n, ½) ≤ k-1) ≥ 0.95. For correlated ones the number of samples below
    the median has `inflation` times the variance, so that k ≤ n/2 - t·√(n · inflation)/2, with Student's t for n / inflation
    - 1 degrees of freedom. With fewer than MIN_EFFECTIVE effective samples no pair reaches 95 %: then it is the smallest
    and the largest sample. Raise UsageError for no samples and for NaN or infinite ones.
    """
    ordered = _sort_finite(samples)
    n, median = len(ordered), _compute_quantile(ordered, 0.5)
    found = measure_correlation(samples, median)
    k = (
        _compute_interval_rank(n)
        if found.inflation == 1
        else min(_compute_interval_rank(n), _compute_correlated_rank(n, found.inflation))
    )
    return Interval(
        median=median,
        low=ordered[k - 1],
        high=ordered[n - k],
        samples=n,
        autocorrelation=found.neighbours,
        effective_samples=found.count_effective(n),
    )


def compute_percentile(samples: Sequence[float], p: float) -> float | None:
    """Return the p-th percentile (0-100, linear between neighbours, as numpy does), or None with too few samples.

    Too few means fewer than `compute_min_samples(p)`. Raise UsageError for p outside 0-100, and for NaN or infinite
    samples.
    """
    if not samples or len(samples) < compute_min_samples(p):
        return None
    return _compute_quantile(_sort_finite(samples), p / 100)


@lru_cache(maxsize=64)
def compute_min_samples(p: float) -> int:
    """Return the number of samples required to report a percentile above the median: 64 for p90, 130 for p95, 662 for
    p99.

    It is the smallest n for which at least two samples lie beyond the true percentile with 99 % probability, so that
    the second largest sample bounds it from above and no single outlier decides it. With q = p/100:

        P(Bin(n, 1-q) ≥ 2) = 1 - qⁿ - n·(1-q)·qⁿ⁻¹ ≥ 0.99

    Up to p50 one sample is enough, because the median is always reported with its interval, which shows its precision.
    """
    if not 0 <= p <= MAXIMUM:
        raise UsageError(f"p{p:g} is not a percentile; give a number from 0 to 100.")
    if p <= MEDIAN:
        return 1
    if p == MAXIMUM:
        raise UsageError("no number of samples bounds p100; report the maximum as a maximum.")
    q, n = p / 100, 2
    while q**n + n * (1 - q) * q ** (n - 1) > 1 - FLOOR_CONFIDENCE:
        n += 1
    return n


def find_highest_percentile(samples: int) -> int:
    """Return the highest percentile of PERCENTILES that so many samples can show; the median for no samples."""
    return max((p for p in PERCENTILES if compute_min_samples(p) <= samples), default=MEDIAN)


@dataclasses.dataclass(frozen=True)
class StopRule:
    """Decide when a point has been measured enough."""

    precision: float = 0.01  # half-width of the 95 % interval of the median, as a share of the median
    seconds: float = 10.0  # time limit, after which a point that is not precise is marked `noisy`
    least_samples: int = 20  # measuring never stops before this many samples, not even at the time limit

    def get_stop_reason(self, samples: Sequence[float], elapsed_s: float) -> str | None:
        """Return `precise` or `noisy` if measuring may stop, or None. Sorts the samples: call it every few samples."""
        if len(samples) < self.least_samples:
            return None
        if self._is_precise(samples):
            return "precise"
        return "noisy" if elapsed_s >= self.seconds else None

    def _is_precise(self, samples: Sequence[float]) -> bool:
        """Return whether the interval is narrow enough, and rests on enough samples to be one of 95 %."""
        ordered = _sort_finite(samples)
        median, k = _compute_quantile(ordered, 0.5), _compute_interval_rank(len(ordered))
        if not self._is_narrow(median, ordered[k - 1], ordered[-k]):
            return False  # independent samples have the narrowest interval, and it costs least
        found = compute_median_interval(samples)
        return (found.effective_samples or 0) >= MIN_EFFECTIVE and self._is_narrow(found.median, found.low, found.high)

    def _is_narrow(self, median: float, low: float, high: float) -> bool:
        return max(high - median, median - low) <= self.precision * median


def has_settled(previous_median: float | None, median: float) -> bool:
    """Return True if warm-up is over: two successive medians differ by no more than 1 % of the earlier one."""
    return previous_median is not None and abs(median - previous_median) <= 0.01 * abs(previous_median)


def find_lasting_start(holds: Sequence[bool]) -> int | None:
    """Return the index from which on all hold; None if the last one does not."""
    return next((i for i in range(len(holds)) if all(holds[i:])), None)


def compute_median_distance(a: Interval, b: Interval) -> float:
    """Return the relative distance of the medians of two repeats: |a - b| / ((a + b) / 2).

    0.02 is the 2 % of REPEATS_AGREE_WITHIN. The result is symmetric, so the order of the runs does not matter. Raise
    UsageError unless both medians are positive.
    """
    if a.median <= 0 or b.median <= 0:
        raise UsageError(f"medians {a.median:g} and {b.median:g} must be positive to be compared by their ratio.")
    return abs(a.median - b.median) / ((a.median + b.median) / 2)


def _sort_finite(samples: Sequence[float]) -> list[float]:
    if not samples:
        raise UsageError("no samples: nothing was measured, so there is no median; record the point as failed.")
    if not all(map(math.isfinite, samples)):
        raise UsageError("samples hold NaN or infinity; a sample that was not measured must be left out.")
    return sorted(samples)


def _compute_quantile(ordered: Sequence[float], q: float) -> float:
    position = (len(ordered) - 1) * q
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _compute_correlated_rank(n: int, inflation: float) -> int:
    """Return the rank k of the lower end if the number of samples below the median has `inflation` times the variance."""
    t = student.compute_quantile((1 - CONFIDENCE) / 2, max(n / inflation - 1, 1.0))
    return max(math.floor(n / 2 - t * math.sqrt(n * inflation) / 2), 1)


@lru_cache(maxsize=4096)
def _compute_interval_rank(n: int) -> int:
    """Return the largest k with 1 - 2·P(Bin(n, ½) ≤ k-1) ≥ 0.95, at least 1.

    The sum starts ten standard deviations below n/2, where the omitted tail is below 1e-22.
    """
    tail, k = 0.0, max(0, math.floor(n / 2 - 5 * math.sqrt(n)))
    while True:
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
        if 1 - 2 * tail < CONFIDENCE - 1e-12:
            return max(k, 1)
        k += 1
