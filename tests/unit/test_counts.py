"""Parsing of counts on the command line."""

import pytest

from dcpbench.points.counts import parse_count, suggest_counts


@pytest.mark.parametrize(
    ("text", "count"),
    [("4000", 4000), ("64k", 64_000), ("1.5k", 1500), ("1m", 1_000_000), (" +7 ", 7), ("-2k", -2000), ("0", 0)],
)
def test_k_and_m_are_powers_of_a_thousand(text: str, count: int) -> None:
    """The form is that of `vllm serve --max-model-len 64k`."""
    assert parse_count(text) == count
    assert suggest_counts(text) == ""


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0005k", "64K", "1M", "1e3", "64kb", "0x10", "1_000", "nan", "4 k"])
def test_other_texts_are_no_counts(text: str) -> None:
    assert parse_count(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64K", "K is 1,000 in some tools and 1,024 in others; write 64000 (or 64k), or 65536"),
        ("1M", "M is 1,000,000 in some tools and 1,048,576 in others; write 1000000 (or 1m), or 1048576"),
    ],
)
def test_capital_unit_is_ambiguous_and_both_numbers_are_suggested(text: str, words: str) -> None:
    assert suggest_counts(text) == words
