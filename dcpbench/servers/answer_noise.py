"""Measure the rounding of a server from its answers to the same prompts, and compute which differences it explains. No I/O.

A server computes the same function when a prompt is sent again, is found in the prefix cache, or is part of another batch. Only the
kernels and the order of their sums change. The differences among its own answers are therefore rounding, and show its whole
distribution: bf16 sums move log-probabilities by hundredths, fp8 activations by more, and a token that gets another expert by much more.

Two layouts change the order of sums, too. Their differences count as real if they are LAYOUT_FACTOR times as large as the
server's own at the same quantile of the distribution: the typical difference is compared with the typical rounding, and the largest
with the largest. Only answers that are not identical enter the distribution, as some conditions change no sum at all: short prompts
are computed in the same way in each batch, but not in each layout.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.servers.answer_pairs import (
    DRIFT,
    NEAR_TIE,
    OUTLIER,
    SAME,
    TOKEN,
    TOLERANCE,
    UNKNOWN,
    Pair,
    find_prompt_value,
    measure_distance,
)
from dcpbench.servers.exact_tests import compute_tail, compute_upper_bound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.servers.answer_counts import Count
    from dcpbench.servers.answer_pairs import Answer, Distance, ScoredPrompt

    Prompts = Iterable[Sequence[tuple[Answer, Answer]]]

LAYOUT_FACTOR = 2.0
"""Rounding between layouts may be this many times that of a server with itself. It is 1.0 times in gaps and 1.3 times in drifts, at all
quantiles, for vLLM 0.26 with DeepSeek-V3's layers in fp8 at dcp 1 and 2 (tests/data/verify/vllm_2xH200.json).
"""
QUANTILES = (0.5, 0.9, 0.98)
CEILINGS = (0.25, 0.4, 0.5, 0.6)
"""Upper bounds of the limits of drifts, as shares of the scale, at each of QUANTILES and at the maximum; those of gaps are twice as large.
They are above all rounding that was measured with fp8 and weights that are not trained: 0.06, 0.13, 0.2 and 0.47 in drifts, 0.19, 0.44,
0.7 and 0.9 in gaps (the same data, and results/engines_H200/engines_1xH200_2026-11-29).
"""
MIN_NOISE_PROMPTS = 20  # prompts with answers that are not identical, from which a distribution is measured
MIN_NOISE_SHARE = 0.1  # share of such prompts; where fewer differ, the conditions change too few sums
MIN_NOISE = 0.001  # natural logarithms; answers that are closer count as identical
MIN_GAP_RATIO, MAX_GAP_RATIO = 2.0, 4.0
"""Ratio of gaps to drifts, for the one that follows from the other where only one is measured (2.7 to 5.2 in the same data); each is
assumed to be as large as it may be.
"""
MAX_CHANCE_SHARE = 0.01  # share of prompts in which a server may differ from itself by chance beyond rounding
NOISE_FACTOR = 4.0  # a difference of this many times the noise of repeated log-probabilities is beyond it
GAP, DRIFT_SIZE = "gap", "drift"  # sizes that are compared


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps and drifts of the answers of one server to the same prompts, [effect][prompt]; 0: identical."""

    gaps: dict[str, list[float]]
    drifts: dict[str, list[float]]

    def __add__(self, other: Sizes) -> Sizes:
        """Return the sizes of both."""
        return Sizes(gaps=_join_lists(self.gaps, other.gaps), drifts=_join_lists(self.drifts, other.drifts))


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of one size over prompts: its values at QUANTILES, and the maximum."""

    prompts: int = 0  # from which it is measured; 0: it is unknown
    values: list[float] = []

    def multiply(self, factor: float) -> Noise:
        """Return the noise of a size that is so many times as large."""
        return Noise(prompts=self.prompts, values=[factor * value for value in self.values])


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of log-probabilities that rounding explains, in natural logarithms."""

    tolerance: float = TOLERANCE  # drift that is never a difference; a gap may be twice as large
    scale: float = 1.0  # standard deviation of the log-probabilities of random tokens, at most 1; 1 if unknown
    gap_noise: Noise = Noise()
    drift_noise: Noise = Noise()

    @property
    def is_measured(self) -> bool:
        """Return whether the rounding is known."""
        return bool(self.drift_noise.prompts or self.gap_noise.prompts)

    @property
    def is_too_wide(self) -> bool:
        """Return whether the typical rounding is so large that a fault could look like it."""
        return LAYOUT_FACTOR * self._get_value(DRIFT_SIZE, 0) > self._get_ceiling(DRIFT_SIZE, 0) or (
            LAYOUT_FACTOR * self._get_value(GAP, 0) > self._get_ceiling(GAP, 0)
        )

    def list_limits(self, size: str) -> list[float]:
        """Return the size at each of QUANTILES, and the maximum, beyond which rounding explains no difference."""
        return [self._compute_limit(size, i) for i in range(len(CEILINGS))]

    def get_limit(self, size: str) -> float:
        """Return the size beyond which rounding explains no single difference."""
        return self._compute_limit(size, -1)

    def get_explained(self, size: str) -> float:
        """Return the largest size that rounding is known to have."""
        return min(max(self._get_floor(size), self._get_value(size, -1)), self.get_limit(size))

    def get_typical_share(self, size: str, place: int) -> float:
        """Return the maximum share of prompts beyond the limit at a quantile: its upper bound, as few prompts give the quantile."""
        share = max(1.0 - QUANTILES[place], 2 * MAX_CHANCE_SHARE)
        prompts = self._get_noise(size).prompts
        return max(compute_upper_bound(round((1.0 - QUANTILES[place]) * prompts), prompts), share) if prompts else share

    @property
    def scores(self) -> float:
        """Return the limit of the mean over the tokens of a prompt: such a mean has no large values of the rounding."""
        ceiling = self._get_ceiling(DRIFT_SIZE, 0)
        return max(min(self._compute_limit(DRIFT_SIZE, 1), ceiling), self.tolerance)

    def compare_pair(self, a: Answer, b: Answer) -> Pair:
        """Compare two answers to one prompt, and classify the pair."""
        found = measure_distance(a, b)
        return Pair(
            kind=self._classify(found),
            first=found.first,
            gap=found.gap,
            drift=found.drift,
            compared=found.equal + (found.first is not None),
            tokens=found.tokens,
        )

    def _classify(self, found: Distance) -> str:
        gap, drift = found.gap, found.judged_drift
        kind = SAME
        if found.first is not None:
            if found.is_disjoint or (gap is not None and gap > self.get_limit(GAP)):
                return TOKEN
            kind = self._classify_gap(found)
        if drift > self.get_limit(DRIFT_SIZE):
            return DRIFT
        return OUTLIER if kind in (SAME, NEAR_TIE) and drift > self.get_explained(DRIFT_SIZE) else kind

    def _classify_gap(self, found: Distance) -> str:
        """Return the kind of two tokens that no certain difference separates.

        A lower bound of a gap is no near-tie. It is an outlier if rounding is known to move other tokens into the lists of likeliest
        ones, and the lists have tokens in common.
        """
        if found.gap is None or not (found.exact or (self.is_measured and found.overlaps)):
            return UNKNOWN
        return NEAR_TIE if found.exact and found.gap <= self.get_explained(GAP) else OUTLIER

    def _compute_limit(self, size: str, place: int) -> float:
        ceiling = self._get_ceiling(size, place)
        value = self._get_value(size, place)
        return max(self._get_floor(size), min(LAYOUT_FACTOR * value, ceiling) if self.is_measured else ceiling)

    def _get_floor(self, size: str) -> float:
        return self.tolerance * (2 if size == GAP else 1)

    def _get_ceiling(self, size: str, place: int) -> float:
        return CEILINGS[place] * self.scale * (2 if size == GAP else 1)

    def _get_noise(self, size: str) -> Noise:
        """Return the noise of a size; where it is not measured, it follows from that of the other size."""
        if size == GAP:
            return self.gap_noise if self.gap_noise.prompts else self.drift_noise.multiply(MAX_GAP_RATIO)
        return self.drift_noise if self.drift_noise.prompts else self.gap_noise.multiply(1 / MIN_GAP_RATIO)

    def _get_value(self, size: str, place: int) -> float:
        noise = self._get_noise(size)
        return noise.values[place] if noise.prompts else 0.0


