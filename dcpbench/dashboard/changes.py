"""Where the history of a point changes for good: PELT proposes, permutations decide, Welch says how much.

1. Single odd runs are pulled in: a value further than 4 standard deviations from the median of the five around it takes
   that median (Hampel's filter). One odd run is not a change, and neither is the newest run alone.
2. ruptures' PELT (KernelCPD, linear kernel: exact least squares) splits the logarithms, in units of their run-to-run
   standard deviation, with the penalty 3·ln(runs) for each split and at least 3 runs on each side.
3. Each split must be such as shuffled runs hardly ever have: among 999 permutations of the runs on its two sides, the
   largest t over all splits is as large in fewer than 1 % of them. The least sure split is dropped first.
4. A change below 0.5 % is not marked, however sure it is.

Runs are taken to scatter independently; a slow drift is found as one or several steps.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import MissingPackageError, how_to_install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from ruptures import KernelCPD

    Floats = NDArray[np.float64]

LEAST_RUNS = 6
"""Histories shorter than two sides of a change are not looked at."""
LEAST_SIDE = 3
PENALTY = 3.0
"""Times ln(runs), in units of the variance."""
ODD = 4.0
WINDOW = 2
"""Runs on each side of the one that the filter looks at."""
PERMUTATIONS = 999
SIGNIFICANCE = 0.01
LEAST_CHANGE = 0.005
SURE = 0.95
TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, of normal noise."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A step between two neighbouring runs of a history."""

    before: int
    """Index of the last run of the old level; the first of the new one is `before + 1`."""
    old: float
    new: float
    """Levels, in the unit of the values: geometric means, or plain ones where a value is not positive."""
    ratio: float | None
    """new / old with its 95 % interval; null where a value is not positive."""
    low: float | None
    high: float | None


def find(values: Sequence[float]) -> tuple[Change, ...]:
    """The changes of a history, oldest first; `values` are medians of runs in order, all finite.

    Raises MissingPackageError without ruptures.
    """
    return _find(tuple(values))


@lru_cache(maxsize=100_000)  # a server builds again and again, and few histories grew meanwhile
def _find(values: tuple[float, ...]) -> tuple[Change, ...]:
    x = np.asarray(values, dtype=np.float64)
    if len(x) < LEAST_RUNS or float(np.ptp(x)) == 0:
        return ()
    relative = bool((x > 0).all())
    level = _without_odd(np.log(x) if relative else x)
    least = math.log1p(LEAST_CHANGE) if relative else 0.0
    bounds = _sure(level, _proposed(level))
    found = []
    for i in range(1, len(bounds) - 1):
        one, other = level[bounds[i - 1] : bounds[i]], level[bounds[i] : bounds[i + 1]]
        old, new = float(one.mean()), float(other.mean())
        step = new - old
        if abs(step) > least and relative:
            ends = [math.exp(x) for x in (old, new, step, step - _welch(one, other), step + _welch(one, other))]
            found.append(Change(bounds[i] - 1, *ends))
        elif abs(step) > least:
            found.append(Change(bounds[i] - 1, old, new, None, None, None))
    return tuple(found)


def _without_odd(x: Floats) -> Floats:
    """Values with single odd ones replaced by the median around them."""
    sigma = _sigma(x)
    inside = np.median(np.lib.stride_tricks.sliding_window_view(x, 2 * WINDOW + 1), axis=1)
    first = [np.median(x[: i + WINDOW + 1]) for i in range(WINDOW)]
    last = [np.median(x[i - WINDOW :]) for i in range(len(x) - WINDOW, len(x))]
    around = np.concatenate([first, inside, last])
    return np.where(np.abs(x - around) > ODD * sigma, around, x)


def _sigma(x: Floats) -> float:
    """Run-to-run standard deviation from differences of neighbours, to which a step adds only one.

    Differences past three robust deviations are cut, so that odd runs and steps hardly widen it.
    """
    differences = np.abs(np.diff(x))
    robust = float(np.median(differences)) * TO_SIGMA
    if robust == 0:
        return 0.0
    return float(np.sqrt(np.mean(np.minimum(differences, 3 * robust) ** 2) / 2))


def _proposed(x: Floats) -> list[int]:
    """PELT's bounds of segments, 0 and the length included."""
    scale = _sigma(x) or float(abs(x).max()) * 1e-9 or 1.0
    steps = detector().fit((x - x.mean()).reshape(-1, 1) / scale)
    return [0, *(int(end) for end in steps.predict(pen=PENALTY * math.log(len(x))))]


def detector() -> KernelCPD:
    """ruptures' PELT. Raises MissingPackageError without it."""
    try:
        from ruptures import KernelCPD
    except ImportError as e:
        raise MissingPackageError(
            f"change points need the package ruptures; type: {how_to_install('dashboard')}"
        ) from e
    return KernelCPD(kernel="linear", min_size=LEAST_SIDE)


def _sure(x: Floats, bounds: list[int]) -> list[int]:
    """Bounds without those that chance makes, the least sure dropped first: its sides then test its neighbours."""
    while len(bounds) > 2:  # noqa: PLR2004 - the two ends
        chances = [_chance(x[a:c], b - a) for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False)]
        worst = max(range(len(chances)), key=chances.__getitem__)
        if chances[worst] <= SIGNIFICANCE:
            break
        del bounds[worst + 1]
    return bounds


def _chance(x: Floats, split: int) -> float:
    """Share of permutations in which some split has a t as large as this one's."""
    shuffled = np.random.default_rng(len(x)).permuted(np.tile(x, (PERMUTATIONS, 1)), axis=1)
    here = _t(x[None, :])[0, split - LEAST_SIDE]
    return float(1 + np.sum(_t(shuffled).max(axis=1) >= here * (1 - 1e-9))) / (PERMUTATIONS + 1)


def _t(rows: Floats) -> Floats:
    """|t| of every split of each row that leaves LEAST_SIDE runs on both sides."""
    n = rows.shape[1]
    rows = rows - rows.mean(axis=1, keepdims=True)
    k = np.arange(LEAST_SIDE, n - LEAST_SIDE + 1)
    left = np.cumsum(rows, axis=1)[:, k - 1]
    between = left**2 * (1 / k + 1 / (n - k))
    within = np.maximum((rows**2).sum(axis=1, keepdims=True) - between, 0.0)
    spread = np.maximum(within / (n - 2), np.finfo(np.float64).eps * (rows**2).sum(axis=1, keepdims=True))
    found: Floats = np.sqrt(between / np.where(spread > 0, spread, 1.0))
    return found


def _welch(one: Floats, other: Floats) -> float:
    """Half of Welch's 95 % interval of the difference of two means."""
    from scipy.special import stdtrit

    a, b = one.var(ddof=1) / len(one), other.var(ddof=1) / len(other)
    if a + b == 0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    return float(stdtrit(freedom, (1 + SURE) / 2) * math.sqrt(a + b))
