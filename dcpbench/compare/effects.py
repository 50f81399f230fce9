"""Compute the ratio of two sides and its uncertainty, from launches, repeats and samples. All values are logarithms.

A launch is one process that measured, with its own memory, clocks and communicators. These change all samples of a
launch together, so that only several launches show how much they matter. docs/comparing.md derives every formula.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from functools import lru_cache
from typing import TYPE_CHECKING

from dcpbench.compare.resampling import Error, join_variances
from dcpbench.records import student

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_LAUNCHES = 4  # of each side, or rounds: fewer do not show how launches scatter
POWER = 0.8  # chance of a verdict for which `estimate_more_launches` plans
MAX_LAUNCHES = 50  # of each side; more are not worth proposing
LAUNCH_CORRELATION = 0.5  # allowed between a launch and the next one of its side
ROUND_CORRELATION = 0.125  # the same between the differences of rounds A B, B A, …, from that of launches
EXTRA_DF = 2.0  # degrees of freedom of correlated launches beyond the launches of the smaller side


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Hold one metric of one point, as one launch measured it."""

    log: float  # mean logarithm over its repeats
    within: Error | None  # error estimated from this launch alone; None without samples
    repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Scale:
    """Hold a variance of an effect and the degrees of freedom with which it was estimated."""

    variance: float
    df: float

    def compute_half_width(self, tail: float) -> float:
        """Return how far the end of an interval lies that is missed with probability `tail`."""
        return math.sqrt(self.variance) * student.compute_quantile(tail, self.df) if self.variance else 0.0

    def compute_p(self, distance: float) -> float:
        """Return the chance of an effect at least this far out, if there is none."""
        if self.variance == 0:
            return 0.0 if distance > 0 else 1.0
        return student.sf(distance / math.sqrt(self.variance), self.df)


@dataclasses.dataclass(frozen=True)
class Effect:
    """Hold the logarithm of B / A with its variance."""

    log: float
    variance: float | None  # for independent launches; None if nothing shows how launches scatter
    df: float
    spread: float  # standard deviation of a launch, or of a round's difference, from which more launches are planned
    launches: tuple[int, int]
    paired: bool = False
    assumed: bool = False  # the scatter of launches was given by the user
    below: float = 0.0  # how much less it may be if a side is a forecast, beyond all scatter
    above: float = 0.0  # how much more it may be
    correlated: Scale | None = None  # for launches that depend on the launch before them

    @property
    def error(self) -> float:
        """Standard error of `log` for independent launches; infinite if it is unknown."""
        return math.inf if self.variance is None else math.sqrt(self.variance)

    @property
    def missing_launches(self) -> tuple[int, int]:
        """Return how many more launches A and B need before they are judged."""
        if self.assumed:
            return 0, 0
        a, b = (max(MIN_LAUNCHES - n, 0) for n in self.launches)
        return a, b

    def compute_interval(self, tail: float) -> tuple[float, float]:
        """Return the interval of the logarithm of which each end is missed with probability `tail`."""
        half = max((scale.compute_half_width(tail) for scale in self._scales), default=math.inf)
        return self.log - self.below - half, self.log + self.above + half

    @property
    def min_distance(self) -> float:
        """Distance from equality of the nearer end of a forecast; below 0 if equality lies between both ends."""
        return self.log - self.below if self.log > 0 else -self.log - self.above

    @property
    def max_distance(self) -> float:
        """Distance from equality of the farther end of a forecast."""
        return max(self.log + self.above, self.below - self.log)

    def compute_p_differs(self) -> float:
        """Return the p-value of the hypothesis that both sides are the same."""
        return min(1.0, 2 * self._compute_p_beyond(self.min_distance))

    def compute_p_same(self, margin: float) -> float:
        """Return the p-value of the hypothesis that they differ by `margin` or more (two one-sided tests, Schuirmann 1987)."""
        return max(
            self._compute_p_beyond(margin - self.log - self.above),
            self._compute_p_beyond(margin + self.log - self.below),
        )

    @property
    def _scales(self) -> list[Scale]:
        """Return the scales that have to agree on a verdict; none if the scatter of launches is unknown."""
        if self.variance is None:
            return []
        return [Scale(self.variance, self.df), *([self.correlated] if self.correlated else [])]

    def _compute_p_beyond(self, distance: float) -> float:
        return max((scale.compute_p(distance) for scale in self._scales), default=1.0)


