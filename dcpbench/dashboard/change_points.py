"""Find lasting changes in the history of a point: PELT proposes them, a calibrated test decides.

1. Replace odd runs. A run is odd if it lies more than 4 standard deviations from the median of its four neighbours, and
   at most two runs of the history lie at least half as far out. One odd run is not a change.
2. Propose steps. ruptures' PELT (KernelCPD, linear kernel: exact least squares) splits the logarithms, in units of their
   run-to-run standard deviation, with a penalty of 3·ln(runs) for each split and at least MIN_SIDE runs on each side.
3. Test each step between its neighbouring steps. Its size has to be at least `compute_required_score` standard errors. The
   standard error assumes noise with the autocorrelation of the residuals, and at least MIN_CORRELATION. The least certain
   step is dropped first; then its neighbours are tested again.
4. Ignore a change below 0.5 %, however certain it is.

`python -m tools.statistics_check` calibrates `compute_required_score`: an unchanged history that grows from MIN_RUNS to 60 runs and
is looked at after every run is ever marked in at most 1 of 100 cases. docs/dashboard.md states for which noise.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import MissingPackageError, format_install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MIN_RUNS = 12  # of a history, and of the two sides of a step together: fewer do not show their own scatter
MIN_SIDE = 4  # runs on each side of a step
PENALTY = 3.0  # of a split, times ln(runs), in units of the variance
ODD = 4.0  # standard deviations beyond which a run can be odd
MAX_ODD = 2  # runs that lie that far out; more of them are part of the noise
USUAL = 0.9  # quantile of deviations from which the scatter is estimated: two-valued noise has a median of 0
TO_SIGMA = 1.875  # that quantile to the standard deviation, for normal noise and the median of four neighbours
DIFFERENCE_TO_SIGMA = 2.326  # the same for the difference of two neighbouring runs: 1.645·√2
MIN_SCORE = 5.6  # standard errors of a step in a long history
SCORE_OF_SHORT = 20.0  # more standard errors for a short history, times 1 / runs
MIN_CORRELATION = 0.3  # of successive runs: short histories show less than there is
MAX_CORRELATION = 0.8
MIN_CHANGE = 0.005
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Change:
    """Hold a step between two neighbouring runs of a history."""

    before: int  # index of the last run of the old level; the new level begins at `before + 1`
    old: float  # level in the unit of the values: a geometric mean, or a plain mean if a value is not positive
    new: float
    ratio: float | None  # new / old with its 95 % interval; None if a value is not positive
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Step:
    """Hold the difference of two levels and its standard error."""

    difference: float
    error: float  # standard error, for autocorrelated runs
    runs: int

    @property
    def score(self) -> float:
        """The size of the step in standard errors."""
        size = abs(self.difference)
        return size / self.error if self.error > 0 else (math.inf if size > 0 else 0.0)

    @property
    def certainty(self) -> float:
        """The score as a share of the required one; below 1 for a step that chance may have made."""
        return self.score / compute_required_score(self.runs)


def compute_required_score(runs: int) -> float:
    """Return how many standard errors a step among so many runs needs."""
    return MIN_SCORE + SCORE_OF_SHORT / runs


def find_changes(values: Sequence[float]) -> tuple[Change, ...]:
    """Return the changes of a history, oldest first; `values` are medians of runs in order, all finite.

    Raises MissingPackageError without ruptures.
    """
    return _find_cached(tuple(values))


@lru_cache(maxsize=100_000)  # a server builds again and again, and few histories grew meanwhile
def _find_cached(values: tuple[float, ...]) -> tuple[Change, ...]:
    x = np.asarray(values, dtype=np.float64)
    if len(x) < MIN_RUNS or float(np.ptp(x)) == 0:
        return ()
    from scipy.special import stdtrit

    relative = bool((x > 0).all())
    level = _replace_odd_runs(np.log(x) if relative else x)
    smallest = math.log1p(MIN_CHANGE) if relative else 0.0
    bounds = _drop_uncertain(level, _suggest_bounds(level))
    found = []
    for i in range(1, len(bounds) - 1):
        before, after = level[bounds[i - 1] : bounds[i]], level[bounds[i] : bounds[i + 1]]
        step = measure_step(before, after)
        if abs(step.difference) <= smallest:
            continue
        old, new = float(before.mean()), float(after.mean())
        if not relative:
            found.append(Change(bounds[i] - 1, old, new, None, None, None))
            continue
        half = float(stdtrit(step.runs - 2, (1 + CONFIDENCE) / 2)) * step.error
        ends = (old, new, step.difference, step.difference - half, step.difference + half)
        found.append(Change(bounds[i] - 1, *map(math.exp, ends)))
    return tuple(found)


def _replace_odd_runs(x: Floats) -> Floats:
    """Return the values with each odd run replaced by the median of its neighbours."""
    around = _compute_neighbour_median(x)
    away = x - around
    limit = ODD * _compute_usual_size(away) / TO_SIGMA
    replaced = x.copy()
    for i in np.flatnonzero(np.abs(away) > limit):
        as_far = np.count_nonzero((x - around[i]) * np.sign(away[i]) >= abs(away[i]) / 2)
        if as_far <= MAX_ODD:
            replaced[i] = around[i]
    return replaced


def _compute_usual_size(deviations: Floats) -> float:
    """Return the USUAL quantile of their sizes, linear between neighbours; ten times as fast as numpy's for short arrays."""
    ordered = np.sort(np.abs(deviations))
    place = (len(ordered) - 1) * USUAL
    below = int(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return float(low + (high - low) * (place - below))


def _compute_neighbour_median(x: Floats) -> Floats:
    """Return for each run the median of up to two runs before and two runs behind it."""
    around = np.empty_like(x)
    neighbours = np.sort(np.stack([x[:-4], x[1:-3], x[3:-1], x[4:]]), axis=0)
    around[2:-2] = (neighbours[1] + neighbours[2]) / 2
    around[0], around[-1] = (x[1] + x[2]) / 2, (x[-3] + x[-2]) / 2
    around[1], around[-2] = sorted((x[0], x[2], x[3]))[1], sorted((x[-4], x[-3], x[-1]))[1]
    return around


def _suggest_bounds(x: Floats) -> list[int]:
    """Return the bounds of PELT's segments, 0 and the length included."""
    usual = _compute_usual_size(np.diff(x)) / DIFFERENCE_TO_SIGMA
    scale = usual or float(abs(x).max()) * 1e-9 or 1.0
    check_installed()
    from ruptures import KernelCPD

    detector = KernelCPD(kernel="linear", min_size=MIN_SIDE)
    steps = detector.fit((x - x.mean()).reshape(-1, 1) / scale)
    return [0, *(int(end) for end in steps.predict(pen=PENALTY * math.log(len(x))))]


def check_installed() -> None:
    """Raise MissingPackageError without ruptures; importing it takes seconds, which only long histories need."""
    if importlib.util.find_spec("ruptures") is None:
        raise MissingPackageError(f"change points need the package ruptures; type: {format_install_hint('dashboard')}")


def _drop_uncertain(x: Floats, bounds: list[int]) -> list[int]:
    """Return the bounds without steps that chance makes, the least certain dropped first.

    A dropped step joins its two sides, so that its neighbours are then tested against more runs.
    """
    known: dict[tuple[int, int, int], float] = {}
    while len(bounds) > 2:  # noqa: PLR2004 - the two ends
        certainties = []
        for ends in zip(bounds, bounds[1:], bounds[2:], strict=False):
            if ends not in known:
                begin, split, end = ends
                enough = end - begin >= MIN_RUNS
                known[ends] = measure_step(x[begin:split], x[split:end]).certainty if enough else 0.0
            certainties.append(known[ends])
        worst = min(range(len(certainties)), key=certainties.__getitem__)
        if certainties[worst] >= 1:
            break
        del bounds[worst + 1]
    return bounds


def measure_step(before: Floats, after: Floats) -> Step:
    """Return the difference of two levels with a standard error for runs with the noise of an AR(1) process.

    A mean of k runs has the variance σ²·g(k), g(k) = (1 + 2·Σ(1 - j/k)·ρʲ) / k, and the squared residuals of both
    sides sum to σ²·(n - k·g(k) - (n - k)·g(n - k)) on average. ρ comes from neighbouring residuals; estimates from n runs
    on two levels are too small by about 2·(1 + 3ρ) / n (Marriott and Pope 1954, for each mean that is fitted).
    """
    means = [float(side.sum()) / len(side) for side in (before, after)]
    sides = [side - mean for side, mean in zip((before, after), means, strict=True)]
    n = len(before) + len(after)
    power = sum(float(e @ e) for e in sides)
    difference = means[1] - means[0]
    if power <= np.finfo(np.float64).eps ** 2 * difference**2:
        return Step(difference, 0.0, n)
    rho = sum(float(e[1:] @ e[:-1]) for e in sides) / power
    rho += 2 * (1 + 3 * max(rho, 0.0)) / n
    rho = min(max(rho, MIN_CORRELATION), MAX_CORRELATION)
    shares = [_compute_variance_of_mean(len(side), rho) for side in sides]
    variance = power / (n - sum(len(side) * share for side, share in zip(sides, shares, strict=True)))
    return Step(difference, math.sqrt(variance * sum(shares)), n)


def _compute_variance_of_mean(runs: int, rho: float) -> float:
    """Return the variance of the mean of so many successive runs, in units of the variance of one run: g(k) in closed form."""
    return ((1 + rho) / (1 - rho) - 2 * rho * (1 - rho**runs) / (runs * (1 - rho) ** 2)) / runs
