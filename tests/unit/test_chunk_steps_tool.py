"""Tests of tools/chunk_steps.py: listed cases and summary lines, from measured step times."""

from pathlib import Path

from dcpbench.serving.step_times import read_step_times
from tools import chunk_steps as tool

RESULTS = Path(__file__).parents[2] / "results/replay_H100-H200/replay-against-live_H100_2026-11-25"
FILE = "step-times/deepseek-v2-lite-tp1-dp1-dcp1-none-7c47c473b5ec.json"
NOW, BEFORE = read_step_times(RESULTS / "build-deepseek-v2-lite" / FILE), read_step_times(RESULTS / "windows" / FILE)


def test_chunk_cases_are_listed_with_those_without_a_prefix_first() -> None:
    """30 of the 77 cases have only chunks; 14 have a prefix, in one of which 8 chunks have 2,816 stored tokens each."""
    lines = tool.format_table(NOW)
    shown = lines[2 : lines.index("")]
    prefixes = [int(line.split(" | ")[1].replace(",", "")) for line in shown]
    assert len(shown) == 30
    assert prefixes[:16] == [0] * 16
    assert all(prefixes[16:])
    assert "| 8 × 256 tokens at 2,816 | 22,528 | 7.4 | 34.1 |" in shown


def test_host_time_range_is_stated_with_and_without_a_prefix() -> None:
    """For windows behind a prefix, the host took longer than the GPU."""
    bare, stored = tool.format_table(BEFORE)[-2:]
    assert bare == "without a stored prefix: 3.5 to 5.8 ms on the host, longer than on the device in 0 of 14 cases"
    assert stored == "with a stored prefix: 12.1 to 36.0 ms on the host, longer than on the device in 2 of 14 cases"


def test_earlier_times_are_shown_for_common_cases() -> None:
    """16 tokens behind 3,072 took the host 14.4 ms before; 544 had not been measured."""
    lines = tool.format_table(NOW, BEFORE)
    assert "| 1 × 16 tokens at 3,072 | 3,072 | 3.8 | 12.4 | 14.4 | 13.4 |" in lines
    assert "| 1 × 544 tokens at 0 | 0 | 3.8 | 16.1 | – | – |" in lines