def estimate_launch(values: Sequence[float], errors: Sequence[Error | None]) -> Estimate:
    """Return the mean logarithm of one launch's repeats; all values are positive.

    With several repeats their scatter counts, and never less than the scatter of their samples.
    """
    logs = [math.log(v) for v in values]
    known = [e for e in errors if e is not None]
    counted = [0.0 if e.of_requests else e.variance for e in known]
    inside = statistics.fmean(counted) / len(logs) if counted else 0.0
    if len(logs) > 1:
        variance = max(statistics.variance(logs) / len(logs), inside)
        return Estimate(statistics.fmean(logs), Error(variance, len(logs) - 1.0), len(logs))
    return Estimate(logs[0], known[0] if known else None)


def compare_sides(a: Sequence[Estimate], b: Sequence[Estimate], launch_noise: float | None = None) -> Effect:
    """Return the ratio of launches that are not paired.

    The variance is Welch's, S²_A / J_A + S²_B / J_B, and two tests have to agree: one for independent launches, with the
    degrees of freedom of the smaller side, which hold however much the scatter of the sides differs; and one for launches
    that correlate with the launch before them, so that their means scatter more (`compute_inflation`). With fewer than MIN_LAUNCHES on a side
    the scatter is unknown, unless the user gives `launch_noise`, the standard deviation of the difference of two launches.
    """
    log = statistics.fmean(e.log for e in b) - statistics.fmean(e.log for e in a)
    counts = (len(a), len(b))
    if min(counts) < MIN_LAUNCHES:
        return _compare_few(a, b, log, launch_noise)
    parts = [(_compute_launch_variance(side) / len(side), len(side) - 1.0) for side in (a, b)]
    inflated = [(v * compute_inflation(n, LAUNCH_CORRELATION), df) for (v, df), n in zip(parts, counts, strict=True)]
    smaller = min(counts)
    return Effect(
        log,
        variance=sum(v for v, _ in parts),
        df=smaller - 1.0,
        spread=math.sqrt((_compute_launch_variance(a) + _compute_launch_variance(b)) / 2),
        launches=counts,
        correlated=Scale(sum(v for v, _ in inflated), min(compute_satterthwaite_df(inflated), smaller + EXTRA_DF)),
    )


def compare_paired(a: Sequence[Estimate], b: Sequence[Estimate], launch_noise: float | None = None) -> Effect:
    """Return the ratio of launches that were made in pairs, so that what a pair shares cancels: a t test of differences."""
    differences = [y.log - x.log for x, y in zip(a, b, strict=True)]
    n = len(differences)
    if n < MIN_LAUNCHES:
        return dataclasses.replace(_compare_few(a, b, statistics.fmean(differences), launch_noise), paired=True)
    inside = statistics.fmean(_get_within_variance(x) + _get_within_variance(y) for x, y in zip(a, b, strict=True))
    variance = max(statistics.variance(differences), inside)
    inflated = Scale(variance / n * compute_inflation(n, ROUND_CORRELATION), n - 1.0)
    return Effect(
        statistics.fmean(differences),
        variance=variance / n,
        df=n - 1.0,
        spread=math.sqrt(variance),
        launches=(n, n),
        paired=True,
        correlated=inflated,
    )


@lru_cache(maxsize=256)
def compute_inflation(launches: int, correlation: float) -> float:
    """Return the factor by which the variance of a mean exceeds S² / n if launches are an AR(1) process.

    The mean of n launches has the variance σ²·g, g = (1 + 2·Σ(1 - k/n)·ρᵏ) / n, and S² has the mean σ²·(1 - g)·n / (n - 1):
    the factor is g·(n - 1) / (1 - g).
    """
    n = launches
    g = (1 + 2 * sum((1 - k / n) * correlation**k for k in range(1, n))) / n
    return g * (n - 1) / (1 - g)


def estimate_more_launches(effect: Effect, margin: float, tail: float) -> int | None:
    """Return how many more launches of each side, or rounds, decide it in 4 of 5 cases if the ratio is as it seems.

    The smallest n with h(n) + t(1 - POWER)·error(n) ≤ distance, h(n) being half of the interval of n launches. The distance
    is that to 1 for a difference beyond the margin and that to the margin for one within it, from the nearer end of a
    forecast. None if more than MAX_LAUNCHES are needed.
    """
    distance = effect.min_distance if abs(effect.log) > margin else margin - effect.max_distance
    have = min(effect.launches)
    for n in range(max(MIN_LAUNCHES, have), MAX_LAUNCHES + 1):
        if _compute_needed_distance(n, effect, tail) <= distance:
            return max(n - have, 1)
    return None


