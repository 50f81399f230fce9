"""The ratio of two sides and how well it is known: launches above repeats above samples. All on logarithms.

Of many ratios at once `rejected` says which may be believed, and `level` how wide their intervals must be for it.

A launch is one process that measured, with its own memory, clocks and communicators: what it does to all its samples
alike shows only between launches. docs/comparing.md derives every formula.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from dcpbench.compare import student
from dcpbench.compare.resampling import Error, joint

if TYPE_CHECKING:
    from collections.abc import Sequence

POWER = 0.8
"""Chance of a verdict with which `more_launches` reckons."""
MOST_LAUNCHES = 50
"""More than these on each side are not worth proposing."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one launch says of one metric of one point."""

    log: float
    """Mean logarithm over its repeats."""
    within: Error | None
    """How well it is known as far as this launch can tell; None where it left no samples."""
    repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Effect:
    """log(B / A), its variance, and where that comes from."""

    log: float
    variance: float | None
    """None where nothing says how well it is known."""
    df: float
    spread: float
    """Standard deviation of a launch (paired: of a round's difference), for reckoning how many more are needed."""
    launches: tuple[int, int]
    paired: bool = False
    assumed: bool = False
    """Whether the scatter of launches was assumed, as each side has one."""
    below: float = 0.0
    above: float = 0.0
    """By how much less and more it may be where a side is a forecast: how far the ends of that reach, beyond all scatter."""

    @property
    def error(self) -> float:
        """Standard error of `log`; infinite where it is not known."""
        return math.inf if self.variance is None else math.sqrt(self.variance)

    def interval(self, tail: float) -> tuple[float, float]:
        """Of the logarithm; each end is missed with probability `tail`."""
        half = self.error * student.quantile(tail, self.df) if self.error else 0.0
        return self.log - self.below - half, self.log + self.above + half

    @property
    def least(self) -> float:
        """How far from equality it is at that end which is nearer to it; below 0 where it lies between both."""
        return self.log - self.below if self.log > 0 else -self.log - self.above

    @property
    def most(self) -> float:
        """And at the other."""
        return max(self.log + self.above, self.below - self.log)

    def p_differs(self) -> float:
        """Of the hypothesis that both sides are the same."""
        return min(1.0, 2 * self._beyond(self.least))

    def p_same(self, margin: float) -> float:
        """Of the hypothesis that they differ by `margin` or more: two one-sided tests (Schuirmann, 1987)."""
        return max(self._beyond(margin - self.log - self.above), self._beyond(margin + self.log - self.below))

    def _beyond(self, distance: float) -> float:
        if self.variance is None:
            return 1.0
        if self.variance == 0:
            return 0.0 if distance > 0 else 1.0
        return student.sf(distance / self.error, self.df)


def estimate(values: Sequence[float], errors: Sequence[Error | None]) -> Estimate:
    """One launch: the mean logarithm of its repeats' values, which are positive.

    With several repeats their scatter counts, and never less than what their samples' scatter makes of it.
    """
    logs = [math.log(v) for v in values]
    known = [e for e in errors if e is not None]
    counted = [0.0 if e.of_requests else e.variance for e in known]
    inside = statistics.fmean(counted) / len(logs) if counted else 0.0
    if len(logs) > 1:
        variance = max(statistics.variance(logs) / len(logs), inside)
        return Estimate(statistics.fmean(logs), Error(variance, len(logs) - 1.0), len(logs))
    return Estimate(logs[0], known[0] if known else None)


def compare(a: Sequence[Estimate], b: Sequence[Estimate], launch_noise: float) -> Effect:
    """The ratio of launches that have nothing to do with each other.

    Several launches on both sides: Welch's t. Several on one: the other one's scatter is taken to be the same (pooled
    variance). One on each: `launch_noise`, the assumed standard deviation of the difference of two launches, is added
    to what samples say.
    """
    log = statistics.fmean(e.log for e in b) - statistics.fmean(e.log for e in a)
    counts = (len(a), len(b))
    if max(counts) == 1:
        return _assumed(a[0], b[0], launch_noise)
    several = [side for side in (a, b) if len(side) > 1]
    if len(several) == 1:
        # One launch's scatter stands for the other's: the same formula for each side, from the side that has several.
        (side,) = several
        variance = _of_launch(side)
        return Effect(log, variance / counts[0] + variance / counts[1], len(side) - 1.0, math.sqrt(variance), counts)
    parts = [(_of_launch(side) / len(side), len(side) - 1.0) for side in (a, b)]
    total = sum(v for v, _ in parts)
    spread = math.sqrt((_of_launch(a) + _of_launch(b)) / 2)
    return Effect(log, total, satterthwaite(parts), spread, counts)


