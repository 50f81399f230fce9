"""The statistics behind verdicts: against closed forms, against scipy, and by simulation with fixed seeds."""

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
from tests.unit.compare_builder import launch

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
    def test_tails_are_those_of_scipy(self, df: float, t: float, stats: ModuleType) -> None:
        expected = stats.norm.sf(t) if math.isinf(df) else stats.t.sf(t, df)
        assert student.sf(t, df) == pytest.approx(expected, rel=1e-6, abs=1e-300)
        assert student.sf(-t, df) == pytest.approx(1 - expected, rel=1e-9)

    @pytest.mark.parametrize("df", [1, 2, 5.5, 30, math.inf])
    @pytest.mark.parametrize("tail", [0.5, 0.025, 1e-5])
    def test_a_quantile_is_exceeded_as_often_as_asked(self, df: float, tail: float, stats: ModuleType) -> None:
        expected = stats.norm.isf(tail) if math.isinf(df) else stats.t.isf(tail, df)
        assert student.compute_quantile(tail, df) == pytest.approx(expected, rel=1e-6, abs=1e-9)

    def test_one_degree_of_freedom_is_cauchys(self) -> None:
        """P(T > 1) = 1/4."""
        assert student.sf(1, 1) == pytest.approx(0.25)


class TestForecasts:
    @pytest.mark.parametrize(("log", "nearer"), [(0.05, 0.03), (-0.05, -0.04)])
    def test_both_tests_are_of_that_end_which_is_the_worst_for_them(self, log: float, nearer: float) -> None:
        """It may be 0.02 less and 0.01 more: as sure as an effect that lies there, whose interval reaches from end to end."""

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

    def test_what_lies_between_the_ends_no_launches_decide(self) -> None:
        between = effects.Effect(0.05, 1e-8, 8.0, 1e-4, (5, 5), below=0.06)
        assert between.compute_p_differs() == 1
        assert effects.estimate_more_launches(between, 0.01, 0.025) is None


class TestCorrection:
    def test_benjamini_and_hochberg_reject_up_to_the_last_p_below_its_line(self) -> None:
        """m = 4, 0.05·k/4: 0.0125, 0.025, 0.0375, 0.05. 0.03 passes as 0.035, the third, does."""
        p = [0.03, 0.001, 0.2, 0.035]
        assert effects.count_rejected(p, 0.05) == 3
        assert effects.compute_level(p, 0.05) == pytest.approx(0.05 * 3 / 4)

    def test_without_a_rejection_intervals_are_bonferronis(self) -> None:
        assert effects.compute_level([0.5, 0.02, 0.9], 0.05) == pytest.approx(0.05 / 3)

    def test_no_tests_need_no_correction(self) -> None:
        assert effects.count_rejected([], 0.05) == 0
        assert effects.compute_level([], 0.05) == 0.05


