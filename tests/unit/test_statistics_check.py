"""Test the rates that docs/statistics.md states, by a short, seeded form of its simulations, and the page itself."""

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
    """Test the documented limit of 5 % for equal sides that show a difference; 12 of 150 is the upper 5 % quantile."""

    @pytest.mark.parametrize("kind", check.DOCUMENTED_NOISES)
    @pytest.mark.parametrize("launches", [(4, 4), (8, 8), (4, 8)])
    def test_equal_sides_are_rarely_called_different(self, kind: str, launches: tuple[int, int]) -> None:
        assert count_different(kind, launches) <= 12

    @pytest.mark.parametrize("kind", check.DOCUMENTED_NOISES)
    def test_equal_rounds_are_rarely_called_different(self, kind: str) -> None:
        assert count_different(kind, (4, 4), paired=True) <= 12

    @pytest.mark.parametrize("launches", [(4, 6), (4, 12)])
    def test_degrees_of_freedom_are_not_those_of_the_larger_side(self, launches: tuple[int, int]) -> None:
        """Few launches that scatter by 2 % are compared with many that scatter by 0.3 %."""
        assert count_different("normal", launches, scatter=(2.0, 0.3)) <= 12

    @pytest.mark.parametrize("launches", [(2, 6), (1, 6), (3, 3), (1, 1)])
    def test_fewer_than_four_launches_are_never_called_different(self, launches: tuple[int, int]) -> None:
        """Otherwise, 15 % of comparisons of two launches at 2 % with six at 0.3 % differ, 93 % of one with six, and 13
        % of two-valued 3 with 3.
        """
        assert count_different("two-valued", launches) == 0
        assert count_different("normal", launches, scatter=(2.0, 0.3)) == 0


def test_slowdown_of_5_percent_is_found_with_four_launches_of_1_percent_scatter() -> None:
    """The documented rate is at least 90 %."""
    assert check.count_slowdowns(0.05, effects.MIN_LAUNCHES, 0.01, 400).holds


def test_observed_share_has_an_upper_bound() -> None:
    """The bound for none in 100 is 1 - 0.05^(1/100) = 3 %; a share passes if it is as documented and its bound is below
    twice that.
    """
    none = check.Share(0, 100, at_most=0.02)
    assert none.bound == pytest.approx(1 - 0.05 ** (1 / 100))
    assert none.holds
    assert not check.Share(3, 100, at_most=0.02).holds
    assert not check.Share(0, 50, at_most=0.02).holds, "50 draws cannot prove the rate"
    assert check.Share(9, 10, at_least=0.9).holds
    assert not check.Share(8, 10, at_least=0.9).holds


@pytest.mark.parametrize("kind", [*check.DOCUMENTED_NOISES, *check.OTHER_NOISES])
def test_noise_has_unit_scatter(kind: str) -> None:
    """Two-valued noise is ±1, of which 1 in 5 is higher, 2·√(0.2·0.8) = 0.8. An AR(1) process keeps its correlation."""
    x = check.draw_noise(kind, 400, 200, np.random.default_rng(0))
    assert x.shape == (400, 200)
    assert np.std(x) == pytest.approx(0.8 if kind.startswith("two") else 1, rel=0.05)
    rho = float(np.mean(x[:, 1:] * x[:, :-1]) - np.mean(x) ** 2) / float(np.var(x))
    assert rho == pytest.approx({"ar": 0.5, "ar 0.7": 0.7}.get(kind, 0), abs=0.03)


def test_paired_sides_alternate_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is A B, B A, A B: launches 0, 3 and 4 are those of A, and 1, 2 and 5 those of B."""
    monkeypatch.setattr(check, "draw_noise", lambda _, rows, runs, __: np.tile(np.arange(float(runs)), (rows, 1)))
    a, b = check.draw_sides("normal", (3, 3), np.random.default_rng(0), paired=True, rows=1)
    assert a.tolist() == [[0, 3, 4]]
    assert b.tolist() == [[1, 2, 5]]


class TestPage:
    def test_page_has_every_table_and_no_rate_worse_than_documented(self) -> None:
        text = PAGE.read_text(encoding="utf-8")
        assert text.startswith(check.HEAD)
        assert len(re.findall(r"^## ", text, re.MULTILINE)) == len(check.CHECKS)
        assert "%!" not in text.replace(" ", "")

    def test_page_states_the_rates_that_the_code_documents(self) -> None:
        """After a change of a constant, the page has to be written again."""
        text = PAGE.read_text(encoding="utf-8")
        tables = text.split("\n## ")[1:]
        marks, verdicts = (
            next(t for t in tables if t.startswith(f"{name}:")) for name in ("Change points", "Comparisons")
        )
        for name in check.DOCUMENTED_NOISES.values():
            for table, limit in ((marks, check.MAX_FALSE_MARKS), (verdicts, check.MAX_FALSE_VERDICTS)):
                (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", table, re.MULTILINE)
                shares = [float(cell.split(" %")[0]) / 100 for cell in line.split(" | ")]
                documented = [
                    s
                    for i, s in enumerate(shares)
                    if not (table == verdicts and name == check.DOCUMENTED_NOISES["ar"] and i == 4)
                ]
                assert max(documented) <= limit, (name, math.fsum(shares))