def compare_paired(a: Sequence[Estimate], b: Sequence[Estimate], launch_noise: float) -> Effect:
    """The ratio of launches that were made in pairs, so that what a pair shares cancels: a t test of differences."""
    differences = [y.log - x.log for x, y in zip(a, b, strict=True)]
    n = len(differences)
    if n == 1:
        return dataclasses.replace(_assumed(a[0], b[0], launch_noise), paired=True)
    inside = statistics.fmean(_within(x) + _within(y) for x, y in zip(a, b, strict=True))
    variance = max(statistics.variance(differences), inside)
    return Effect(statistics.fmean(differences), variance / n, n - 1.0, math.sqrt(variance), (n, n), paired=True)


def more_launches(effect: Effect, margin: float, tail: float) -> int | None:
    """How many more launches of each side (paired: rounds) would settle it in 4 of 5 cases, were the ratio as it seems.

    The smallest n with (t(tail) + t(1 - POWER)) · error(n) ≤ distance, the distance being that to 1 for a difference
    beyond the margin and that to the margin for one within it, from that end of a forecast which is nearer. None where
    more than MOST_LAUNCHES would be needed.
    """
    distance = effect.least if abs(effect.log) > margin else margin - effect.most
    have = min(effect.launches)
    for n in range(max(2, have), MOST_LAUNCHES + 1):
        df = (n - 1.0) * (1 if effect.paired else 2)
        error = effect.spread * math.sqrt((1 if effect.paired else 2) / n)
        if (student.quantile(tail, df) + student.quantile(1 - POWER, df)) * error <= distance:
            return max(n - have, 1)
    return None


def rejected(p_values: Sequence[float], alpha: float) -> int:
    """How many hypotheses may be rejected: the largest k for which the k-th smallest p is at most alpha·k/m.

    Benjamini and Hochberg (1995). Where nothing differs at all, the chance of any rejection is at most alpha; else the
    expected share of wrong ones among the rejected is. Holds for independent tests, and for tests that are positively
    dependent, as metrics of one point are (Benjamini and Yekutieli, 2001).
    """
    m = len(p_values)
    return max((k for k, p in enumerate(sorted(p_values), 1) if p <= alpha * k / m), default=0)


def level(p_values: Sequence[float], alpha: float) -> float:
    """What a p must not exceed to be rejected, which is 1 - confidence of the intervals: alpha · max(1, R) / m.

    Intervals at this level exclude equality exactly where it is rejected, and on average at most alpha of those shown
    for rejected ones miss their ratio (Benjamini and Yekutieli, 2005).
    """
    return alpha * max(1, rejected(p_values, alpha)) / max(1, len(p_values))


def satterthwaite(parts: Sequence[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum of variances, each with its own: (Σv)² / Σ(v² / df)."""
    total = sum(v for v, _ in parts)
    below = sum(v * v / df for v, df in parts if v > 0 and not math.isinf(df))
    return total * total / below if below > 0 else math.inf


def _assumed(a: Estimate, b: Estimate, launch_noise: float) -> Effect:
    log = b.log - a.log
    spread = launch_noise / math.sqrt(2)
    if a.within is None or b.within is None:
        return Effect(log, None, 1.0, spread, (1, 1), assumed=True)
    parts = [*joint(a.within, b.within), (launch_noise**2, math.inf)]
    return Effect(log, sum(v for v, _ in parts), satterthwaite(parts), spread, (1, 1), assumed=True)


def _of_launch(side: Sequence[Estimate]) -> float:
    """Variance of one launch: that between launches, never less than that within them."""
    return max(statistics.variance(e.log for e in side), statistics.fmean(_within(e) for e in side))


def _within(one: Estimate) -> float:
    """Of its steps; requests are the same in every launch."""
    return one.within.variance if one.within and not one.within.of_requests else 0.0