def measure_sizes(effects: Mapping[str, Prompts]) -> Sizes:
    """Return how far answers of one server to the same prompts are apart, from the pairs of answers of each effect."""
    gaps: dict[str, list[float]] = {}
    drifts: dict[str, list[float]] = {}
    for effect, prompts in effects.items():
        found = [[measure_distance(x, y) for x, y in of] for of in prompts]
        gaps[effect] = [find_prompt_value([one.gap or 0.0 for one in of]) for of in found]
        drifts[effect] = [find_prompt_value([one.judged_drift for one in of]) for of in found]
    return Sizes(gaps=gaps, drifts=drifts)


def measure_noise(effects: Mapping[str, Sequence[float]]) -> Noise:
    """Return the distribution of one size, from its values in each effect.

    At each quantile it is the middle one of the effects (the smaller one of two), so that a fault in one effect does not raise it. If
    no effect has MIN_NOISE_PROMPTS values by itself, all effects are taken together.
    """
    enough = [found for values in effects.values() if (found := _list_noise(values))]
    if not enough:
        joined = _list_noise(list(itertools.chain.from_iterable(effects.values())))
        enough = [joined] if joined else []
    if not enough:
        return Noise()
    at = np.sort([np.quantile(values, (*QUANTILES, 1.0)) for values in enough], axis=0)
    middle = (len(enough) - 1) // 2
    return Noise(prompts=sorted(map(len, enough))[middle], values=[float(x) for x in at[middle]])


