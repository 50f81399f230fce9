"""stats.py: intervals, percentile floors, stop rule, agreement."""

import math
import random

import pytest

from dcpbench.errors import UsageError
from dcpbench.records.record import Interval
from dcpbench.records.stats import StopRule, agreement, least_samples, median_interval, percentile, settled


def covers(n: int, k: int) -> float:
    """Exact confidence of [x_(k), x_(n+1-k)]: 1 - 2·P(Bin(n, ½) ≤ k-1)."""
    return 1 - 2 * sum(math.comb(n, j) for j in range(k)) / 2**n


@pytest.mark.parametrize(("n", "k"), [(6, 1), (9, 2), (20, 6), (100, 40), (1000, 469)])
def test_the_interval_is_the_tightest_pair_of_order_statistics_that_covers_95_percent(n: int, k: int) -> None:
    """For n = 20: 1 - 2·(1 + 20 + 190 + 1140 + 4845 + 15504)/2^20 = 0.959 with k = 6; k = 7 gives 0.885."""
    assert covers(n, k) >= 0.95 > covers(n, k + 1)
    interval = median_interval(list(range(1, n + 1)))
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert interval.median == (n + 1) / 2
    assert interval.samples == n


@pytest.mark.parametrize("n", range(1, 6))
def test_too_few_samples_for_95_percent_give_smallest_and_largest_and_never_nan(n: int) -> None:
    """1 - 2·½^5 = 0.9375: five samples cannot bound a median with 95 %."""
    interval = median_interval([float(x) for x in range(n)])
    assert (interval.low, interval.high) == (0, n - 1)
    assert interval.low <= interval.median <= interval.high


def test_the_order_of_samples_does_not_matter() -> None:
    """Samples are sorted, and the caller's list is left as it was."""
    samples = [3.0, 1.0, 2.0]
    assert median_interval(samples) == Interval(median=2, low=1, high=3, samples=3)
    assert samples == [3.0, 1.0, 2.0]


def test_a_large_sample_needs_no_large_integers() -> None:
    """With n = 100,000 the half-width in ranks is close to 1.96·√n/2 = 310."""
    interval = median_interval([float(i) for i in range(100_000)])
    assert interval.high - interval.median == pytest.approx(310, abs=2)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    """1,000 draws of 30 from a skewed distribution with median ln 2; at least 93 % must cover (95.7 % expected)."""
    rng = random.Random(0)
    hits = 0
    for _ in range(1000):
        interval = median_interval([rng.expovariate(1) for _ in range(30)])
        hits += interval.low <= math.log(2) <= interval.high
    assert hits >= 930


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_no_samples_or_unmeasured_ones_are_refused(bad: list[float]) -> None:
    """A NaN would sort anywhere and become a median."""
    with pytest.raises(UsageError):
        median_interval(bad)


@pytest.mark.parametrize(("p", "floor"), [(50, 1), (90, 64), (95, 130), (99, 662)])
def test_percentile_floors_are_the_published_ones(p: float, floor: int) -> None:
    """1 - qⁿ - n(1-q)qⁿ⁻¹ ≥ 0.99 first holds at n = 64 (0.99044; 63 gives 0.98952), 130 and 662."""
    assert least_samples(p) == floor


@pytest.mark.parametrize(("p", "floor"), [(90, 64), (95, 130), (99, 662)])
def test_one_sample_below_the_floor_there_is_no_percentile(p: float, floor: int) -> None:
    """The record says null rather than a number that one outlier decides."""
    assert percentile([1.0] * (floor - 1), p) is None
    assert percentile([1.0] * floor, p) == 1.0


def test_percentiles_are_linear_between_neighbours_as_in_numpy() -> None:
    """Position of p90 in 0…100 is 0.9·100 = 90; of p50 in 1, 2, 3, 10 it is 1.5, halfway from 2 to 3."""
    assert percentile([float(x) for x in range(101)], 90) == pytest.approx(90)
    assert percentile([10.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([], 50) is None


@pytest.mark.parametrize("p", [-1, 101, 100])
def test_a_percentile_that_does_not_exist_is_refused(p: float) -> None:
    """p100 has no floor: no sample lies beyond it."""
    with pytest.raises(UsageError):
        percentile([1.0] * 1000, p)


def test_measuring_stops_when_the_interval_is_within_the_precision() -> None:
    """Median 100, k = 6 of 20: [99.5, 100.5] is within ±1 %, so 20 samples are enough."""
    samples = [99.5] * 9 + [100.0] * 2 + [100.5] * 9
    assert StopRule(precision=0.01, seconds=10).done(samples, 0.1) == "precise"
    assert StopRule(precision=0.004, seconds=10).done(samples, 0.1) is None


def test_measuring_goes_on_while_either_end_of_the_interval_is_too_far() -> None:
    """k = 6 of 20: from 90 to the median 100, which is as high; and the other way round, as steps have outliers."""
    for far in (90.0, 110.0):
        assert StopRule(precision=0.01, seconds=10).done([far] * 8 + [100.0] * 12, 0.1) is None


def test_measuring_stops_at_the_time_limit_and_says_noisy() -> None:
    """Half 90, half 110: the interval is ±10 % of the median 100."""
    samples = [90.0] * 10 + [110.0] * 10
    rule = StopRule(precision=0.01, seconds=10)
    assert rule.done(samples, 9.9) is None
    assert rule.done(samples, 10.0) == "noisy"


def test_measuring_never_stops_before_twenty_samples() -> None:
    """19 equal samples have an interval of width 0, and still do not stop the measurement."""
    assert StopRule().done([1.0] * 19, 100.0) is None
    assert StopRule().done([1.0] * 20, 0.0) == "precise"


def test_warm_up_ends_when_two_successive_medians_differ_by_at_most_one_percent() -> None:
    """|100.9 - 100| = 0.9 ≤ 1; |101.1 - 100| = 1.1 > 1; the first median has nothing to be compared with."""
    assert settled(100.0, 100.9)
    assert not settled(100.0, 101.1)
    assert not settled(None, 100.0)


def test_agreement_is_the_difference_over_the_mean_whichever_run_came_first() -> None:
    """99 and 101: 2 / 100 = 0.02."""
    a, b = (Interval(median=m, low=m, high=m, samples=1) for m in (99.0, 101.0))
    assert agreement(a, b) == agreement(b, a) == pytest.approx(0.02)
    with pytest.raises(UsageError):
        agreement(a, Interval(median=0, low=0, high=0, samples=1))