class TestBlocks:
    def test_independent_samples_are_drawn_one_by_one(self) -> None:
        """Neighbours that alternate are not positively correlated: ρ counts as 0."""
        assert compute_block_length(np.array([1.0, 2.0] * 20)) == 1

    def test_blocks_grow_with_correlation(self) -> None:
        """A ramp of 64: ρ near 1, so that a quarter of the series is the limit."""
        assert compute_block_length(np.arange(64.0)) == 16

    def test_the_error_of_a_mean_is_its_textbook_value(self) -> None:
        """σ / (µ·√n) = 1 / (50·√400) = 0.001."""
        samples = np.random.default_rng(1).normal(50, 1, 400)
        assert math.sqrt(estimate_error(samples, compute_mean, 1).variance) == pytest.approx(0.001, rel=0.15)

    def test_correlated_samples_know_less_than_their_number_says(self) -> None:
        """AR(1) with ρ = 0.8: the variance of the mean is (1 + ρ) / (1 - ρ) = 9 times as large; most is seen."""
        rng = np.random.default_rng(2)
        noise = [0.0]
        for _ in range(2000):
            noise.append(0.8 * noise[-1] + rng.normal())
        samples = 100 + np.array(noise)
        shuffled = rng.permutation(samples)
        assert (
            estimate_error(samples, compute_mean, 1).variance > 5 * estimate_error(shuffled, compute_mean, 1).variance
        )

    def test_quantiles_are_numpys(self) -> None:
        rows = np.random.default_rng(5).random((7, 24))
        for q in (0, 0.5, 0.9, 0.99, 1):
            assert make_quantile(q)(rows) == pytest.approx(np.quantile(rows, q, axis=1))

    def test_too_few_samples_say_nothing(self) -> None:
        assert estimate_error([1.0] * (MIN_SAMPLES - 1), compute_mean, 1) is None
        assert estimate_pooled_error([np.ones(3)] * (MIN_SAMPLES - 1), 0.5, 1) is None

    @pytest.mark.parametrize(
        ("series", "df"), [(np.array([1.0, 2.0] * 20), 39), (np.arange(1.0, 65.0), 3)], ids=["alone", "blocks-of-16"]
    )
    def test_as_many_samples_count_as_there_are_blocks(self, series: np.ndarray, df: int) -> None:
        """40 samples drawn one by one: 39 degrees of freedom. 64 in blocks of 16: 4 blocks, 3 degrees of freedom."""
        assert estimate_error(series, compute_mean, 1).df == df

    def test_requests_are_counted_in_blocks_too(self) -> None:
        """64 requests in blocks of 2·64^⅓ = 8: 7 degrees of freedom; gaps are drawn with their requests."""
        latencies = np.random.default_rng(1).uniform(1, 2, 64)
        assert estimate_error(latencies, compute_mean, 1, requests=True).df == 7
        assert estimate_pooled_error([np.full(5, x) for x in latencies], 0.5, 1).df == 7

    def test_batches_are_counted_where_there_are_many_samples(self) -> None:
        """64 of them, whatever each holds."""
        samples = np.random.default_rng(1).uniform(1, 2, 20_001)
        assert (
            estimate_error(samples, compute_mean, 1).df
            == estimate_error(samples, compute_mean, 1, requests=True).df
            == 63
        )

    @pytest.mark.parametrize("times", [1, 1000], ids=["resampled", "in-batches"])
    def test_a_statistic_that_can_be_0_has_no_error_of_its_logarithm(self, times: int) -> None:
        """Every other sample is 0, so that the median of some draws is: there is no logarithm, and none is invented."""
        zeros_and_ones = [0.0] * 25 * times + [1.0] * 25 * times
        assert estimate_error(zeros_and_ones, make_quantile(0.5), 1) is None
        assert estimate_error(zeros_and_ones, make_quantile(0.5), 1, requests=True) is None
        assert estimate_error(zeros_and_ones, lambda rows: np.full(len(rows), np.inf), 1) is None, (
            "nor one that is endless"
        )

    def test_what_is_not_a_number_is_left_out(self) -> None:
        samples = [1.0, 1.1] * 10
        assert (
            estimate_error([*samples, math.nan, math.inf], compute_mean, 1).variance
            == estimate_error(samples, compute_mean, 1).variance
        )

    def test_a_million_samples_are_cut_into_batches(self) -> None:
        """σ / (µ·√n) = 0.1 / √10⁶ = 1e-4."""
        samples = np.random.default_rng(3).normal(1, 0.1, 1_000_000)
        assert math.sqrt(estimate_error(samples, compute_mean, 1).variance) == pytest.approx(1e-4, rel=0.3)

    def test_gaps_of_one_request_count_as_one(self) -> None:
        """All gaps of a request are equal here, so a hundred of each know no more than one of each does."""
        levels = np.random.default_rng(4).normal(10, 1, 60)
        many = estimate_pooled_error([np.full(100, x) for x in levels], 0.5, 1)
        one = estimate_error(levels, make_quantile(0.5), 1)
        assert many.variance == pytest.approx(one.variance, rel=0.5)

    def test_requests_that_both_sides_served_cancel(self) -> None:
        """Latencies from 1 to 100 s, in B 5 % longer, give or take 1 %: their ratio is known far better."""
        rng = np.random.default_rng(6)
        a = rng.uniform(1, 100, 300)
        b = a * 1.05 * rng.normal(1, 0.01, 300)
        one, other = (estimate_error(x, compute_mean, 7, requests=True) for x in (a, b))
        ((together, _),) = join_variances(one, other)
        assert together < (one.variance + other.variance) / 500
        assert len(join_variances(one, estimate_error(b[:-1], compute_mean, 7, requests=True))) == 2

    def test_which_requests_there_were_is_no_scatter_of_launches(self) -> None:
        """Two launches of the same requests agree to 0.1 %, whatever other requests would have given."""
        wide = Error(0.04, 10.0, draws=np.zeros(3), samples=3)
        a, b = ([effects.Estimate(x, wide) for x in 2 * logs] for logs in ((0.0, 0.001), (0.05, 0.051)))
        assert effects.compare_sides(a, b).error < 0.001


def estimates(*logs: float, within: float = 0.0) -> list[effects.Estimate]:
    return [effects.Estimate(x, Error(within, 20.0)) for x in logs]