def compute_limits(
    tolerance: float, sizes: Sequence[Sizes], base: Sequence[ScoredPrompt], other: Sequence[ScoredPrompt]
) -> Limits:
    """Return the limits for the answers of servers, from the rounding of the first one that shows it.

    Weights that are not trained can give every token nearly the same log-probability, so that a difference of 0.1 is large. All bounds
    are then the same share of the standard deviation of the log-probabilities, but the tolerance is at least NOISE_FACTOR times the
    noise of log-probabilities that were fetched twice.
    """
    values = [p for one in base for p in one.first]
    scale = min(float(np.std(values)), 1.0) if len(values) > 1 else 1.0
    noise = NOISE_FACTOR * max(_measure_score_noise(base), _measure_score_noise(other))
    found = Limits(tolerance=min(tolerance, max(tolerance * scale, noise)), scale=scale)
    for one in sizes:
        if not found.is_measured:
            found = msgspec.structs.replace(
                found, gap_noise=measure_noise(one.gaps), drift_noise=measure_noise(one.drifts)
            )
    return found


class ShareTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test of how many prompts exceed one limit. REAL is the test of differences that no rounding explains."""

    size: str = ""  # GAP or DRIFT_SIZE; empty: the prompts of which at least half of the pairs are real
    place: int = len(QUANTILES)  # of the limit in QUANTILES

    def count_prompts(self, counts: Iterable[Count], limits: Limits) -> int:
        """Return how many prompts exceed the limit."""
        if not self.size:
            return sum(c.differing for c in counts)
        limit = limits.list_limits(self.size)[self.place]
        return sum(value > limit for c in counts for value in (c.gaps if self.size == GAP else c.drifts))


REAL = ShareTest()
SHARE_TESTS = [ShareTest(size=size, place=place) for size in (GAP, DRIFT_SIZE) for place in range(len(QUANTILES))]


def compute_share_tests(counts: Sequence[Count], limits: Limits, chance: float) -> dict[ShareTest, float]:
    """Return the probability that rounding puts so many prompts beyond each limit, if `chance` alone explains that share."""
    found, prompts = {}, sum(len(c.gaps) for c in counts)
    for test in SHARE_TESTS:
        share = max(limits.get_typical_share(test.size, test.place), min(2 * chance, 1.0))
        found[test] = compute_tail(test.count_prompts(counts, limits), prompts, share)
    return found


def _measure_score_noise(scored: Sequence[ScoredPrompt]) -> float:
    """Return the mean |difference| of log-probabilities that were fetched twice."""
    apart = [abs(x - y) for one in scored for x, y in zip(one.first, one.again, strict=True)]
    return float(np.mean(apart)) if apart else 0.0


def _list_noise(values: Sequence[float]) -> list[float]:
    """Return the values of answers that are not identical; empty if they are too few."""
    found = [value for value in values if value > MIN_NOISE]
    return found if len(found) >= max(MIN_NOISE_PROMPTS, MIN_NOISE_SHARE * len(values)) else []


def _join_lists(a: Mapping[str, list[float]], b: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {effect: [*a.get(effect, []), *b.get(effect, [])] for effect in {**a, **b}}
