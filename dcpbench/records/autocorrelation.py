"""Measure how many independent samples a correlated series is worth to its median. No torch, no numpy.

The confidence interval of a median rests on how many samples lie below the true median. With correlated samples that
number scatters more, and `inflation` is by how much its variance grows. Two estimates are made, and the larger counts:

- An AR(1) process. From the correlation ρ of neighbouring samples the signs of their deviations from the median have the
  autocorrelation 2/π · asin(ρᵏ) at lag k, for normal samples and all that follow from them monotonically.
- Geyer's initial monotone sequence (1992) of the signs, for series with a correlation that falls off more slowly than ρᵏ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_SAMPLES = 4  # fewer do not show any correlation
MAX_CORRELATION = 0.98
MAX_SERIES = 512  # a longer series is summed in batches before its lags are computed
OUTLIER = 3.0  # standard deviations; samples further out count as if they lay there
TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of normal noise
SMALLEST = 1e-4  # correlation below which an AR(1) process is taken to be independent


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Describe how strongly the samples of a series depend on those before them."""

    neighbours: float | None  # correlation of a sample with the next one, at least 0; None with too few samples
    inflation: float  # variance of the number of samples below the median, over that of independent samples; at least 1

    def count_effective(self, samples: int) -> float | None:
        """Return the number of independent samples that determine the median as precisely; None if it is unknown."""
        return None if self.neighbours is None else samples / self.inflation


def measure_correlation(samples: Sequence[float], median: float) -> Correlation:
    """Return the correlation of finite samples in the order in which they were taken."""
    n = len(samples)
    if n < MIN_SAMPLES:
        return Correlation(None, 1.0)
    deviations = [x - median for x in samples]
    signs = [math.copysign(1.0, d) if d else 0.0 for d in deviations]
    rho = _compute_neighbour_correlation(_limit_outliers(deviations) or signs)
    return Correlation(rho, max(1.0, _estimate_ar1_inflation(rho, n), _estimate_sign_inflation(signs)))


def _limit_outliers(deviations: Sequence[float]) -> list[float]:
    """Return deviations in units of OUTLIER standard deviations, cut at 1; empty if half of them are 0."""
    limit = OUTLIER * TO_SIGMA * statistics.median(map(abs, deviations))
    return [min(max(d / limit, -1.0), 1.0) for d in deviations] if limit > 0 else []


def _compute_neighbour_correlation(series: Sequence[float]) -> float:
    """Return the correlation of neighbours, corrected by (1 + 3ρ) / n for the fitted mean (Marriott and Pope 1954)."""
    centred, power = _remove_mean(series)
    if power == 0:
        return 0.0
    rho = sum(a * b for a, b in itertools.pairwise(centred)) / power
    rho += (1 + 3 * max(rho, 0.0)) / len(series)
    return min(max(rho, 0.0), MAX_CORRELATION)


def _estimate_ar1_inflation(rho: float, n: int) -> float:
    """Return 1 + 2·Σ(1 - k/n)·2/π·asin(ρᵏ)."""
    total, power = 1.0, rho
    for lag in range(1, n):
        if power < SMALLEST:
            break
        total += 2 * (1 - lag / n) * 2 / math.pi * math.asin(power)
        power *= rho
    return total


def _estimate_sign_inflation(signs: Sequence[float]) -> float:
    """Return the variance of the mean of the signs over that of independent ones."""
    _, power = _remove_mean(signs)
    size = math.ceil(len(signs) / MAX_SERIES)
    whole = len(signs) // size * size
    batches = [sum(signs[i : i + size]) for i in range(0, whole, size)]
    centred, of_batches = _remove_mean(batches)
    if power == 0 or of_batches == 0:
        return 1.0
    batched = of_batches / len(batches) / size / (power / len(signs))
    return batched * _estimate_series_inflation(centred, of_batches)


def _estimate_series_inflation(centred: Sequence[float], power: float) -> float:
    """Return 2·Σ(ρ₂ⱼ + ρ₂ⱼ₊₁) - 1 over pairs of lags until one is not positive, each at most the one before it."""
    total, least = 0.0, math.inf
    for lag in range(0, len(centred) - 1, 2):
        pair = sum(_compute_lag_product(centred, k) for k in (lag, lag + 1)) / power
        if pair <= 0:
            break
        least = min(least, pair)
        total += 2 * least
    return max(total - 1, 0.0)


def _compute_lag_product(centred: Sequence[float], lag: int) -> float:
    return sum(a * b for a, b in zip(centred, centred[lag:], strict=False))


def _remove_mean(series: Sequence[float]) -> tuple[list[float], float]:
    """Return the series without its mean, and the sum of its squares."""
    mean = math.fsum(series) / len(series)
    centred = [x - mean for x in series]
    return centred, math.fsum(x * x for x in centred)