def find_min_visible(effect: Effect, tail: float) -> float | None:
    """Return the smallest difference of logarithms that is found in 4 of 5 cases; None if scatter is not known."""
    if effect.variance is None:
        return None
    half = effect.compute_interval(tail)[1] - effect.log
    return half + effect.error * student.compute_quantile(1 - POWER, max(effect.df, 1.0))


def count_rejected(p_values: Sequence[float], alpha: float) -> int:
    """Return how many hypotheses are rejected: the largest k for which the k-th smallest p is at most alpha·k/m.

    Benjamini and Hochberg (1995). If nothing differs at all, the chance of any rejection is at most alpha; else the
    expected share of wrong ones among the rejected is. Holds for independent tests, and for tests that are positively
    dependent, as metrics of one point are (Benjamini and Yekutieli, 2001).
    """
    m = len(p_values)
    return max((k for k, p in enumerate(sorted(p_values), 1) if p <= alpha * k / m), default=0)


def compute_level(p_values: Sequence[float], alpha: float) -> float:
    """Return the largest p that is rejected, which is 1 - confidence of the intervals: alpha · max(1, R) / m.

    Intervals at this level exclude equality exactly if it is rejected, and on average at most alpha of the intervals of
    rejected hypotheses miss their ratio (Benjamini and Yekutieli, 2005).
    """
    return alpha * max(1, count_rejected(p_values, alpha)) / max(1, len(p_values))


def compute_satterthwaite_df(parts: Sequence[tuple[float, float]]) -> float:
    """Return the degrees of freedom of a sum of variances, each with its own: (Σv)² / Σ(v² / df)."""
    total = sum(v for v, _ in parts)
    below = sum(v * v / df for v, df in parts if v > 0 and not math.isinf(df))
    return total * total / below if below > 0 else math.inf


def _compare_few(a: Sequence[Estimate], b: Sequence[Estimate], log: float, launch_noise: float | None) -> Effect:
    """Return the ratio of too few launches to show their scatter; its variance is known only with `launch_noise`.

    Two single launches add the error of their samples. Of several the larger of their own and the given scatter counts.
    """
    counts = (len(a), len(b))
    if launch_noise is None:
        return Effect(log, None, 1.0, 0.0, counts)
    spread = launch_noise / math.sqrt(2)
    first, second = a[0].within, b[0].within
    if max(counts) > 1:
        parts = [_assume_spread(side, spread) for side in (a, b)]
    elif first is None or second is None:
        return Effect(log, None, 1.0, spread, counts, assumed=True)
    else:
        parts = [*join_variances(first, second), (launch_noise**2, math.inf)]
    return Effect(log, sum(v for v, _ in parts), compute_satterthwaite_df(parts), spread, counts, assumed=True)


def _assume_spread(side: Sequence[Estimate], spread: float) -> tuple[float, float]:
    """Return the variance of a side's mean with its degrees of freedom, which the user's figure has without end."""
    own = _compute_launch_variance(side) if len(side) > 1 else _get_within_variance(side[0])
    n = len(side)
    return (own / n, max(n - 1.0, 1.0)) if own > spread**2 else (spread**2 / n, math.inf)


def _compute_needed_distance(n: int, effect: Effect, tail: float) -> float:
    """Return the distance that n launches of each side, or n rounds, decide in 4 of 5 cases."""
    if effect.paired:
        error, power = effect.spread / math.sqrt(n), student.compute_quantile(1 - POWER, n - 1.0)
        half = student.compute_quantile(tail, n - 1.0) * math.sqrt(compute_inflation(n, ROUND_CORRELATION))
        return (half + power) * error
    error, power = effect.spread * math.sqrt(2 / n), student.compute_quantile(1 - POWER, 2.0 * (n - 1))
    correlated = student.compute_quantile(tail, min(2.0 * (n - 1), n + EXTRA_DF)) * math.sqrt(
        compute_inflation(n, LAUNCH_CORRELATION)
    )
    return (max(student.compute_quantile(tail, n - 1.0), correlated) + power) * error


def _compute_launch_variance(side: Sequence[Estimate]) -> float:
    """Return the variance of one launch: that between launches, never less than that within them."""
    return max(statistics.variance(e.log for e in side), statistics.fmean(_get_within_variance(e) for e in side))


def _get_within_variance(one: Estimate) -> float:
    """Return the variance of a launch's steps; requests are the same in every launch."""
    return one.within.variance if one.within and not one.within.of_requests else 0.0