class TestEffects:
    def test_several_launches_on_both_sides_are_welchs_t_with_the_freedom_of_the_smaller_side(
        self, stats: ModuleType
    ) -> None:
        """The test is never more certain than with the variance of launches that correlate by 0.5."""
        a, b = [0.01, 0.03, 0.02, 0.05], [0.08, 0.02, 0.09, 0.04, 0.06]
        welch = stats.ttest_ind(b, a, equal_var=False)
        found = effects.compare_sides(estimates(*a), estimates(*b))
        independent = dataclasses.replace(found, correlated=None)
        assert independent.compute_p_differs() == pytest.approx(2 * stats.t.sf(abs(welch.statistic), 3), rel=1e-6)
        assert found.compute_p_differs() >= max(welch.pvalue, independent.compute_p_differs())

    def test_rounds_are_a_paired_t(self, stats: ModuleType) -> None:
        """Both sides drift together from round to round, which only the paired test takes out."""
        a, b = [0.00, 0.10, 0.21, 0.29], [0.03, 0.14, 0.24, 0.33]
        found = effects.compare_paired(estimates(*a), estimates(*b))
        t = stats.ttest_rel(b, a).statistic / math.sqrt(effects.compute_inflation(4, 0.125))
        assert found.compute_p_differs() == pytest.approx(2 * stats.t.sf(t, 3), rel=1e-6)
        assert effects.compare_sides(estimates(*a), estimates(*b)).compute_p_differs() > 0.5

    def test_one_launch_each_adds_the_assumed_noise(self) -> None:
        """0.03² + 0.04² + 0.02² of both samples and of launches."""
        a, b = estimates(0.0, within=0.03**2), estimates(0.1, within=0.04**2)
        found = effects.compare_sides(a, b, 0.02)
        assert found.assumed
        assert found.error == pytest.approx(math.sqrt(0.03**2 + 0.04**2 + 0.02**2))

    def test_without_samples_one_launch_each_knows_nothing(self) -> None:
        one = [effects.Estimate(0.0, None)]
        found = effects.compare_sides(one, [effects.Estimate(1.0, None)], 0.02)
        assert found.variance is None
        assert found.compute_p_differs() == found.compute_p_same(0.01) == 1
        assert found.compute_interval(0.025) == (-math.inf, math.inf)

    def test_launches_never_know_less_noise_than_their_samples_show(self) -> None:
        """Four launches that agree to the last digit by luck, of samples that scatter by 1 %: twice 0.0001 / 4."""
        same = [0.0] * 4
        found = effects.compare_sides(estimates(*same, within=1e-4), estimates(*same, within=1e-4))
        assert found.variance == pytest.approx(5e-5)

    def test_repeats_of_a_launch_are_averaged_with_the_error_of_their_mean(self) -> None:
        """Logarithms 0 and 0.02: mean 0.01, variance of the mean 0.0002 / 2."""
        one = effects.estimate_launch([1.0, math.exp(0.02)], [None, None])
        assert one.log == pytest.approx(0.01)
        assert one.within.variance == pytest.approx(1e-4)

    def test_repeats_that_agree_know_no_more_than_their_samples_do(self) -> None:
        """Two repeats equal to the last digit, of samples with variances 1e-4 and 3e-4: their mean 2e-4, over 2."""
        one = effects.estimate_launch([1.0, 1.0], [Error(1e-4, 20.0), Error(3e-4, 20.0)])
        assert one.within.variance == pytest.approx(1e-4)
        assert one.within.df == 1
        assert effects.estimate_launch([1.0, 1.0], [Error(1e-4, 20.0), None]).within.variance == pytest.approx(0.5e-4)

    def test_repeats_of_the_same_requests_scatter_by_what_they_differ(self) -> None:
        """What other requests would have given, 0.04, is not between repeats of these: 0.0002 / 2 as above."""
        of_requests = Error(0.04, 10.0, draws=np.zeros(3), samples=3)
        one = effects.estimate_launch([1.0, math.exp(0.02)], [of_requests, of_requests])
        assert one.within.variance == pytest.approx(1e-4)

    def test_a_ratio_at_the_margin_is_decided_by_no_number_of_launches(self) -> None:
        effect = effects.Effect(0.0100, 1e-4, 8.0, 0.01, (5, 5))
        assert effects.estimate_more_launches(effect, 0.0101, 0.025) is None


def side(name: str, rng: np.random.Generator, launches: int, model: str, **how: float) -> list[Run]:
    """Launches that lie in no folder."""
    return [Run(f"{name}{n}", Path(f"{name}{n}"), launch(rng, model, **how)) for n in range(launches)]


def verdicts(
    rng: np.random.Generator, model: str, launches: int, faster: float = 1.0, launch_noise: float | None = None
) -> dict[str, int]:
    """Verdicts of one made-up comparison of step times, of four points."""
    a, b = (side(name, rng, launches, model, faster=by) for name, by in (("a", 1.0), ("b", faster)))
    return judge_sides(a, b, Options(metrics=("step_time",), launch_noise=launch_noise)).counts


