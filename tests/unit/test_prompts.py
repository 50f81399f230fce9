"""Prompts of `verify --checkpoint`: random ones and files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import UsageError
from dcpbench.models import SHAPES
from dcpbench.points.prompts import make_random_prompts, read_prompts

if TYPE_CHECKING:
    from pathlib import Path

TINY = dataclasses.replace(SHAPES["tiny"], max_position=12)


def test_random_prompts_are_repeatable_with_lengths_up_to_the_context() -> None:
    """With context 37, 4 requests have 1 token and then 12 more each, below the vocabulary of 512; a single request has
    all 37.
    """
    prompts = make_random_prompts(TINY, 4, 37)
    assert [len(p) for p in prompts] == [1, 13, 25, 37]
    assert prompts == make_random_prompts(TINY, 4, 37)
    assert all(0 <= token < 512 for p in prompts for token in p)
    assert [len(p) for p in make_random_prompts(TINY, 1, 37)] == [37]
    assert [len(p) for p in make_random_prompts(TINY, 3, 1)] == [1, 1, 1]


def test_file_of_token_lists_is_read(tmp_path: Path) -> None:
    """The file has the first and the last id of the vocabulary, and as many tokens as there are positions: 4 and 8 new
    ones.
    """
    path = tmp_path / "prompts.json"
    path.write_text("[[0, 511], [7, 7, 7, 7]]")
    assert read_prompts(path, TINY, 8) == ((0, 511), (7, 7, 7, 7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1, 512]]", "prompt 1: 512 is no token of tiny; ids go from 0 to 511"),
        ("[[1], [2, -1]]", "prompt 2: -1 is no token of tiny"),
        ("[[1], []]", "prompt 2 is empty"),
        ("[]", "holds no prompt. Write lists of token ids, for example"),
        ("[[1], [1, 2, 3, 4, 5]]", "prompt 2: 5 tokens and 8 new ones pass tiny's 12 positions"),
        ('[["a"]]', "for example [[1, 5, 7], [2]]"),
        ("{", "for example"),
    ],
)
def test_invalid_prompts_raise_usage_error_with_their_number(text: str, message: str, tmp_path: Path) -> None:
    """A rank would otherwise raise an index error, or compare nothing."""
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_prompts(path, TINY, 8)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json"):
        read_prompts(tmp_path / "none.json", TINY, 8)
