"""Exact tests of shares: binomial tails and bounds, and Holm's procedure. No I/O."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")
LEVEL = 0.001  # probability of a false alarm in a whole comparison
CONFIDENCE = 0.95


@functools.cache
def compute_upper_bound(count: int, total: int) -> float:
    """Return the upper one-sided Clopper-Pearson bound of a share; 1 without any observation."""
    if count >= total:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 1 - compute_tail(count + 1, total, middle)  # probability of at most `count`
        low, high = (middle, high) if below > 1 - CONFIDENCE else (low, middle)
    return high


def compute_tail(count: int, total: int, share: float) -> float:
    """Return the probability that at least `count` of `total` happen, each with probability `share`."""
    if count <= 0 or share >= 1.0:
        return float(count <= total)
    if share <= 0.0 or count > total:
        return 0.0
    if count <= total * share:  # the other side is shorter, and this one is not small
        return max(1.0 - _sum_binomial(0, count - 1, total, share), 0.0)
    return _sum_binomial(count, total, total, share)


def _sum_binomial(first: int, last: int, total: int, share: float) -> float:
    """Return the probability of `first` to `last` of `total`, from logarithms: coefficients exceed a float from 1,030 on."""
    k = np.arange(first, last + 1)
    start = math.lgamma(total + 1) - math.lgamma(first + 1) - math.lgamma(total - first + 1)
    steps = np.log(total - k[:-1]) - np.log(k[1:])
    coefficients = start + np.concatenate([[0.0], np.cumsum(steps)])
    terms = np.exp(coefficients + k * math.log(share) + (total - k) * math.log1p(-share))
    return min(math.fsum(terms.tolist()), 1.0)


def reject_by_holm(tests: dict[T, float], level: float = LEVEL) -> set[T]:
    """Return the tests that are significant at `level` together, by Holm's procedure."""
    rejected: set[T] = set()
    for k, (key, p) in enumerate(sorted(tests.items(), key=lambda item: item[1])):
        if p > level / (len(tests) - k):
            break
        rejected.add(key)
    return rejected


def compute_smallest_share(counts: Iterable[int]) -> float:
    """Return the smallest share that shows at least once among the fewest observations, with a probability of CONFIDENCE."""
    least = min(counts, default=0)
    return 1 - (1 - CONFIDENCE) ** (1 / least) if least else 1.0


def compute_smallest_found_share(total: int, share: float, level: float) -> float:
    """Return the smallest share that a binomial test against `share` finds at `level` with a probability of CONFIDENCE; 1 if none."""
    enough = next((n for n in range(total + 1) if compute_tail(n, total, share) <= level), None)
    if enough is None:
        return 1.0
    low, high = share, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if compute_tail(enough, total, middle) >= CONFIDENCE else (middle, high)
    return high