MODELS = ("normal", "shared", "heavy", "throttle", "outliers")


class TestGuarantees:
    """Simulated comparisons of four points; between launches 1 %, within them 0.3 % with correlated neighbours."""

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def drawn_once() -> Iterator[None]:
        """What is drawn depends on two lengths and a seed, of which there are few here; drawing is half of the time."""
        known: dict[tuple[int, ...], np.ndarray] = {}
        really = resampling.draw_indices

        def drawn(n: int, length: int, draws: int, rng: np.random.Generator) -> np.ndarray:
            key = (n, length, draws, rng.bit_generator.state["state"]["state"])
            if key not in known:
                known[key] = really(n, length, draws, rng)
            return known[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resampling, "draw_indices", drawn)
            yield

    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.long
    def test_of_200_comparisons_of_the_same_at_most_5_percent_show_a_difference(self, model: str) -> None:
        """5 launches of each side. Ten of 200 are 5 %."""
        rng = np.random.default_rng(6)
        found = [verdicts(rng, model, 5) for _ in range(200)]
        assert sum("FASTER" in v or "SLOWER" in v for v in found) <= 10

    @pytest.mark.long
    def test_with_one_launch_of_each_a_given_noise_keeps_that_promise(self) -> None:
        rng = np.random.default_rng(7)
        found = [verdicts(rng, "shared", 1, launch_noise=0.02) for _ in range(200)]
        assert sum("FASTER" in v or "SLOWER" in v for v in found) <= 10

    @pytest.mark.parametrize("model", ["normal", "outliers"])
    @pytest.mark.long
    def test_a_slowdown_of_5_percent_is_found_by_five_launches_in_95_of_100_points(self, model: str) -> None:
        """Launches scatter by 1 %, their steps by 0.3 % more, and all four points are slower by 5 %."""
        rng = np.random.default_rng(8)
        found = [verdicts(rng, model, 5, faster=1 / 1.05).get("SLOWER", 0) for _ in range(100)]
        assert sum(found) >= 0.95 * 4 * 100

    @pytest.mark.long
    def test_eight_rounds_of_pairs_find_3_percent_too_and_keep_the_promise(self) -> None:
        rng = np.random.default_rng(10)
        options = Options(metrics=("step_time",), paired=True)
        found = wrong = 0
        for _ in range(100):
            a, b, equal = (side(x, rng, 8, "normal", faster=by) for x, by in (("a", 1.0), ("b", 1.03), ("c", 1.0)))
            found += judge_sides(a, b, options).counts.get("FASTER", 0)
            wrong += bool({"FASTER", "SLOWER"} & set(judge_sides(a, equal, options).counts))
        assert found >= 0.95 * 4 * 100
        assert wrong <= 5

    @pytest.mark.parametrize("alternate", [True, False], ids=["A-B-B-A", "A-B-A-B"])
    @pytest.mark.long
    def test_a_drift_cancels_where_turns_alternate_and_only_there(self, alternate: bool) -> None:
        """Every launch is 1 % slower than the one before, of either side: A B A B … makes B 1 % slower than A."""
        rng = np.random.default_rng(5)
        different = 0
        for _ in range(50):
            taken: dict[str, list[Run]] = {"a": [], "b": []}
            turns = [name for n in range(1, 7) for name in (get_order(n) if alternate else "ab")]
            for place, name in enumerate(turns):
                records = launch(rng, "shared", cv=0.005, faster=1.01**-place)
                taken[name].append(Run(f"{name}{place}", Path(f"{name}{place}"), records))
            options = Options(metrics=("step_time",), paired=True)
            found = judge_sides(taken["a"], taken["b"], options).counts
            different += "SLOWER" in found or "FASTER" in found
        assert (different <= 2) if alternate else (different >= 25)

    @pytest.mark.long
    def test_two_equal_variants_are_the_same_once_launches_scatter_little(self) -> None:
        """Launches of 0.2 %, as of one machine; 5 of each: within 1 %, in nearly all of 400 points."""
        rng = np.random.default_rng(9)
        same = 0
        for _ in range(100):
            a, b = (side(name, rng, 5, "normal", cv=0.002) for name in "ab")
            same += judge_sides(a, b, Options(metrics=("step_time",))).counts.get("SAME", 0)
        assert same >= 0.95 * 400


@pytest.mark.parametrize(("requests", "together"), [(4, 1), (16, 4), (64, 8), (1000, 20)])
def test_neighbouring_requests_are_drawn_together_but_at_least_four_times(requests: int, together: int) -> None:
    """2 · 1000^⅓ = 20, 2 · 64^⅓ = 8; of 16 it would be 5, which is over a fourth, and of 4 no more than 1."""
    assert resampling.compute_request_block_length(requests) == together
