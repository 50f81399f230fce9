"""Test steps of several tokens: the arithmetic of acceptance, its notation, and which drafts are accepted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import UsageError
from dcpbench.points.speculation import Speculation, check_acceptance, make_speculation, parse_acceptance

if TYPE_CHECKING:
    from pathlib import Path

THREE = Speculation(3, (0.85, 0.6, 0.4))


def test_expected_tokens_are_the_sum_of_products_of_probabilities():
    """The sum is 1 + 0.85 + 0.85·0.6 + 0.85·0.6·0.4 = 1 + 0.85 + 0.51 + 0.204 = 2.564."""
    assert THREE.reached == pytest.approx((0.85, 0.51, 0.204))
    assert THREE.expected_tokens == pytest.approx(2.564)
    assert THREE.query_length == 4


def test_no_acceptance_means_no_expected_tokens():
    assert make_speculation(3, "") == Speculation(3, ())
    assert Speculation(3, ()).expected_tokens is None
    assert make_speculation(0, "") is None


def test_drawn_drafts_follow_the_stated_probabilities():
    """In 40,000 steps, each draft is reached as often as stated; the standard deviation of a share is below 0.0025, of
    which 5 are allowed.
    """
    drawn = [THREE.count_accepted(0, request, step) for request in range(200) for step in range(200)]
    for number, share in enumerate(THREE.reached, 1):
        assert sum(count >= number for count in drawn) / len(drawn) == pytest.approx(share, abs=0.0125)


def test_drawn_drafts_do_not_depend_on_the_order_of_requests():
    requests = [(request, step) for request in range(8) for step in range(8)]
    forward = {one: THREE.count_accepted(3, *one) for one in requests}
    assert {one: THREE.count_accepted(3, *one) for one in reversed(requests)} == forward
    assert {one: THREE.count_accepted(4, *one) for one in requests} != forward


def test_drafts_with_probability_one_and_zero():
    assert {Speculation(2, (1.0, 1.0)).count_accepted(0, 1, step) for step in range(99)} == {2}
    assert {Speculation(2, (0.0, 1.0)).count_accepted(0, 1, step) for step in range(99)} == {0}


def test_equal_probabilities_are_kept():
    assert parse_acceptance("0.6/0.6/0.60") == "0.6/0.6/0.6"


@pytest.mark.parametrize("content", [[0.9, 0.5], {"acceptance": [0.9, 0.5]}])
def test_options_file_accepts_probabilities(content: object, tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert parse_acceptance(str(tmp_path / "a.json")) == "0.9/0.5"


@pytest.mark.parametrize("text", ["1.5", "0.5/-1", "nan", "no-such-file.json"])
def test_wrong_probabilities_are_refused_with_an_example(text: str):
    with pytest.raises(UsageError, match=r"write for example --mtp 3,acceptance=0\.85/0\.6/0\.4"):
        parse_acceptance(text)


def test_each_draft_has_a_probability():
    check_acceptance((0, 1, 2), "0.8/0.6")
    with pytest.raises(
        UsageError, match=r"--mtp tokens=3 with 2 probabilities \(0\.8/0\.6\); state one for each draft, such as"
    ):
        check_acceptance((3,), "0.8/0.6")
    with pytest.raises(UsageError, match="has no drafts; add tokens=2"):
        check_acceptance((0,), "0.8/0.6")
