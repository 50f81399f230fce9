"""Effects and verdicts of a comparison, worked out from a few numbers: all that they hold, not their verdict alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.compare import effects, judging, student
from dcpbench.compare.judging import Options
from dcpbench.compare.model import Row
from dcpbench.compare.resampling import Error

if TYPE_CHECKING:
    from collections.abc import Sequence

MARGIN = math.log1p(0.01)


def estimates(*logs: float, within: float = 0.0) -> list[effects.Estimate]:
    """Launches whose samples have 20 degrees of freedom."""
    return [effects.Estimate(x, Error(within, 20.0)) for x in logs]


def t(tail: float, df: float) -> float:
    """Student's quantile, which has tests of its own."""
    return student.quantile(tail, df)


class TestEffects:
    def test_two_launches_against_two(self) -> None:
        """Variances 0.0002 and 0.0008: of means 0.0001 and 0.0004, 0.0005² / (0.0001² + 0.0004²) degrees; spread √0.0005."""
        found = effects.compare(estimates(0.0, 0.02), estimates(0.05, 0.09), 0.02)
        assert (found.log, found.variance) == (pytest.approx(0.06), pytest.approx(5e-4))
        assert found.df == pytest.approx(25 / 17)
        assert found.spread == pytest.approx(math.sqrt(5e-4))
        assert (found.launches, found.paired, found.assumed) == ((2, 2), False, False)

    @pytest.mark.parametrize("first", [True, False])
    def test_three_launches_against_one(self, first: bool) -> None:
        """The scatter of the three, 0.0004, stands for the one's: 0.0004 / 3 + 0.0004, 2 degrees of freedom."""
        three, one = estimates(0.0, 0.02, 0.04), estimates(0.1)
        found = effects.compare(*((three, one) if first else (one, three)), 0.02)
        assert (found.log, found.variance) == (pytest.approx(0.08 if first else -0.08), pytest.approx(4e-4 * 4 / 3))
        assert (found.df, found.spread) == (2, pytest.approx(0.02))
        assert found.launches == ((3, 1) if first else (1, 3))

    def test_three_rounds(self) -> None:
        """Differences 0.01, 0.02, 0.03: variance 0.0001, of their mean a third; of samples that scatter more, both sides'."""
        a, b = (0.0, 0.1, 0.2), (0.01, 0.12, 0.23)
        found = effects.compare_paired(estimates(*a), estimates(*b), 0.02)
        assert (found.log, found.variance) == (pytest.approx(0.02), pytest.approx(1e-4 / 3))
        assert (found.df, found.spread, found.launches) == (2, pytest.approx(0.01), (3, 3))
        assert (found.paired, found.assumed) == (True, False)
        noisy = effects.compare_paired(estimates(*a, within=3e-4), estimates(*b, within=1e-4), 0.02)
        assert noisy.variance == pytest.approx(4e-4 / 3)

    @pytest.mark.parametrize("paired", [False, True])
    def test_one_launch_each(self, paired: bool) -> None:
        """A launch is taken to be off by 2 % / √2; where one side has no samples, nothing says how well the ratio is known."""
        compare = effects.compare_paired if paired else effects.compare
        found = compare(estimates(0.0, within=1e-4), estimates(0.1, within=1e-4), 0.02)
        assert (found.log, found.spread, found.launches) == (0.1, pytest.approx(0.02 / math.sqrt(2)), (1, 1))
        assert (found.paired, found.assumed) == (paired, True)
        assert found.df == pytest.approx(6e-4**2 / (2 * 1e-4**2 / 20))
        for errors in ((None, Error(1e-4, 20.0)), (Error(1e-4, 20.0), None)):
            nothing = compare(*([effects.Estimate(0.1 * i, e)] for i, e in enumerate(errors)), 0.02)
            assert (nothing.log, nothing.variance, nothing.df, nothing.launches) == (0.1, None, 1, (1, 1))
            assert (nothing.spread, nothing.assumed) == (pytest.approx(0.02 / math.sqrt(2)), True)

    def test_what_never_scatters_differs_or_does_not(self) -> None:
        same, other = (effects.Effect(log, 0.0, 4.0, 0.0, (3, 3)) for log in (0.0, 0.1))
        assert (same.p_differs(), other.p_differs()) == (1.0, 0.0)
        assert (same.p_same(0.01), other.p_same(0.01)) == (0.0, 1.0)
        assert other.interval(0.025) == (0.1, 0.1)

    def test_a_sum_of_variances_has_freedom_where_one_of_them_has(self) -> None:
        """(1 + 3)² / (1² / 4), the 3 being known for sure; nothing that scatters is known for sure altogether."""
        assert effects.satterthwaite([(1.0, 4.0), (3.0, math.inf)]) == 64
        assert effects.satterthwaite([(0.0, 4.0), (3.0, math.inf)]) == math.inf


