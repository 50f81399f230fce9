"""Statistics of verdicts, checked with closed forms, with scipy, and by simulation with fixed seeds."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.commands.ab import get_order
from dcpbench.compare import effects, resampling
from dcpbench.compare.judging import Options, judge_sides
from dcpbench.compare.resampling import (
    MIN_SAMPLES,
    Error,
    compute_block_length,
    compute_mean,
    estimate_error,
    estimate_pooled_error,
    join_variances,
    make_quantile,
)
from dcpbench.records import student
from dcpbench.records.runs import Run
from tests.unit.compare_builder import make_launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@pytest.fixture(scope="module")
def stats() -> ModuleType:
    """Return scipy.stats, which takes more than a second to import, so that collecting the tests does not import it."""
    from scipy import stats

    return stats


class TestStudent:
    @pytest.mark.parametrize("df", [1, 2, 3.7, 8, 120, 1e6, math.inf])
    @pytest.mark.parametrize("t", [0, 0.3, 2, 9, 60])
    def test_tails_equal_scipy(self, df: float, t: float, stats: ModuleType) -> None:
        expected = stats.norm.sf(t) if math.isinf(df) else stats.t.sf(t, df)
        assert student.sf(t, df) == pytest.approx(expected, rel=1e-6, abs=1e-300)
        assert student.sf(-t, df) == pytest.approx(1 - expected, rel=1e-9)

    @pytest.mark.parametrize("df", [1, 2, 5.5, 30, math.inf])
    @pytest.mark.parametrize("tail", [0.5, 0.025, 1e-5])
    def test_quantiles_equal_scipy(self, df: float, tail: float, stats: ModuleType) -> None:
        expected = stats.norm.isf(tail) if math.isinf(df) else stats.t.isf(tail, df)
        assert student.compute_quantile(tail, df) == pytest.approx(expected, rel=1e-6, abs=1e-9)

    def test_one_degree_of_freedom_is_the_cauchy_distribution(self) -> None:
        """P(T > 1) = 1/4."""
        assert student.sf(1, 1) == pytest.approx(0.25)


class TestForecasts:
    @pytest.mark.parametrize(("log", "nearer"), [(0.05, 0.03), (-0.05, -0.04)])
    def test_both_tests_use_their_worst_end_of_a_forecast(self, log: float, nearer: float) -> None:
        """The effect may be 0.02 less and 0.01 more: both tests are those of an effect at an end, and the interval
        reaches from end to end.
        """

        def at(log: float, **ends: float) -> effects.Effect:
            return effects.Effect(log, 1e-4, 8.0, 0.01, (5, 5), **ends)

        forecast = at(log, below=0.02, above=0.01)
        assert forecast.compute_p_differs() == pytest.approx(at(nearer).compute_p_differs())
        ends = [at(log - 0.02), at(log + 0.01)]
        assert forecast.compute_p_same(0.06) == pytest.approx(max(one.compute_p_same(0.06) for one in ends))
        assert forecast.compute_interval(0.025) == pytest.approx(
            (ends[0].compute_interval(0.025)[0], ends[1].compute_interval(0.025)[1])
        )
        same_way = effects.estimate_more_launches(at(nearer), 0.01, 0.025)
        assert effects.estimate_more_launches(forecast, 0.01, 0.025) == same_way

    def test_effect_between_the_ends_is_decided_by_no_launches(self) -> None:
        between = effects.Effect(0.05, 1e-8, 8.0, 1e-4, (5, 5), below=0.06)
        assert between.compute_p_differs() == 1
        assert effects.estimate_more_launches(between, 0.01, 0.025) is None


class TestCorrection:
    def test_benjamini_and_hochberg_reject_up_to_the_last_p_below_its_line(self) -> None:
        """With m = 4, 0.05·k/4 is 0.0125, 0.025, 0.0375, 0.05. The value 0.03 passes as the third, 0.035, does."""
        p = [0.03, 0.001, 0.2, 0.035]
        assert effects.count_rejected(p, 0.05) == 3
        assert effects.compute_level(p, 0.05) == pytest.approx(0.05 * 3 / 4)

    def test_level_without_a_rejection_is_bonferronis(self) -> None:
        assert effects.compute_level([0.5, 0.02, 0.9], 0.05) == pytest.approx(0.05 / 3)

    def test_no_tests_need_no_correction(self) -> None:
        assert effects.count_rejected([], 0.05) == 0
        assert effects.compute_level([], 0.05) == 0.05


class TestBlocks:
    def test_independent_samples_are_drawn_one_by_one(self) -> None:
        """Neighbours that alternate are not positively correlated: ρ counts as 0."""
        assert compute_block_length(np.array([1.0, 2.0] * 20)) == 1

    def test_blocks_grow_with_correlation(self) -> None:
        """A ramp of 64 has ρ near 1, so that a quarter of the series is the limit."""
        assert compute_block_length(np.arange(64.0)) == 16

    def test_error_of_a_mean_is_its_textbook_value(self) -> None:
        """σ / (µ·√n) = 1 / (50·√400) = 0.001."""
        samples = np.random.default_rng(1).normal(50, 1, 400)
        assert math.sqrt(estimate_error(samples, compute_mean, 1).variance) == pytest.approx(0.001, rel=0.15)

    def test_correlated_samples_have_a_larger_error(self) -> None:
        """For AR(1) with ρ = 0.8 the variance of the mean is (1 + ρ) / (1 - ρ) = 9 times as large; most of it is
        detected.
        """
        rng = np.random.default_rng(2)
        noise = [0.0]
        for _ in range(2000):
            noise.append(0.8 * noise[-1] + rng.normal())
        samples = 100 + np.array(noise)
        shuffled = rng.permutation(samples)
        assert (
            estimate_error(samples, compute_mean, 1).variance > 5 * estimate_error(shuffled, compute_mean, 1).variance
        )

    def test_sample_quantiles_equal_numpy(self) -> None:
        rows = np.random.default_rng(5).random((7, 24))
        for q in (0, 0.5, 0.9, 0.99, 1):
            assert make_quantile(q)(rows) == pytest.approx(np.quantile(rows, q, axis=1))

    def test_too_few_samples_have_no_error_estimate(self) -> None:
        assert estimate_error([1.0] * (MIN_SAMPLES - 1), compute_mean, 1) is None
        assert estimate_pooled_error([np.ones(3)] * (MIN_SAMPLES - 1), 0.5, 1) is None

    @pytest.mark.parametrize(
        ("series", "df"), [(np.array([1.0, 2.0] * 20), 39), (np.arange(1.0, 65.0), 3)], ids=["alone", "blocks-of-16"]
    )
    def test_degrees_of_freedom_are_blocks_minus_one(self, series: np.ndarray, df: int) -> None:
        """40 samples drawn one by one have 39 degrees of freedom; 64 in 4 blocks of 16 have 3."""
        assert estimate_error(series, compute_mean, 1).df == df

    def test_requests_have_the_degrees_of_freedom_of_their_blocks(self) -> None:
        """64 requests in blocks of 2·64^⅓ = 8 have 7 degrees of freedom; gaps are drawn with their requests."""
        latencies = np.random.default_rng(1).uniform(1, 2, 64)
        assert estimate_error(latencies, compute_mean, 1, requests=True).df == 7
        assert estimate_pooled_error([np.full(5, x) for x in latencies], 0.5, 1).df == 7

    def test_many_samples_have_the_degrees_of_freedom_of_64_batches(self) -> None:
        samples = np.random.default_rng(1).uniform(1, 2, 20_001)
        assert (
            estimate_error(samples, compute_mean, 1).df
            == estimate_error(samples, compute_mean, 1, requests=True).df
            == 63
        )

    @pytest.mark.parametrize("times", [1, 1000], ids=["resampled", "in-batches"])
    def test_statistic_that_can_be_zero_has_no_error_of_its_logarithm(self, times: int) -> None:
        """Every other sample is 0, so that the median of some draws is 0 and has no logarithm."""
        zeros_and_ones = [0.0] * 25 * times + [1.0] * 25 * times
        assert estimate_error(zeros_and_ones, make_quantile(0.5), 1) is None
        assert estimate_error(zeros_and_ones, make_quantile(0.5), 1, requests=True) is None
        assert estimate_error(zeros_and_ones, lambda rows: np.full(len(rows), np.inf), 1) is None, (
            "an infinite statistic has none either"
        )

    def test_nan_and_infinite_samples_are_ignored(self) -> None:
        samples = [1.0, 1.1] * 10
        assert (
            estimate_error([*samples, math.nan, math.inf], compute_mean, 1).variance
            == estimate_error(samples, compute_mean, 1).variance
        )

    def test_error_of_a_million_samples_is_computed_in_batches(self) -> None:
        """σ / (µ·√n) = 0.1 / √10⁶ = 1e-4."""
        samples = np.random.default_rng(3).normal(1, 0.1, 1_000_000)
        assert math.sqrt(estimate_error(samples, compute_mean, 1).variance) == pytest.approx(1e-4, rel=0.3)

    def test_equal_gaps_of_a_request_count_as_one_sample(self) -> None:
        """All gaps of a request are equal here, so that a hundred of each are no more certain than one of each."""
        levels = np.random.default_rng(4).normal(10, 1, 60)
        many = estimate_pooled_error([np.full(100, x) for x in levels], 0.5, 1)
        one = estimate_error(levels, make_quantile(0.5), 1)
        assert many.variance == pytest.approx(one.variance, rel=0.5)

    def test_common_requests_of_both_sides_cancel_in_the_ratio(self) -> None:
        """Latencies go from 1 to 100 s and are 5 % longer in B, with 1 % of noise: their ratio is far more certain."""
        rng = np.random.default_rng(6)
        a = rng.uniform(1, 100, 300)
        b = a * 1.05 * rng.normal(1, 0.01, 300)
        one, other = (estimate_error(x, compute_mean, 7, requests=True) for x in (a, b))
        ((together, _),) = join_variances(one, other)
        assert together < (one.variance + other.variance) / 500
        assert len(join_variances(one, estimate_error(b[:-1], compute_mean, 7, requests=True))) == 2

    def test_choice_of_requests_is_no_scatter_between_launches(self) -> None:
        """Two launches of the same requests agree to 0.1 %, independent of the results of other requests."""
        wide = Error(0.04, 10.0, draws=np.zeros(3), samples=3)
        a, b = ([effects.Estimate(x, wide) for x in 2 * logs] for logs in ((0.0, 0.001), (0.05, 0.051)))
        assert effects.compare_sides(a, b).error < 0.001


def estimates(*logs: float, within: float = 0.0) -> list[effects.Estimate]:
    return [effects.Estimate(x, Error(within, 20.0)) for x in logs]


class TestEffects:
    def test_several_launches_use_welchs_t_with_freedom_of_the_smaller_side(self, stats: ModuleType) -> None:
        """The test is never more certain than with the variance of launches that correlate by 0.5."""
        a, b = [0.01, 0.03, 0.02, 0.05], [0.08, 0.02, 0.09, 0.04, 0.06]
        welch = stats.ttest_ind(b, a, equal_var=False)
        found = effects.compare_sides(estimates(*a), estimates(*b))
        independent = dataclasses.replace(found, correlated=None)
        assert independent.compute_p_differs() == pytest.approx(2 * stats.t.sf(abs(welch.statistic), 3), rel=1e-6)
        assert found.compute_p_differs() >= max(welch.pvalue, independent.compute_p_differs())

    def test_rounds_use_a_paired_t_test(self, stats: ModuleType) -> None:
        """Both sides drift together from round to round, which only the paired test removes."""
        a, b = [0.00, 0.10, 0.21, 0.29], [0.03, 0.14, 0.24, 0.33]
        found = effects.compare_paired(estimates(*a), estimates(*b))
        t = stats.ttest_rel(b, a).statistic / math.sqrt(effects.compute_inflation(4, 0.125))
        assert found.compute_p_differs() == pytest.approx(2 * stats.t.sf(t, 3), rel=1e-6)
        assert effects.compare_sides(estimates(*a), estimates(*b)).compute_p_differs() > 0.5

    def test_one_launch_each_adds_the_assumed_noise(self) -> None:
        """The variances are 0.03² and 0.04² of the samples and 0.02² of launches."""
        a, b = estimates(0.0, within=0.03**2), estimates(0.1, within=0.04**2)
        found = effects.compare_sides(a, b, 0.02)
        assert found.assumed
        assert found.error == pytest.approx(math.sqrt(0.03**2 + 0.04**2 + 0.02**2))

    def test_one_launch_each_without_samples_has_no_variance(self) -> None:
        one = [effects.Estimate(0.0, None)]
        found = effects.compare_sides(one, [effects.Estimate(1.0, None)], 0.02)
        assert found.variance is None
        assert found.compute_p_differs() == found.compute_p_same(0.01) == 1
        assert found.compute_interval(0.025) == (-math.inf, math.inf)

    def test_variance_is_at_least_that_of_the_samples(self) -> None:
        """Four launches agree to the last digit by chance, with samples that scatter by 1 %: twice 0.0001 / 4."""
        same = [0.0] * 4
        found = effects.compare_sides(estimates(*same, within=1e-4), estimates(*same, within=1e-4))
        assert found.variance == pytest.approx(5e-5)

    def test_repeats_of_a_launch_are_averaged_with_the_error_of_their_mean(self) -> None:
        """Logarithms 0 and 0.02 have the mean 0.01, and a variance of the mean of 0.0002 / 2."""
        one = effects.estimate_launch([1.0, math.exp(0.02)], [None, None])
        assert one.log == pytest.approx(0.01)
        assert one.within.variance == pytest.approx(1e-4)

    def test_equal_repeats_have_the_error_of_their_samples(self) -> None:
        """Two equal repeats have samples with variances 1e-4 and 3e-4: their mean 2e-4, over 2."""
        one = effects.estimate_launch([1.0, 1.0], [Error(1e-4, 20.0), Error(3e-4, 20.0)])
        assert one.within.variance == pytest.approx(1e-4)
        assert one.within.df == 1
        assert effects.estimate_launch([1.0, 1.0], [Error(1e-4, 20.0), None]).within.variance == pytest.approx(0.5e-4)

    def test_repeats_of_the_same_requests_have_the_scatter_between_repeats(self) -> None:
        """The error of 0.04 for the choice of requests is not between these repeats: 0.0002 / 2 remains."""
        of_requests = Error(0.04, 10.0, draws=np.zeros(3), samples=3)
        one = effects.estimate_launch([1.0, math.exp(0.02)], [of_requests, of_requests])
        assert one.within.variance == pytest.approx(1e-4)

    def test_ratio_at_the_margin_is_decided_by_no_number_of_launches(self) -> None:
        effect = effects.Effect(0.0100, 1e-4, 8.0, 0.01, (5, 5))
        assert effects.estimate_more_launches(effect, 0.0101, 0.025) is None


def make_side(name: str, rng: np.random.Generator, launches: int, model: str, **how: float) -> list[Run]:
    """Return launches that are in no folder."""
    return [Run(f"{name}{n}", Path(f"{name}{n}"), make_launch(rng, model, **how)) for n in range(launches)]


def count_verdicts(
    rng: np.random.Generator, model: str, launches: int, faster: float = 1.0, launch_noise: float | None = None
) -> dict[str, int]:
    """Return the verdicts of one synthetic comparison of step times with four points."""
    a, b = (make_side(name, rng, launches, model, faster=by) for name, by in (("a", 1.0), ("b", faster)))
    return judge_sides(a, b, Options(metrics=("step_time",), launch_noise=launch_noise)).counts


MODELS = ("normal", "shared", "heavy", "throttle", "outliers")


class TestGuarantees:
    """Simulated comparisons of four points, with noise of 1 % between launches and 0.3 % within them, with correlated
    neighbours.
    """

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def cache_draws() -> Iterator[None]:
        """Cache drawn indices, which depend on two lengths and a seed with few values here; drawing takes half of the
        time.
        """
        known: dict[tuple[int, ...], np.ndarray] = {}
        really = resampling.draw_indices

        def draw_cached(n: int, length: int, draws: int, rng: np.random.Generator) -> np.ndarray:
            key = (n, length, draws, rng.bit_generator.state["state"]["state"])
            if key not in known:
                known[key] = really(n, length, draws, rng)
            return known[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resampling, "draw_indices", draw_cached)
            yield

    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.long
    def test_at_most_5_percent_of_equal_comparisons_show_a_difference(self, model: str) -> None:
        """Each side has 5 launches. Ten of 200 comparisons are 5 %."""
        rng = np.random.default_rng(6)
        found = [count_verdicts(rng, model, 5) for _ in range(200)]
        assert sum("FASTER" in v or "SLOWER" in v for v in found) <= 10

    @pytest.mark.long
    def test_given_noise_keeps_the_error_rate_with_single_launches(self) -> None:
        rng = np.random.default_rng(7)
        found = [count_verdicts(rng, "shared", 1, launch_noise=0.02) for _ in range(200)]
        assert sum("FASTER" in v or "SLOWER" in v for v in found) <= 10

    @pytest.mark.parametrize("model", ["normal", "outliers"])
    @pytest.mark.long
    def test_five_launches_find_a_5_percent_slowdown_in_95_of_100_points(self, model: str) -> None:
        """Launches scatter by 1 %, their steps by 0.3 % more, and all four points are slower by 5 %."""
        rng = np.random.default_rng(8)
        found = [count_verdicts(rng, model, 5, faster=1 / 1.05).get("SLOWER", 0) for _ in range(100)]
        assert sum(found) >= 0.95 * 4 * 100

    @pytest.mark.long
    def test_eight_paired_rounds_find_3_percent_and_keep_the_error_rate(self) -> None:
        rng = np.random.default_rng(10)
        options = Options(metrics=("step_time",), paired=True)
        found = wrong = 0
        for _ in range(100):
            a, b, equal = (make_side(x, rng, 8, "normal", faster=by) for x, by in (("a", 1.0), ("b", 1.03), ("c", 1.0)))
            found += judge_sides(a, b, options).counts.get("FASTER", 0)
            wrong += bool({"FASTER", "SLOWER"} & set(judge_sides(a, equal, options).counts))
        assert found >= 0.95 * 4 * 100
        assert wrong <= 5

    @pytest.mark.parametrize("alternate", [True, False], ids=["A-B-B-A", "A-B-A-B"])
    @pytest.mark.long
    def test_drift_cancels_only_with_alternating_turns(self, alternate: bool) -> None:
        """Every launch is 1 % slower than the one before, on either side: A B A B … makes B 1 % slower than A."""
        rng = np.random.default_rng(5)
        different = 0
        for _ in range(50):
            taken: dict[str, list[Run]] = {"a": [], "b": []}
            turns = [name for n in range(1, 7) for name in (get_order(n) if alternate else "ab")]
            for place, name in enumerate(turns):
                records = make_launch(rng, "shared", cv=0.005, faster=1.01**-place)
                taken[name].append(Run(f"{name}{place}", Path(f"{name}{place}"), records))
            options = Options(metrics=("step_time",), paired=True)
            found = judge_sides(taken["a"], taken["b"], options).counts
            different += "SLOWER" in found or "FASTER" in found
        assert (different <= 2) if alternate else (different >= 25)

    @pytest.mark.long
    def test_equal_variants_are_same_if_launches_scatter_little(self) -> None:
        """Launches of one machine scatter by 0.2 %; 5 of each are within 1 % in nearly all of 400 points."""
        rng = np.random.default_rng(9)
        same = 0
        for _ in range(100):
            a, b = (make_side(name, rng, 5, "normal", cv=0.002) for name in "ab")
            same += judge_sides(a, b, Options(metrics=("step_time",))).counts.get("SAME", 0)
        assert same >= 0.95 * 400


@pytest.mark.parametrize(("requests", "together"), [(4, 1), (16, 4), (64, 8), (1000, 20)])
def test_requests_are_drawn_in_at_least_four_blocks(requests: int, together: int) -> None:
    """2 · 1000^⅓ = 20, 2 · 64^⅓ = 8; for 16 requests it would be 5, which is over a fourth, and for 4 at most 1."""
    assert resampling.compute_request_block_length(requests) == together
