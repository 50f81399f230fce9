"""Effects and verdicts of a comparison, worked out from a few numbers with all of their fields."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.compare import effects, judging
from dcpbench.compare.comparison import Row
from dcpbench.compare.judging import NO_SAMPLES, Options
from dcpbench.compare.resampling import Error
from dcpbench.records import student

if TYPE_CHECKING:
    from collections.abc import Sequence

MARGIN = math.log1p(0.01)


def estimates(*logs: float, within: float = 0.0) -> list[effects.Estimate]:
    """Return estimates of launches with 20 degrees of freedom of their samples."""
    return [effects.Estimate(x, Error(within, 20.0)) for x in logs]


def compute_t(tail: float, df: float) -> float:
    """Return Student's quantile, which has tests of its own."""
    return student.compute_quantile(tail, df)


class TestEffects:
    def test_effect_of_four_launches_against_six(self) -> None:
        """The means have variances S²/4 and S²/6, and the effect has the 3 degrees of freedom of the smaller side.

        A: 0, 0.02, 0, 0.02, S² = 4 · 0.01² / 3; B: three of 0.05 and three of 0.09, S² = 6 · 0.02² / 5.
        """
        a, b = 4 * 0.01**2 / 3 / 4, 6 * 0.02**2 / 5 / 6
        found = effects.compare_sides(estimates(0.0, 0.02, 0.0, 0.02), estimates(*[0.05] * 3, *[0.09] * 3))
        assert (found.log, found.variance) == (pytest.approx(0.06), pytest.approx(a + b))
        assert found.df == 3
        assert found.spread == pytest.approx(math.sqrt((4 * a + 6 * b) / 2))
        assert (found.launches, found.paired, found.assumed) == ((4, 6), False, False)
        v, w = a * effects.compute_inflation(4, 0.5), b * effects.compute_inflation(6, 0.5)
        assert found.correlated.variance == pytest.approx(v + w)
        assert found.correlated.df == pytest.approx(min((v + w) ** 2 / (v**2 / 3 + w**2 / 5), 4 + 2))

    def test_larger_of_two_p_values_and_wider_interval_count(self) -> None:
        both = effects.Effect(0.1, 1e-4, 3.0, 0.01, (4, 4), correlated=effects.Scale(4e-4, 6.0))
        half = max(0.01 * compute_t(0.025, 3), 0.02 * compute_t(0.025, 6))
        assert both.compute_interval(0.025) == (pytest.approx(0.1 - half), pytest.approx(0.1 + half))
        assert both.compute_p_differs() == pytest.approx(2 * max(student.sf(10, 3), student.sf(5, 6)))
        assert both.compute_p_same(0.2) == pytest.approx(max(student.sf(10, 3), student.sf(5, 6)))

    @pytest.mark.parametrize(("launches", "correlation"), [(4, 0.5), (4, 0.125), (10, 0.5)])
    def test_inflation_is_the_variance_ratio_of_an_ar1_process(self, launches: int, correlation: float) -> None:
        """The variance of the mean follows from the matrix of covariances ρ^|i - j|, and is divided by the mean of S² /
        n.
        """
        n = launches
        covariances = [[correlation ** abs(i - j) for j in range(n)] for i in range(n)]
        of_mean = sum(map(sum, covariances)) / n**2
        mean_s2 = (n - n * of_mean) / (n - 1)
        assert effects.compute_inflation(n, correlation) == pytest.approx(of_mean / (mean_s2 / n))
        assert effects.compute_inflation(n, 0.0) == pytest.approx(1.0)

    @pytest.mark.parametrize("first", [True, False])
    def test_effect_of_four_launches_against_one_has_no_variance(self, first: bool) -> None:
        four, one = estimates(0.0, 0.02, 0.04, 0.02), estimates(0.1)
        found = effects.compare_sides(*((four, one) if first else (one, four)))
        assert (found.log, found.variance) == (pytest.approx(0.08 if first else -0.08), None)
        assert found.missing_launches == ((0, 3) if first else (3, 0))
        assert found.compute_p_differs() == 1

    def test_given_noise_is_a_lower_bound_for_few_launches(self) -> None:
        """2 % between two launches are 0.0002 for one, for means of 1 and 3; the three scatter by 0.0004 themselves."""
        few = estimates(0.0, 0.02, 0.04)
        found = effects.compare_sides(estimates(0.1), few, 0.02)
        assert found.variance == pytest.approx(2e-4 + 4e-4 / 3)
        assert (found.assumed, found.missing_launches) == (True, (0, 0))
        assert effects.compare_sides(estimates(0.1), few, 0.1).variance == pytest.approx(5e-3 + 5e-3 / 3)

    def test_effect_of_four_paired_rounds(self) -> None:
        """Differences 0.01, 0.02, 0.03, 0.02 have variance 0.0002 / 3, their mean a quarter; more if samples scatter
        more.
        """
        a, b = (0.0, 0.1, 0.2, 0.0), (0.01, 0.12, 0.23, 0.02)
        found = effects.compare_paired(estimates(*a), estimates(*b))
        assert (found.log, found.variance) == (pytest.approx(0.02), pytest.approx(2e-4 / 3 / 4))
        assert (found.df, found.spread, found.launches) == (3, pytest.approx(math.sqrt(2e-4 / 3)), (4, 4))
        assert (found.paired, found.assumed) == (True, False)
        assert found.correlated.variance == pytest.approx(found.variance * effects.compute_inflation(4, 0.125))
        assert found.correlated.df == 3
        noisy = effects.compare_paired(estimates(*a, within=3e-4), estimates(*b, within=1e-4))
        assert noisy.variance == pytest.approx(4e-4 / 4)
        assert effects.compare_paired(estimates(*a[:3]), estimates(*b[:3])).variance is None

    @pytest.mark.parametrize("paired", [False, True])
    def test_effect_of_one_launch_each_uses_the_given_noise(self, paired: bool) -> None:
        """A launch has an assumed noise of 2 % / √2; if one side has no samples, the uncertainty of the ratio is
        unknown.
        """
        compare = effects.compare_paired if paired else effects.compare_sides
        found = compare(estimates(0.0, within=1e-4), estimates(0.1, within=1e-4), 0.02)
        assert (found.log, found.spread, found.launches) == (0.1, pytest.approx(0.02 / math.sqrt(2)), (1, 1))
        assert (found.paired, found.assumed) == (paired, True)
        assert found.df == pytest.approx(6e-4**2 / (2 * 1e-4**2 / 20))
        for errors in ((None, Error(1e-4, 20.0)), (Error(1e-4, 20.0), None)):
            nothing = compare(*([effects.Estimate(0.1 * i, e)] for i, e in enumerate(errors)), 0.02)
            assert (nothing.log, nothing.variance, nothing.df, nothing.launches) == (0.1, None, 1, (1, 1))
            assert (nothing.spread, nothing.assumed) == (pytest.approx(0.02 / math.sqrt(2)), True)

    def test_p_values_without_scatter_are_zero_or_one(self) -> None:
        same, other = (effects.Effect(log, 0.0, 4.0, 0.0, (3, 3)) for log in (0.0, 0.1))
        assert (same.compute_p_differs(), other.compute_p_differs()) == (1.0, 0.0)
        assert (same.compute_p_same(0.01), other.compute_p_same(0.01)) == (0.0, 1.0)
        assert other.compute_interval(0.025) == (0.1, 0.1)

    def test_satterthwaite_df_with_a_known_variance(self) -> None:
        """(1 + 3)² / (1² / 4), as the variance of 3 is known exactly; without uncertain variances it is infinite."""
        assert effects.compute_satterthwaite_df([(1.0, 4.0), (3.0, math.inf)]) == 64
        assert effects.compute_satterthwaite_df([(0.0, 4.0), (3.0, math.inf)]) == math.inf


