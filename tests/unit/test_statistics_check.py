"""The rates that docs/statistics.md states: a short, seeded form of its simulations, and the page itself."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from dcpbench.compare import effects
from tools import statistics_check as check

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
COMPARISONS = 150


def count_different(
    kind: str, launches: tuple[int, int], *, paired: bool = False, scatter: tuple[float, float] = (1.0, 1.0)
) -> int:
    """Return how many comparisons of equal sides are called different."""
    rng = np.random.default_rng([1, *launches, *kind.encode()])
    mean = -0.6 if kind == "two-valued" else 0.0
    found = 0
    for _ in range(COMPARISONS):
        a, b = check.draw_sides(kind, launches, rng, paired=paired)
        a, b = (0.01 * s * (x - mean) for s, x in zip(scatter, (a, b), strict=True))
        found += any(check.find_different(a, b, paired=paired))
    return found


class TestEqualSides:
    """Documented: at most 5 % show a difference; 12 of 150 are the upper 5 % of what 5 % gives."""

    @pytest.mark.parametrize("kind", check.NOISES)
    @pytest.mark.parametrize("launches", [(4, 4), (8, 8), (4, 8)])
    def test_they_are_hardly_ever_called_different(self, kind: str, launches: tuple[int, int]) -> None:
        assert count_different(kind, launches) <= 12

    @pytest.mark.parametrize("kind", check.NOISES)
    def test_rounds_are_hardly_ever_called_different(self, kind: str) -> None:
        assert count_different(kind, (4, 4), paired=True) <= 12

    @pytest.mark.parametrize("launches", [(4, 6), (4, 12)])
    def test_the_freedom_of_the_larger_side_is_not_taken_for_the_smaller_one(self, launches: tuple[int, int]) -> None:
        """Few launches that scatter by 2 % against many that scatter by 0.3 %."""
        assert count_different("normal", launches, scatter=(2.0, 0.3)) <= 12

    @pytest.mark.parametrize("launches", [(2, 6), (1, 6), (3, 3), (1, 1)])
    def test_fewer_than_four_launches_are_never_called_different(self, launches: tuple[int, int]) -> None:
        """Two of 2 % against six of 0.3 % were, in 15 % of cases; one against six in 93 %; two-valued 3 against 3 in 13 %."""
        assert count_different("two-valued", launches) == 0
        assert count_different("normal", launches, scatter=(2.0, 0.3)) == 0


def test_a_slowdown_of_5_percent_is_found_by_four_launches_that_scatter_by_1_percent() -> None:
    """Documented: in at least 90 %."""
    assert check.count_slowdowns(0.05, effects.MIN_LAUNCHES, 0.01, 400).holds


def test_a_share_has_an_upper_bound() -> None:
    """The bound of none in 100 is 1 - 0.05^(1/100) = 3 %; a share holds if it is as documented and its bound below twice that."""
    none = check.Share(0, 100, at_most=0.02)
    assert none.bound == pytest.approx(1 - 0.05 ** (1 / 100))
    assert none.holds
    assert not check.Share(3, 100, at_most=0.02).holds
    assert not check.Share(0, 50, at_most=0.02).holds, "50 draws cannot show it"
    assert check.Share(9, 10, at_least=0.9).holds
    assert not check.Share(8, 10, at_least=0.9).holds


@pytest.mark.parametrize("kind", [*check.NOISES, *check.OTHERS])
def test_noise_has_a_scatter_of_one_unit(kind: str) -> None:
    """Two-valued noise: ±1, of which 1 in 5 is higher, 2·√(0.2·0.8) = 0.8. An AR(1) process keeps its correlation."""
    x = check.draw_noise(kind, 400, 200, np.random.default_rng(0))
    assert x.shape == (400, 200)
    assert np.std(x) == pytest.approx(0.8 if kind.startswith("two") else 1, rel=0.05)
    rho = float(np.mean(x[:, 1:] * x[:, :-1]) - np.mean(x) ** 2) / float(np.var(x))
    assert rho == pytest.approx({"ar": 0.5, "ar 0.7": 0.7}.get(kind, 0), abs=0.03)


def test_paired_sides_are_launched_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B, B A, A B: launches 0, 3 and 4 are A's, and 1, 2 and 5 are B's."""
    monkeypatch.setattr(check, "draw_noise", lambda _, rows, runs, __: np.tile(np.arange(float(runs)), (rows, 1)))
    a, b = check.draw_sides("normal", (3, 3), np.random.default_rng(0), paired=True, rows=1)
    assert a.tolist() == [[0, 3, 4]]
    assert b.tolist() == [[1, 2, 5]]


class TestPage:
    def test_it_has_every_table_and_no_rate_worse_than_documented(self) -> None:
        text = PAGE.read_text(encoding="utf-8")
        assert text.startswith(check.HEAD)
        assert len(re.findall(r"^## ", text, re.MULTILINE)) == len(check.CHECKS)
        assert "%!" not in text.replace(" ", "")

    def test_its_rates_are_those_that_the_code_documents(self) -> None:
        """The rates of unchanged histories and equal sides are read from the page: after a change of a constant the page has to be written again."""
        text = PAGE.read_text(encoding="utf-8")
        tables = text.split("\n## ")[1:]
        marks, verdicts = (
            next(t for t in tables if t.startswith(f"{name}:")) for name in ("Change points", "Comparisons")
        )
        for name in check.NOISES.values():
            for table, limit in ((marks, check.FALSE_MARKS), (verdicts, check.FALSE_VERDICTS)):
                (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", table, re.MULTILINE)
                shares = [float(cell.split(" %")[0]) / 100 for cell in line.split(" | ")]
                documented = [
                    s for i, s in enumerate(shares) if not (table == verdicts and name == check.NOISES["ar"] and i == 4)
                ]
                assert max(documented) <= limit, (name, math.fsum(shares))
