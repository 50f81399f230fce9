"""Change points: found where there is one, hardly ever where there is none, and never for one odd run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.dashboard import changes
from dcpbench.errors import MissingPackageError

if TYPE_CHECKING:
    from dcpbench.dashboard.changes import Change

HISTORIES = 200
CV = 0.01


def histories(runs: int, *, step: float = 1.0, at: int = 0, seed: int = 0) -> np.ndarray:
    """Histories of `runs` medians around 50 with a run-to-run CV of 1 %, times `step` from run `at` on."""
    found = 50 * (1 + CV * np.random.default_rng(seed).normal(size=(HISTORIES, runs)))
    found[:, at:] *= step
    return found


def found_in(rows: np.ndarray) -> list[tuple[Change, ...]]:
    return [changes.find(list(row)) for row in rows]


@pytest.mark.parametrize("runs", [6, 12, 30, 60])
def test_at_most_one_in_twenty_unchanged_histories_is_marked(runs: int) -> None:
    """The promise for 30 runs with a CV of 1 %, held for other lengths, too."""
    marked = sum(bool(found) for found in found_in(histories(runs)))
    assert marked <= 0.05 * HISTORIES


def test_heavy_tails_do_not_change_that() -> None:
    """Student's t with 3 degrees of freedom has a run at 5 standard deviations in most histories."""
    noise = np.random.default_rng(3).standard_t(3, size=(HISTORIES, 30))
    assert sum(bool(found) for found in found_in(50 * np.exp(CV * noise))) <= 0.05 * HISTORIES


@pytest.mark.parametrize("step", [1.03, 1 / 1.03], ids=["slower", "faster"])
@pytest.mark.parametrize("at", [10, 15, 25])
def test_a_step_of_3_percent_is_found(step: float, at: int) -> None:
    """With a CV of 1 % and 30 runs, in 95 of 100 histories; and as one step, within a run of where it is, in most."""
    found = found_in(histories(30, step=step, at=at))
    assert sum(bool(f) for f in found) >= 0.95 * HISTORIES
    exact = sum(len(f) == 1 and abs(f[0].before + 1 - at) <= 1 for f in found)
    assert exact >= 0.9 * HISTORIES


def test_the_interval_of_a_step_holds_the_true_one() -> None:
    """Nominally in 95 of 100; a little less, because where the step lies is estimated from the same runs."""
    found = [f[0] for f in found_in(histories(30, step=1.03, at=15)) if len(f) == 1]
    covered = sum(f.low <= 1.03 <= f.high for f in found if f.low is not None and f.high is not None)
    assert covered >= 0.88 * len(found)


@pytest.mark.parametrize("factor", [0.8, 1.1, 3.0])
def test_one_odd_run_is_not_a_change(factor: float) -> None:
    rows = histories(30, seed=5)
    rows[np.arange(HISTORIES), np.arange(HISTORIES) % 30] *= factor
    assert sum(bool(found) for found in found_in(rows)) <= 0.05 * HISTORIES


def test_an_odd_run_hides_no_step_and_is_part_of_no_level() -> None:
    """A step of 3 % at run 15, and run 4 took three times as long: the old level is that of the other 14.

    As a run like any other it would raise the old level to 50·3^(1/15), by 7.6 %: a step down, lost in its noise.
    """
    rows = histories(30, step=1.03, at=15, seed=5)
    rows[:, 4] *= 3
    found = [f[0] for f in found_in(rows) if len(f) == 1]
    assert len(found) >= 0.9 * HISTORIES
    assert all(f.old == pytest.approx(50, rel=0.02) for f in found)
    assert sum(f.low <= 1.03 <= f.high for f in found if f.low is not None and f.high is not None) >= 0.85 * len(found)


def test_odd_is_further_than_four_standard_deviations_from_the_five_runs_around() -> None:
    """Differences of 2 throughout, ±1 in turn: σ = 2 / √2 = 1.41, a little more for the run looked at; 4·σ is near 6.

    Run 20 of 40 is at 1 in turn and its neighbours are -1, 1, …: their median with a high run is 1. 1 + 4.5 stays, and
    1 + 8 becomes 1; two such runs beside each other, too, as three of five are others. Three are no odd runs.
    """
    flat = np.array([-1.0, 1.0] * 20)
    flat[20] = 1.0

    def filtered(*high: float) -> list[float]:
        x = flat.copy()
        x[20 : 20 + len(high)] = high
        return list(changes._without_odd(x)[20 : 20 + len(high)])

    assert filtered(1 + 4.5) == [1 + 4.5]
    assert filtered(1 + 8) == [1]
    assert filtered(9, 9) == [1, 1]
    assert filtered(9, 9, 9) == [9, 9, 9]


def test_the_newest_run_alone_is_not_a_change() -> None:
    """Whether a step lasts is known after three runs."""
    rows = histories(30, step=1.1, at=29)
    assert sum(bool(found) for found in found_in(rows)) <= 0.05 * HISTORIES


def test_a_step_up_and_back_down_is_two() -> None:
    rows = histories(30, step=1.03, at=10)
    rows[:, 20:] /= 1.03
    assert sum(len(found) == 2 for found in found_in(rows)) >= 0.9 * HISTORIES


def test_levels_and_ratio_of_a_clear_step() -> None:
    """Geometric means of 100, 101, 99 … and of 110, 111, 109 …: 10 % more."""
    values = [100.0, 101.0, 99.0, 100.0, 101.0, 99.0, 110.0, 111.1, 108.9, 110.0, 111.1, 108.9]
    (step,) = changes.find(values)
    assert step.before == 5
    assert step.old == pytest.approx(99.997, abs=0.01)
    assert step.ratio == pytest.approx(1.1, abs=1e-3)
    assert step.low is not None
    assert step.high is not None
    assert 1.08 < step.low < 1.1 < step.high < 1.12


def test_counts_that_may_be_zero_change_by_plain_difference() -> None:
    """Two host synchronisations per step where there were none have no ratio."""
    (step,) = changes.find([0.0] * 8 + [2.0] * 8)
    assert (step.before, step.old, step.new) == (7, 0.0, 2.0)
    assert step.ratio is None


def test_a_sure_change_of_a_thousandth_is_not_marked() -> None:
    """Replays of one set of step times scatter so little that any rounding would be a change."""
    assert changes.find([100.0] * 10 + [100.1] * 10) == ()


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 2.0, 1.0, 2.0, 1.0], [3.0] * 30], ids=["none", "one", "five", "equal"]
)
def test_short_and_constant_histories_have_none(values: list[float]) -> None:
    assert changes.find(values) == ()


def test_the_same_history_always_has_the_same_marks() -> None:
    row = list(histories(30, step=1.02, at=12)[0])
    one = changes.find(row)
    changes._find.cache_clear()
    assert changes.find(row) == one


def test_without_ruptures_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    changes._find.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[dashboard\]'"):
        changes.find([1.0] * 5 + [2.0] * 5)
