"""Test tools/versions_table.py, which makes the tables of results/ from their raw records."""

from __future__ import annotations

import pytest

from tools import versions_table
from tools.results import RESULTS, unpack_all

FP8 = "attention_H100-H200/attention-fp8_H200_2026-11-26/shipped/fp8.jsonl"
LINEAR = "linear-experts_H200/linear-fp8_H200_2026-11-26/shipped/sweep.jsonl"


@pytest.fixture(autouse=True, scope="module")
def unpacked() -> None:
    unpack_all()


def test_row_has_the_base_time_and_ratios_of_other_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """Leave out sizes that all cases share, such as the page size."""
    assert versions_table.main([str(RESULTS / FP8), "--base", "now"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| case | now, µs | old | six | flashmla |"
    assert "| heads 128, requests 48, context 32768 | 516.9 | 1.25 | 1.00 | 1.45 |" in rows
    assert len(rows) == 12


def test_times_of_the_layers_of_one_rank_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    """Count a size that several tp share, which is one line of the file, for each of them."""
    layers = "qkv_a,q_b,o,shared-gate-up,shared-down"
    assert versions_table.main([str(RESULTS / LINEAR), "--layers", layers]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "| tp1, rows 16 | 75.8 | 1.12 |" in rows
    assert "| tp8, rows 128 | 50.4 | 1.17 |" in rows


def test_base_version_without_times_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        versions_table.main([str(RESULTS / FP8), "--base", "later"])
    assert "has no times of later; --base takes one of old, now, six, flashmla" in capsys.readouterr().err
