"""Tests of tools/graph_gaps.py without a GPU: refused options and the table of results."""

import sys

import pytest

from tools import graph_gaps
from tools.graph_gaps import Result


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ways", "kept,most"], "there is no way most; --ways takes kept, freed"),
        (["--nodes", "0"], "--graphs and --nodes must be at least 1"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options are checked before a GPU is looked for."""
    monkeypatch.setattr(sys, "argv", ["graph_gaps", "-o", "/nowhere/gaps.jsonl", *words])
    with pytest.raises(SystemExit):
        graph_gaps.main()
    assert expected in capsys.readouterr().err


def test_table_has_one_line_per_way_with_graphs_in_order() -> None:
    """A line has the gaps of all graphs as captured, and then of those that still exist."""
    found = Result(way="freed", device="NVIDIA H200", nodes=2300, first_us=[1.52, 1.524, 1.8], again_us=[1.8])
    line = list(graph_gaps.format_table([found]))[-1]
    assert line == "| `freed`: each is freed before the next | 2,300 | 1.52, 1.52, 1.80 | 1.80 |"
