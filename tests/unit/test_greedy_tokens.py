"""Greedy tokens of two engines are compared up to the first difference, and judged by two layouts of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.servers.answer_pairs import Answer
from tools import greedy_tokens
from tools.greedy_tokens import Answers, Position, compare_answers, list_positions, make_prompts

if TYPE_CHECKING:
    from pathlib import Path


def make_answers(name: str, *rows: list[tuple[int, float]], shift: float = 0.0) -> Answers:
    """Return answers with positions that list their token and token 9, each `shift` more likely."""
    return Answers(
        name=name,
        answers=[[Position(token, {token: lp + shift, 9: -5.0 + shift}) for token, lp in row] for row in rows],
    )


BASE = make_answers("one", [(3, -1.0), (4, -1.0)], [(5, -2.0), (6, -2.0)])


def test_positions_after_the_first_difference_are_left_out() -> None:
    """The second answer differs at its first position, where both lists have only token 9."""
    other = make_answers("two", [(3, -1.0), (4, -1.0)], [(7, -2.0), (8, -9.0)], shift=0.1)
    found = compare_answers(BASE, other)
    assert (found.prompts, found.positions, found.same_first, found.same, found.logprobs) == (2, 3, 1, 2, 5)
    assert (found.mean, found.largest) == (pytest.approx(0.1), pytest.approx(0.1))


def test_engines_without_a_common_token_cannot_be_compared() -> None:
    other = Answers(name="two", answers=[[Position(8, {8: -1.0})], [Position(8, {8: -1.0})]])
    with pytest.raises(ValueError, match="no token in common"):
        compare_answers(Answers(name="one", answers=[[p] for p, _ in BASE.answers]), other)


@pytest.mark.parametrize(("shift", "code"), [(0.14, 0), (0.16, 1)])
def test_engine_may_differ_up_to_1_5_times_as_much_as_layouts(
    shift: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(3, -1.0), (4, -1.0)], [(5, -2.0), (6, -2.0)]
    files = []
    for number, one in enumerate(
        (BASE, make_answers("again", *rows, shift=0.1), make_answers("other", *rows, shift=shift))
    ):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_bytes(msgspec.json.encode(one))
    monkeypatch.setattr("sys.argv", ["greedy_tokens", "compare", *map(str, files)])
    assert greedy_tokens.main() == code
    assert f"{shift / 0.1:.2f} times as much" in capsys.readouterr().out


def test_prompts_are_the_same_for_every_engine() -> None:
    prompts = make_prompts(100, 9, 20, seed=3)
    assert prompts == make_prompts(100, 9, 20, seed=3)
    assert [len(prompt) for prompt in prompts] == [20, 19, 18, 17, 16, 15, 14, 20, 19]
    assert min(min(prompt) for prompt in prompts) >= 2


def test_position_keeps_the_likeliest_tokens_and_the_sampled_one() -> None:
    """The 5 likeliest of 7 listed tokens stay; the answer's own token is added if it is not among them."""
    tops = {f"t{n}": -float(n) for n in range(7)}
    answer = Answer(tokens=["9"], names=["t9"], logprobs=[-9.0], tops=[tops])
    assert list_positions(answer) == [Position(9, {n: -float(n) for n in range(5)} | {9: -9.0})]
    with pytest.raises(ValueError, match="no log-probabilities"):
        list_positions(Answer(tokens=["9"]))