class TestMoreLaunches:
    """The proposed number is the smallest n with an interval, plus the noise of a fifth of all cases, no wider than the
    distance.
    """

    @staticmethod
    def compute_width(n: int, spread: float) -> float:
        """Return the wider half-interval of both tests of n launches of each side, plus t(0.2) standard errors."""
        wider = max(
            compute_t(0.025, n - 1),
            math.sqrt(effects.compute_inflation(n, 0.5)) * compute_t(0.025, min(2 * n - 2, n + 2)),
        )
        return (wider + compute_t(0.2, 2 * n - 2)) * spread * math.sqrt(2 / n)

    @pytest.mark.parametrize(
        ("log", "distance", "spread"),
        [(0.02, 0.02, 0.01), (-0.02, 0.02, 0.01), (0.004, 0.006, 0.004), (-0.004, 0.006, 0.004)],
    )
    def test_distance_is_to_one_beyond_the_margin_and_to_the_margin_within(
        self, log: float, distance: float, spread: float
    ) -> None:
        effect = effects.Effect(log, 1e-4, 2.0, spread, (4, 6))
        enough = next(n for n in range(4, 51) if self.compute_width(n, spread) <= distance)
        assert effects.estimate_more_launches(effect, 0.01, 0.025) == enough - 4

    def test_paired_rounds_have_half_the_freedom_and_half_the_variance(self) -> None:
        effect = effects.Effect(0.03, 1e-4, 3.0, 0.02, (4, 4), paired=True)
        enough = (
            n
            for n in range(4, 51)
            if (math.sqrt(effects.compute_inflation(n, 0.125)) * compute_t(0.025, n - 1) + compute_t(0.2, n - 1))
            * 0.02
            / math.sqrt(n)
            <= 0.03
        )
        assert effects.estimate_more_launches(effect, 0.01, 0.025) == next(enough) - 4

    @pytest.mark.parametrize(("wider", "more"), [(0.999, 46), (1.001, None)])
    def test_more_than_fifty_launches_are_not_proposed(self, wider: float, more: int | None) -> None:
        """With 50 the standard error is a fifth of the spread."""
        spread = wider * 0.02 / self.compute_width(50, 1.0)
        assert effects.estimate_more_launches(effects.Effect(0.02, 1e-4, 8.0, spread, (4, 4)), 0.01, 0.025) == more

    def test_at_least_one_more_launch_is_proposed(self) -> None:
        assert effects.estimate_more_launches(effects.Effect(0.5, 1e-4, 8.0, 0.001, (5, 5)), 0.01, 0.025) == 1


