"""Test intervals, percentile floors, the stop rule and agreement of runs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.records import autocorrelation
from dcpbench.records.autocorrelation import measure_correlation
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import Interval
from dcpbench.records.stats import (
    MIN_EFFECTIVE,
    StopRule,
    compute_median_distance,
    compute_median_interval,
    compute_min_samples,
    compute_percentile,
    has_settled,
)
from tools.statistics_check import MIN_COVERAGE, count_covered, count_covered_at_stop, draw_ar1

if TYPE_CHECKING:
    from collections.abc import Sequence


def alternate(samples: Sequence[float]) -> list[float]:
    """Return the samples from both ends alternately: neighbours are on both sides of the median, so that none are
    correlated.
    """
    ordered = sorted(samples)
    pairs = itertools.zip_longest(ordered[: len(ordered) // 2], ordered[: len(ordered) // 2 - 1 : -1])
    return [x for pair in pairs for x in pair if x is not None]


def compute_coverage(n: int, k: int) -> float:
    """Return the exact confidence of [x_(k), x_(n+1-k)]: 1 - 2·P(Bin(n, ½) ≤ k-1)."""
    return 1 - 2 * sum(math.comb(n, j) for j in range(k)) / 2**n


@pytest.mark.parametrize(("n", "k"), [(6, 1), (9, 2), (20, 6), (100, 40), (1000, 469)])
def test_interval_is_the_tightest_pair_of_order_statistics_with_95_percent(n: int, k: int) -> None:
    """For n = 20: 1 - 2·(1 + 20 + 190 + 1140 + 4845 + 15504)/2^20 = 0.959 with k = 6; k = 7 gives 0.885."""
    assert compute_coverage(n, k) >= 0.95 > compute_coverage(n, k + 1)
    interval = compute_median_interval(alternate(range(1, n + 1)))
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert interval.median == (n + 1) / 2
    assert (interval.samples, interval.effective_samples, interval.autocorrelation) == (n, n, 0)


@pytest.mark.parametrize("n", range(1, 6))
def test_interval_of_too_few_samples_is_their_range(n: int) -> None:
    """Five samples, with 1 - 2·½^5 = 0.9375, cannot bound a median with 95 %."""
    interval = compute_median_interval([float(x) for x in range(n)])
    assert (interval.low, interval.high) == (0, n - 1)
    assert interval.low <= interval.median <= interval.high


def test_median_interval_does_not_change_its_samples() -> None:
    samples = [3.0, 1.0, 2.0]
    found = compute_median_interval(samples)
    assert (found.median, found.low, found.high, found.samples) == (2, 1, 3, 3)
    assert samples == [3.0, 1.0, 2.0]


def test_interval_of_a_large_sample_is_approximately_normal() -> None:
    """With n = 100,000 the half-width in ranks is close to 1.96·√n/2 = 310."""
    interval = compute_median_interval(alternate([float(i) for i in range(100_000)]))
    assert interval.high - interval.median == pytest.approx(310, abs=2)


def test_interval_covers_the_true_median_as_often_as_stated() -> None:
    """At least 93 % of 1,000 draws of 30 from a skewed distribution with median ln 2 must cover it (95.7 % expected)."""
    rng = random.Random(0)
    hits = 0
    for _ in range(1000):
        interval = compute_median_interval([rng.expovariate(1) for _ in range(30)])
        hits += interval.low <= math.log(2) <= interval.high
    assert hits >= 930


class TestCorrelatedSamples:
    @pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
    @pytest.mark.parametrize("samples", [20, 60])
    def test_interval_covers_the_median_up_to_an_autocorrelation_of_0_6(self, samples: int, rho: float) -> None:
        """At least 92 of 100 intervals cover; intervals for independent samples cover 75 to 81 of 100 at 0.6."""
        assert count_covered(rho, samples, 400).value >= MIN_COVERAGE

    def test_interval_covers_the_median_if_the_stop_rule_ends_sampling(self) -> None:
        assert count_covered_at_stop(0.6, 400).value >= MIN_COVERAGE

    @pytest.mark.parametrize(("rho", "low", "high"), [(0.0, 800, 1000), (0.6, 250, 420), (0.9, 30, 110)])
    def test_effective_samples_of_a_correlated_series_are_fewer(self, rho: float, low: float, high: float) -> None:
        """For the signs of an AR(1) process the divisor is 1 + 2·Σ 2/π·asin(0.6ᵏ) = 2.9, so that 1,000 are worth 345;
        12.4 and 81 at 0.9.
        """
        series = draw_ar1(rho, 20, 1000, np.random.default_rng(1)).tolist()
        found = [compute_median_interval(row) for row in series]
        assert low < statistics.fmean(i.effective_samples for i in found) < high
        assert statistics.fmean(i.autocorrelation for i in found) == pytest.approx(rho, abs=0.03)

    def test_inflation_of_an_ar1_process_equals_its_formula(self) -> None:
        """For three samples and ρ = 0.5: 1 + 2·(2/3·asin(0.5) + 1/3·asin(0.25))·2/π, with asin(0.5) = π/6."""
        expected = 1 + 4 / math.pi * (2 / 3 * math.pi / 6 + math.asin(0.25) / 3)
        assert autocorrelation._estimate_ar1_inflation(0.5, 3) == pytest.approx(expected)

    def test_slowly_decaying_correlation_widens_the_interval(self) -> None:
        """White noise plus a slow process correlates neighbours, and samples 10 apart, by 0.29. AR(1) alone
        covers 62 of 100.
        """
        rng = np.random.default_rng(2)
        series = math.sqrt(0.7) * rng.normal(size=(100, 400)) + math.sqrt(0.3) * draw_ar1(0.95, 100, 400, rng)
        found = [compute_median_interval(row) for row in series.tolist()]
        assert sum(i.low <= 0 <= i.high for i in found) >= 75

    def test_outliers_do_not_hide_correlation(self) -> None:
        rng = np.random.default_rng(3)
        series = 100 + draw_ar1(0.6, 1, 300, rng)[0]
        series[rng.random(300) < 0.02] = 1e9
        assert compute_median_interval(series.tolist()).autocorrelation > 0.4

    def test_correlation_of_a_long_series_is_estimated_in_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (series,) = draw_ar1(0.8, 1, 5000, np.random.default_rng(4)).tolist()
        batched = measure_correlation(series, 0.0)
        monkeypatch.setattr(autocorrelation, "MAX_SERIES", 5000)
        assert batched.inflation == pytest.approx(measure_correlation(series, 0.0).inflation, rel=0.3)

    @pytest.mark.parametrize(
        "samples", [[5.0] * 30, [5.0] * 29 + [9.0], [1e300, 2e300] * 15, [5e-324] * 20 + [1e300] * 20]
    )
    def test_constant_or_extreme_samples_have_an_interval(self, samples: list[float]) -> None:
        found = compute_median_interval(samples)
        assert found.low <= found.median <= found.high
        assert 0 <= found.autocorrelation <= 1
        assert 0 < found.effective_samples <= len(samples)

    def test_decode_metrics_have_autocorrelation_and_effective_samples(self) -> None:
        (series,) = (10 + 0.1 * draw_ar1(0.6, 1, 200, np.random.default_rng(5))).tolist()
        metrics = compute_decode_metrics(series, 8, 1)
        step = metrics.step_ms
        assert (step.autocorrelation, step.effective_samples) == (
            metrics.output_tok_s.autocorrelation,
            metrics.output_tok_s.effective_samples,
        )
        assert step.autocorrelation > 0.4
        assert step.effective_samples < 120


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_empty_or_non_finite_samples_are_refused(bad: list[float]) -> None:
    """A NaN would be sorted anywhere and become a median."""
    with pytest.raises(UsageError):
        compute_median_interval(bad)


@pytest.mark.parametrize(("p", "floor"), [(50, 1), (90, 64), (95, 130), (99, 662)])
def test_minimum_samples_of_percentiles_are_the_published_ones(p: float, floor: int) -> None:
    """The condition 1 - qⁿ - n(1-q)qⁿ⁻¹ ≥ 0.99 first holds at n = 64 (0.99044; 63 gives 0.98952), 130 and 662."""
    assert compute_min_samples(p) == floor


@pytest.mark.parametrize(("p", "floor"), [(90, 64), (95, 130), (99, 662)])
def test_percentile_is_none_below_its_minimum_of_samples(p: float, floor: int) -> None:
    """The record has null rather than a number that one outlier determines."""
    assert compute_percentile([1.0] * (floor - 1), p) is None
    assert compute_percentile([1.0] * floor, p) == 1.0


def test_percentiles_are_interpolated_as_in_numpy() -> None:
    """The position of p90 in 0…100 is 0.9·100 = 90; that of p50 in 1, 2, 3, 10 is 1.5, halfway from 2 to 3."""
    assert compute_percentile([float(x) for x in range(101)], 90) == pytest.approx(90)
    assert compute_percentile([10.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert compute_percentile([], 50) is None


@pytest.mark.parametrize("p", [-1, 101, 100])
def test_percentile_outside_its_range_is_refused(p: float) -> None:
    """The percentile p100 has no minimum of samples: no sample is beyond it."""
    with pytest.raises(UsageError):
        compute_percentile([1.0] * 1000, p)


def test_measuring_stops_when_the_interval_is_within_the_precision() -> None:
    """The median is 100 and k = 6 of 20: [99.5, 100.5] is within ±1 %, so that 20 samples are enough."""
    samples = alternate([99.5] * 9 + [100.0] * 2 + [100.5] * 9)
    assert StopRule(precision=0.01, seconds=10).get_stop_reason(samples, 0.1) == "precise"
    assert StopRule(precision=0.004, seconds=10).get_stop_reason(samples, 0.1) is None


def test_measuring_continues_while_samples_are_correlated() -> None:
    """The same samples in order, as from a clock that changed twice, are worth fewer than six."""
    samples = [99.5] * 9 + [100.0] * 2 + [100.5] * 9
    assert compute_median_interval(samples).effective_samples < MIN_EFFECTIVE
    assert StopRule(precision=0.01, seconds=10).get_stop_reason(samples, 0.1) is None
    assert StopRule(precision=0.01, seconds=10).get_stop_reason(samples, 10.0) == "noisy"


def test_measuring_continues_while_either_end_of_the_interval_is_too_far() -> None:
    """With k = 6 of 20, the interval goes from 90 to the median 100, or from 100 to 110."""
    for far in (90.0, 110.0):
        assert StopRule(precision=0.01, seconds=10).get_stop_reason([far] * 8 + [100.0] * 12, 0.1) is None


def test_measuring_stops_at_the_time_limit_as_noisy() -> None:
    """Half the samples are 90 and half 110: the interval is ±10 % of the median 100."""
    samples = [90.0] * 10 + [110.0] * 10
    rule = StopRule(precision=0.01, seconds=10)
    assert rule.get_stop_reason(samples, 9.9) is None
    assert rule.get_stop_reason(samples, 10.0) == "noisy"


def test_measuring_never_stops_before_twenty_samples() -> None:
    """An interval of 19 equal samples has width 0, and still does not stop the measurement."""
    assert StopRule().get_stop_reason([1.0] * 19, 100.0) is None
    assert StopRule().get_stop_reason([1.0] * 20, 0.0) == "precise"


def test_warm_up_ends_when_two_successive_medians_differ_by_at_most_one_percent() -> None:
    """The condition is |100.9 - 100| = 0.9 ≤ 1, unlike |101.1 - 100| = 1.1 > 1; the first median has no predecessor."""
    assert has_settled(100.0, 100.9)
    assert not has_settled(100.0, 101.1)
    assert not has_settled(None, 100.0)


def test_median_distance_is_symmetric_and_relative_to_the_mean() -> None:
    """For 99 and 101: 2 / 100 = 0.02."""
    a, b = (Interval(median=m, low=m, high=m, samples=1) for m in (99.0, 101.0))
    assert compute_median_distance(a, b) == compute_median_distance(b, a) == pytest.approx(0.02)
    with pytest.raises(UsageError):
        compute_median_distance(a, Interval(median=0, low=0, high=0, samples=1))