class TestMoreLaunches:
    """The smallest n with (t(tail) + t(0.2)) · error(n) ≤ distance; sides of n launches have 2n - 2 degrees of freedom."""

    @pytest.mark.parametrize(("log", "distance"), [(0.02, 0.02), (-0.02, 0.02), (0.004, 0.006), (-0.004, 0.006)])
    def test_the_way_is_to_1_beyond_the_margin_and_to_the_margin_within_it(self, log: float, distance: float) -> None:
        effect = effects.Effect(log, 1e-4, 2.0, 0.008, (2, 4))
        enough = (
            n for n in range(2, 51) if (t(0.025, 2 * n - 2) + t(0.2, 2 * n - 2)) * 0.008 * (2 / n) ** 0.5 <= distance
        )
        assert effects.more_launches(effect, 0.01, 0.025) == next(enough) - 2

    def test_rounds_have_half_the_freedom_and_half_the_variance(self) -> None:
        effect = effects.Effect(0.03, 1e-4, 2.0, 0.02, (3, 3), paired=True)
        enough = (n for n in range(3, 51) if (t(0.025, n - 1) + t(0.2, n - 1)) * 0.02 / math.sqrt(n) <= 0.03)
        assert effects.more_launches(effect, 0.01, 0.025) == next(enough) - 3

    @pytest.mark.parametrize(("wider", "more"), [(0.999, 48), (1.001, None)])
    def test_more_than_fifty_on_each_side_are_not_proposed(self, wider: float, more: int | None) -> None:
        """With 50 the error is a fifth of the spread."""
        spread = wider * 5 * 0.02 / (t(0.025, 98) + t(0.2, 98))
        assert effects.more_launches(effects.Effect(0.02, 1e-4, 8.0, spread, (2, 2)), 0.01, 0.025) == more

    def test_one_is_the_least(self) -> None:
        assert effects.more_launches(effects.Effect(0.5, 1e-4, 8.0, 0.001, (5, 5)), 0.01, 0.025) == 1


def decided(*given: effects.Effect, higher_is_better: bool = False, **options: float) -> list[Row]:
    """The rows of these effects, judged together."""
    tests = [
        judging._Test(
            Row(
                metric="m",
                title="m",
                unit="ms",
                higher_is_better=higher_is_better,
                a=1.0,
                b=math.exp(effect.log),
                ratio=math.exp(effect.log),
                verdict="UNDECIDED",
            ),
            effect,
        )
        for effect in given
    ]
    judging._decide(tests, Options(**options))
    return [test.row for test in tests]