def make_rows(*given: effects.Effect, higher_is_better: bool = False) -> list[Row]:
    """Return the rows of these effects without verdicts."""
    return [
        Row(
            metric="m",
            title="m",
            unit="ms",
            higher_is_better=higher_is_better,
            a=1.0,
            b=math.exp(effect.log),
            ratio=math.exp(effect.log),
            verdict="UNDECIDED",
        )
        for effect in given
    ]


def judge_effects(*given: effects.Effect, higher_is_better: bool = False, **options: float) -> list[Row]:
    """Return the rows of these effects, judged together."""
    rows = make_rows(*given, higher_is_better=higher_is_better)
    judging._decide_verdicts(
        [judging._Test(row, effect) for row, effect in zip(rows, given, strict=True)], Options(**options)
    )
    return rows


class TestVerdicts:
    def test_clear_difference_has_the_interval_of_its_test(self) -> None:
        """One test at 5 % leaves 2.5 % beyond each end, and 95 % within."""
        (row,) = judge_effects(effects.Effect(0.1, 1e-4, 8.0, 0.01, (5, 5)))
        half = 0.01 * compute_t(0.025, 8)
        assert (row.verdict, row.differs, row.confidence) == ("SLOWER", True, pytest.approx(0.95))
        assert (row.low, row.high) == (pytest.approx(math.exp(0.1 - half)), pytest.approx(math.exp(0.1 + half)))
        assert row.p_differs == pytest.approx(2 * student.sf(10, 8))

    @pytest.mark.parametrize(
        ("log", "higher_is_better", "verdict"),
        [(0.1, True, "FASTER"), (-0.1, True, "SLOWER"), (-0.1, False, "FASTER"), (0.1, False, "SLOWER")],
    )
    def test_better_value_is_faster(self, log: float, higher_is_better: bool, verdict: str) -> None:
        (row,) = judge_effects(effects.Effect(log, 1e-4, 8.0, 0.01, (5, 5)), higher_is_better=higher_is_better)
        assert row.verdict == verdict

    def test_same_has_the_interval_of_two_one_sided_tests(self) -> None:
        """Each end is missed by 5 %, so that 90 % are within."""
        (row,) = judge_effects(effects.Effect(0.0, 1e-6, 8.0, 0.001, (5, 5)))
        assert (row.verdict, row.differs, row.confidence) == ("SAME", False, pytest.approx(0.9))
        assert row.high == pytest.approx(math.exp(0.001 * compute_t(0.05, 8)))

    def test_level_is_corrected_for_the_number_of_tests(self) -> None:
        """One of four tests is clear, so that the level of each is 5 % / 4."""
        clear, *others = (effects.Effect(log, 1e-4, 8.0, 0.01, (5, 5)) for log in (0.1, 0.0, 0.0, 0.0))
        row, *rest = judge_effects(clear, *others)
        assert row.confidence == pytest.approx(1 - 0.0125)
        assert [r.verdict for r in rest] == ["UNDECIDED"] * 3

    @pytest.mark.parametrize(
        ("effect", "more", "reason"),
        [
            (effects.Effect(0.04, 1e-3, 3.0, 0.012, (4, 4)), 1, "about 1 more launch of each side would decide it"),
            (effects.Effect(0.04, 1e-3, 3.0, 0.02, (4, 4), paired=True), 1, "about 1 more round would decide it"),
            (effects.Effect(0.02, 1e-3, 3.0, 0.01, (4, 4)), 8, "about 8 more launches of each side would decide it"),
            (effects.Effect(0.02, 1e-3, 3.0, 0.011, (4, 4), paired=True), 2, "about 2 more rounds would decide it"),
            (
                effects.Effect(0.05, 1e-3, math.inf, 0.014, (1, 1), assumed=True),
                4,
                "about 4 more launches of each side would decide it",
            ),
            (
                effects.Effect(MARGIN * 1.01, 1e-3, 8.0, 0.5, (5, 5)),
                None,
                "more launches cannot decide it: the ratio lies at the margin of 0.01",
            ),
            (
                effects.Effect(-MARGIN * 0.51, 1e-3, 8.0, 0.5, (5, 5)),
                None,
                "more launches cannot decide it: the ratio lies at the margin of 0.01",
            ),
            (
                effects.Effect(MARGIN * 1.51, 1e-3, 8.0, 0.5, (5, 5)),
                None,
                "more than 50 launches of each side would be needed; find out what makes launches scatter",
            ),
            (
                effects.Effect(0.0, 1e-3, 8.0, 0.5, (5, 5), paired=True),
                None,
                "more than 50 rounds would be needed; find out what makes launches scatter",
            ),
        ],
    )
    def test_undecided_row_states_launches_that_would_decide_it(
        self, effect: effects.Effect, more: int | None, reason: str
    ) -> None:
        (row,) = judge_effects(effect)
        assert (row.verdict, row.more_launches, row.reason) == ("UNDECIDED", more, reason)

    @pytest.mark.parametrize(
        ("effect", "more", "reason"),
        [
            (effects.Effect(0.1, None, 1.0, 0.01, (1, 1), assumed=True), 4, NO_SAMPLES),
            (
                effects.Effect(0.1, None, 1.0, 0.0, (1, 6)),
                3,
                "1 launch of A and 6 of B cannot show how launches scatter; verdicts need 4 of each side",
            ),
            (
                effects.Effect(0.1, None, 1.0, 0.0, (3, 3), paired=True),
                1,
                "3 rounds cannot show how launches scatter; verdicts need 4",
            ),
        ],
    )
    def test_unjudged_row_states_missing_launches(self, effect: effects.Effect, more: int, reason: str) -> None:
        (row,) = make_rows(effect)
        judging._explain_undecided(judging._Test(row, effect), Options())
        assert (row.verdict, row.more_launches, row.reason) == ("UNDECIDED", more, reason)
        assert (row.judged, row.missing_launches) == (False, effect.missing_launches)

    def test_proven_difference_within_the_margin_is_undecided_and_differs(self) -> None:
        """The difference is certainly about 1 %, neither the same within the margin nor beyond it."""
        (row,) = judge_effects(effects.Effect(MARGIN * 0.99, 1e-8, 8.0, 1e-4, (5, 5)))
        assert (row.verdict, row.differs) == ("UNDECIDED", True)
        assert row.reason.endswith("; it differs, but perhaps by less than the margin")


