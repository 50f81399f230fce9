"""Change points: steps are found, noise is hardly ever marked, and a single odd run never is."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.dashboard import change_points
from dcpbench.errors import MissingPackageError
from tools.statistics_check import (
    DOCUMENTED_NOISES,
    MAX_FALSE_MARKS,
    OTHER_NOISES,
    count_ever_marked,
    draw_ar1,
    draw_histories,
)

if TYPE_CHECKING:
    from dcpbench.dashboard.change_points import Change

HISTORIES = 200
CV = 0.01


def histories(runs: int, *, step: float = 1.0, at: int = 0, seed: int = 0) -> np.ndarray:
    """Return histories of `runs` medians around 50 with a scatter of 1 %, times `step` from run `at` on."""
    found = 50 * (1 + CV * np.random.default_rng(seed).normal(size=(HISTORIES, runs)))
    found[:, at:] *= step
    return found


def find_changes_in(rows: np.ndarray) -> list[tuple[Change, ...]]:
    return [change_points.find_changes(row) for row in rows.tolist()]


def count_found(rows: np.ndarray) -> int:
    return sum(map(bool, find_changes_in(rows)))


@pytest.mark.parametrize("kind", [*DOCUMENTED_NOISES, *OTHER_NOISES])
@pytest.mark.parametrize("runs", [12, 20, 30, 60])
def test_unchanged_histories_are_hardly_ever_marked(kind: str, runs: int) -> None:
    """The documented rate is 1 in 100 at any look. Independent tests marked 16 to 54 of 100 with two-valued and
    correlated noise.
    """
    assert count_found(draw_histories(kind, HISTORIES, runs, seed=1)) <= MAX_FALSE_MARKS * HISTORIES


@pytest.mark.parametrize("kind", DOCUMENTED_NOISES)
def test_growing_unchanged_history_is_hardly_ever_marked(kind: str) -> None:
    """The documented rate is 1 in 100 with a look after every run; a quick test has 50 histories and every sixth look."""
    assert count_ever_marked(draw_histories(kind, 50, 60, seed=2), every=6) <= 1


@pytest.mark.parametrize(("runs", "since", "share"), [(30, 5, 0.85), (30, 7, 0.95), (60, 5, 0.95), (60, 10, 1.0)])
@pytest.mark.parametrize("step", [1.05, 1 / 1.05], ids=["slower", "faster"])
def test_step_of_5_percent_is_found_within_few_runs(runs: int, since: int, share: float, step: float) -> None:
    """The scatter is 1 %."""
    assert count_found(histories(runs, step=step, at=runs - since)) >= share * HISTORIES


@pytest.mark.parametrize("step", [1.05, 1 / 1.05], ids=["slower", "faster"])
@pytest.mark.parametrize("at", [10, 15, 25])
def test_step_is_found_as_a_single_change_within_one_run(at: int, step: float) -> None:
    found = [f for f in find_changes_in(histories(40, step=step, at=at)) if f]
    assert len(found) >= 0.95 * HISTORIES
    assert sum(len(f) == 1 and abs(f[0].before + 1 - at) <= 1 for f in found) >= 0.95 * len(found)


def test_step_of_3_percent_is_found_in_a_long_history() -> None:
    """The new level has 15 of 60 runs."""
    assert count_found(histories(60, step=1.03, at=45)) >= 0.9 * HISTORIES


def test_interval_of_a_step_contains_the_true_ratio() -> None:
    """The nominal rate is 95 of 100, also if runs are correlated."""
    for kind in ("normal", "ar"):
        rows = draw_histories(kind, HISTORIES, 60, seed=3, step=0.05, since=30)
        found = [f[0] for f in find_changes_in(rows) if len(f) == 1]
        covered = sum(f.low <= 1.05 <= f.high for f in found if f.low is not None and f.high is not None)
        assert covered >= 0.93 * len(found), kind


@pytest.mark.parametrize("factor", [0.8, 1.1, 3.0])
def test_single_odd_run_is_no_change(factor: float) -> None:
    rows = histories(30, seed=5)
    rows[np.arange(HISTORIES), np.arange(HISTORIES) % 30] *= factor
    assert count_found(rows) <= MAX_FALSE_MARKS * HISTORIES


def test_odd_run_hides_no_step_and_changes_no_level() -> None:
    """With a step of 5 % at run 30 and a run 4 that took three times as long, the old level is that of the other 29.

    An ordinary run would raise the old level to 50·3^(1/30), by 3.7 %, and hide most of the step.
    """
    rows = histories(60, step=1.05, at=30, seed=5)
    rows[:, 4] *= 3
    found = [f[0] for f in find_changes_in(rows) if len(f) == 1]
    assert len(found) >= 0.95 * HISTORIES
    assert all(f.old == pytest.approx(50, rel=0.02) for f in found)
    assert sum(f.low <= 1.05 <= f.high for f in found if f.low is not None and f.high is not None) >= 0.9 * len(found)


def test_run_is_odd_if_only_few_runs_are_far_from_their_neighbours() -> None:
    """For alternating ±1 the median of four neighbours is 0, all deviations are 1, and the limit is 4 / 1.875 = 2.1.

    Two runs at 9 are odd, wherever they are; a third one shows that 9 occurs, and all three stay.
    """
    flat = np.array([-1.0, 1.0] * 20)

    def replaced(value: float, *places: int) -> list[int]:
        x = flat.copy()
        x[list(places)] = value
        return np.flatnonzero(change_points._replace_odd_runs(x) != x).tolist()

    assert replaced(1.9, 20) == []
    assert replaced(9, 20) == [20]
    assert replaced(9, 20, 21) == [20, 21]
    assert replaced(9, 3, 30) == [3, 30]
    assert replaced(9, 3, 20, 30) == []
    assert replaced(-9, 0) == [0]


def test_two_valued_noise_is_not_taken_for_odd_runs() -> None:
    """One run in five is 2 % above the others: without them, five in a row would be a step without any scatter."""
    rows = np.log(draw_histories("two-valued", HISTORIES, 30, seed=4))
    same = [np.array_equal(change_points._replace_odd_runs(row), row) for row in rows if (row == row.max()).sum() > 2]
    assert len(same) > 0.9 * HISTORIES
    assert all(same)


@pytest.mark.parametrize("since", [1, 2])
def test_step_of_one_or_two_runs_is_no_change(since: int) -> None:
    """One or two runs may be odd runs, independent of their distance."""
    assert count_found(histories(30, step=1.1, at=30 - since)) <= MAX_FALSE_MARKS * HISTORIES


class TestSteps:
    def test_variance_of_a_mean_follows_from_the_correlation(self) -> None:
        """g(k) = 1/k for ρ = 0; with ρ = 0.5 and two runs (1 + 0.5) / 2."""
        assert change_points._compute_variance_of_mean(7, 0.0) == pytest.approx(1 / 7)
        assert change_points._compute_variance_of_mean(2, 0.5) == pytest.approx(0.75)
        assert change_points._compute_variance_of_mean(5, 0.5) == pytest.approx(
            (1 + 2 * (0.8 / 2 + 0.6 / 4 + 0.4 / 8 + 0.2 / 16)) / 5
        )

    def test_error_of_a_step_is_as_computed_by_hand(self) -> None:
        """Residuals are ±1 and alternate: ρ = MIN_CORRELATION = 0.3, with eight squares of 1 in all."""
        before, after = np.array([-1.0, 1.0] * 2), np.array([9.0, 11.0] * 2)
        step = change_points.measure_step(before, after)
        g = (1 + 2 * (0.75 * 0.3 + 0.5 * 0.09 + 0.25 * 0.027)) / 4
        assert (step.difference, step.runs) == (10, 8)
        assert step.error == pytest.approx(np.sqrt(8 / (8 - 8 * g) * 2 * g))
        assert step.certainty == pytest.approx(10 / step.error / (5.6 + 20 / 8))

    def test_correlated_runs_have_a_larger_error(self) -> None:
        rng = np.random.default_rng(0)
        errors = {
            rho: np.mean(
                [change_points.measure_step(*np.split(row, [30])).error for row in draw_ar1(rho, 200, 60, rng)]
            )
            for rho in (0.0, 0.7)
        }
        assert errors[0.7] > 1.5 * errors[0.0]

    def test_step_between_constant_levels_is_certain(self) -> None:
        assert change_points.measure_step(np.full(8, 1.0), np.full(8, 2.0)).score == np.inf
        assert change_points.measure_step(np.full(8, 1.0), np.full(8, 1.0)).score == 0


def test_step_up_and_back_down_is_two_changes() -> None:
    rows = histories(60, step=1.05, at=20)
    rows[:, 40:] /= 1.05
    assert sum(len(found) == 2 for found in find_changes_in(rows)) >= 0.9 * HISTORIES


def test_levels_and_ratio_of_a_clear_step_are_geometric_means() -> None:
    """The geometric means of 100, 101, 99 … and of 110, 111, 109 … differ by 10 %."""
    values = [100.0, 101.0, 99.0, 100.0, 101.0, 99.0, 110.0, 111.1, 108.9, 110.0, 111.1, 108.9]
    (step,) = change_points.find_changes(values)
    assert step.before == 5
    assert step.old == pytest.approx(99.997, abs=0.01)
    assert step.ratio == pytest.approx(1.1, abs=1e-3)
    assert step.low is not None
    assert step.high is not None
    assert 1.08 < step.low < 1.1 < step.high < 1.12


def test_counts_that_may_be_zero_change_by_plain_difference() -> None:
    """A change from zero to two host synchronisations per step has no ratio."""
    (step,) = change_points.find_changes([0.0] * 8 + [2.0] * 8)
    assert (step.before, step.old, step.new) == (7, 0.0, 2.0)
    assert step.ratio is None


def test_certain_change_of_a_thousandth_is_not_marked() -> None:
    """Replays of one set of step times scatter so little that any rounding would be a change."""
    assert change_points.find_changes([100.0] * 10 + [100.1] * 10) == ()


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0] * 6 + [2.0] * 5, [3.0] * 30], ids=["none", "one", "eleven", "equal"]
)
def test_short_and_constant_histories_have_no_changes(values: list[float]) -> None:
    assert change_points.find_changes(values) == ()


def test_same_history_always_has_the_same_changes() -> None:
    row = list(histories(30, step=1.05, at=12)[0])
    one = change_points.find_changes(row)
    change_points._find_cached.cache_clear()
    assert change_points.find_changes(row) == one


def test_missing_ruptures_raises_error_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    change_points._find_cached.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[dashboard\]'"):
        change_points.find_changes([1.0] * 6 + [2.0] * 6)


def test_pages_need_neither_matplotlib_nor_ruptures() -> None:
    """Importing both takes longer than making several pages."""
    code = (
        "import sys, dcpbench.dashboard.site, dcpbench.reports.sections, dcpbench.reports.page.render\n"
        "dcpbench.dashboard.change_points.check_installed()\n"
        "print([name for name in ('matplotlib', 'ruptures') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