class TestVerdicts:
    def test_a_clear_difference_is_shown_with_an_interval_as_sure_as_its_test(self) -> None:
        """One test at 3 %: 1.5 % beyond each end, 97 % within."""
        (row,) = decided(effects.Effect(0.1, 1e-4, 8.0, 0.01, (5, 5)))
        half = 0.01 * t(0.015, 8)
        assert (row.verdict, row.differs, row.confidence) == ("SLOWER", True, pytest.approx(0.97))
        assert (row.low, row.high) == (pytest.approx(math.exp(0.1 - half)), pytest.approx(math.exp(0.1 + half)))
        assert row.p_differs == pytest.approx(2 * student.sf(10, 8))

    @pytest.mark.parametrize(
        ("log", "higher_is_better", "verdict"),
        [(0.1, True, "FASTER"), (-0.1, True, "SLOWER"), (-0.1, False, "FASTER"), (0.1, False, "SLOWER")],
    )
    def test_faster_is_what_is_better(self, log: float, higher_is_better: bool, verdict: str) -> None:
        (row,) = decided(effects.Effect(log, 1e-4, 8.0, 0.01, (5, 5)), higher_is_better=higher_is_better)
        assert row.verdict == verdict

    def test_the_same_is_shown_with_the_interval_of_two_one_sided_tests(self) -> None:
        """At 3 % each end is missed by 3 %, so that 94 % are within."""
        (row,) = decided(effects.Effect(0.0, 1e-6, 8.0, 0.001, (5, 5)))
        assert (row.verdict, row.differs, row.confidence) == ("SAME", False, pytest.approx(0.94))
        assert row.high == pytest.approx(math.exp(0.001 * t(0.03, 8)))

    def test_many_tests_are_each_asked_for_more(self) -> None:
        """Of four, of which one is clear, the level of each is 3 % / 4."""
        clear, *others = (effects.Effect(log, 1e-4, 8.0, 0.01, (5, 5)) for log in (0.1, 0.0, 0.0, 0.0))
        row, *rest = decided(clear, *others)
        assert row.confidence == pytest.approx(1 - 0.0075)
        assert [r.verdict for r in rest] == ["UNDECIDED"] * 3

    @pytest.mark.parametrize(
        ("effect", "more", "reason"),
        [
            (
                effects.Effect(0.1, None, 1.0, 0.01, (1, 1), assumed=True),
                4,
                "nothing beside the records says how this scatters; give more launches of each side",
            ),
            (
                effects.Effect(0.01, 1e-3, 9.0, 0.01, (1, 1), assumed=True),
                4,
                "how launches scatter is not known; 4 more launches of each side show it",
            ),
            (
                effects.Effect(0.01, 1e-3, 9.0, 0.01, (1, 1), paired=True, assumed=True),
                4,
                "how launches scatter is not known; 4 more rounds show it",
            ),
            (effects.Effect(0.04, 1e-3, 4.0, 0.01, (3, 3)), 1, "about 1 more launch of each side would decide it"),
            (effects.Effect(0.04, 1e-3, 4.0, 0.01, (3, 3), paired=True), 1, "about 1 more round would decide it"),
            (effects.Effect(0.02, 1e-3, 4.0, 0.01, (3, 3)), 3, "about 3 more launches of each side would decide it"),
            (effects.Effect(0.02, 1e-3, 2.0, 0.01, (3, 3), paired=True), 2, "about 2 more rounds would decide it"),
            (
                effects.Effect(MARGIN * 1.01, 1e-3, 8.0, 0.5, (5, 5)),
                None,
                "repeats cannot decide it: the ratio lies at the margin of 0.01",
            ),
            (
                effects.Effect(-MARGIN * 0.51, 1e-3, 8.0, 0.5, (5, 5)),
                None,
                "repeats cannot decide it: the ratio lies at the margin of 0.01",
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
    def test_what_is_undecided_says_what_would_decide_it(
        self, effect: effects.Effect, more: int | None, reason: str
    ) -> None:
        (row,) = decided(effect)
        assert (row.verdict, row.more_launches, row.reason) == ("UNDECIDED", more, reason)

    def test_a_difference_that_may_be_less_than_the_margin_is_said_to_be_one(self) -> None:
        """0.5 % for sure, which is neither the same within 0.5 % nor beyond 1 %."""
        (row,) = decided(effects.Effect(MARGIN * 0.99, 1e-8, 8.0, 1e-4, (5, 5)))
        assert (row.verdict, row.differs) == ("UNDECIDED", True)
        assert row.reason.endswith("; it differs, but perhaps by less than the margin")


class TestCounts:
    """What is counted: the same within the margin (absolute: at all), or whole ranges apart."""

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
    def test_ranges_are_compared(
        self,
        a: Sequence[Sequence[float]],
        b: Sequence[Sequence[float]],
        absolute: bool,
        verdict: str,
        ratio: float | None,
    ) -> None:
        metric: Any = SimpleNamespace(option="m", brief="m", brief_unit="", better="lower", absolute=absolute)
        row = judging._counted(metric, a, b, 0.01)
        assert (row.verdict, row.ratio) == (verdict, None if ratio is None else pytest.approx(ratio))
        assert (row.sampled, row.absolute, row.higher_is_better) == (False, absolute, False)
        assert row.launches == (sum(map(bool, a)), sum(map(bool, b)))
        assert row.repeats == (sum(map(len, a)), sum(map(len, b)))
        assert bool(row.reason) == (verdict == "UNDECIDED")