class TestCounts:
    """Counts are the same within the margin (absolute counts: only if equal), or differ if their ranges do not overlap."""

    @pytest.mark.parametrize(
        ("a", "b", "absolute", "verdict", "ratio"),
        [
            ([[100.0]], [[101.0]], False, "SAME", 1.01),
            ([[100.0]], [[101.1]], False, "MORE", 1.011),
            ([[101.0]], [[100.0]], False, "SAME", 100 / 101),
            ([[101.1]], [[100.0]], False, "FEWER", 100 / 101.1),
            ([[4.0]], [[4.0]], True, "SAME", 1.0),
            ([[100.0]], [[101.0]], True, "MORE", 1.01),
            ([[101.0]], [[100.0]], True, "FEWER", 100 / 101),
            ([[0.0]], [[2.0]], True, "MORE", None),
            ([[4.0], [2.0, 6.0]], [[5.0, 3.0]], True, "UNDECIDED", 1.0),
            ([[4.0], [2.0, 6.0]], [[7.0, 9.0], []], True, "MORE", 2.0),
            ([[100.0, 102.0]], [[103.0, 105.0]], False, "UNDECIDED", 104 / 101),
            ([[100.0, 102.0]], [[103.1, 105.0]], False, "MORE", 104.05 / 101),
            ([[103.0, 105.0]], [[100.0, 102.0]], False, "UNDECIDED", 101 / 104),
            ([[103.1, 105.0]], [[100.0, 102.0]], False, "FEWER", 101 / 104.05),
        ],
    )
    def test_counts_are_compared_by_their_ranges(
        self,
        a: Sequence[Sequence[float]],
        b: Sequence[Sequence[float]],
        absolute: bool,
        verdict: str,
        ratio: float | None,
    ) -> None:
        metric: Any = SimpleNamespace(option="m", brief="m", brief_unit="", better="lower", absolute=absolute)
        row = judging._compare_counts(metric, a, b, 0.01)
        assert (row.verdict, row.ratio) == (verdict, None if ratio is None else pytest.approx(ratio))
        assert (row.sampled, row.absolute, row.higher_is_better) == (False, absolute, False)
        assert row.launches == (sum(map(bool, a)), sum(map(bool, b)))
        assert row.repeats == (sum(map(len, a)), sum(map(len, b)))
        assert bool(row.reason) == (verdict == "UNDECIDED")
