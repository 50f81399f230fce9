"""tools/chunk_steps.py: which cases it shows and what it says of them, from step times that were measured."""

from pathlib import Path

from dcpbench.serving.step_times import read_step_times
from tools import chunk_steps as tool

RESULTS = Path(__file__).parents[2] / "results/replay-against-live_H100_2026-11-25"
FILE = "build-deepseek-v2-lite/step-times/deepseek-v2-lite-tp1-dp1-dcp1-none-7c47c473b5ec.json"
NOW, BEFORE = read_step_times(RESULTS / FILE), read_step_times(RESULTS / "kernel-by-kernel" / FILE)


def test_cases_of_chunks_alone_are_shown_without_a_prefix_first() -> None:
    """19 of the 62 cases; 10 have a prefix, in one of which 8 chunks have 2,816 stored tokens each."""
    lines = tool.table(NOW)
    shown = lines[2 : lines.index("")]
    prefixes = [int(line.split(" | ")[1].replace(",", "")) for line in shown]
    assert len(shown) == 19
    assert prefixes[:9] == [0] * 9
    assert all(prefixes[9:])
    assert "| 8 × 256 tokens at 2,816 | 22,528 | 36.4 | 36.7 |" in shown


def test_the_range_of_the_host_is_said_of_both_kinds() -> None:
    """16, 128 and 512 tokens behind one long prefix took the host longer than the GPU: 15.7, 19.0 and 27.1 ms."""
    bare, stored = tool.table(NOW)[-2:]
    assert bare == "without a stored prefix: 3.2 to 4.6 ms of the host; longer than the device in 0 of 9 cases"
    assert stored == "with one: 11.1 to 36.4 ms of the host; longer than the device in 3 of 10 cases"


def test_earlier_times_stand_beside_the_cases_that_both_have() -> None:
    """Launched kernel by kernel 16 tokens took the host 36.0 ms; 48 at 3,008 are there, too, and 1,024 are not."""
    lines = tool.table(NOW, BEFORE)
    assert "| 1 × 16 tokens at 0 | 0 | 3.2 | 10.4 | 36.0 | 22.8 |" in lines
    assert "| 1 × 1,024 tokens at 0 | 0 | 4.3 | 19.2 | – | – |" in lines
