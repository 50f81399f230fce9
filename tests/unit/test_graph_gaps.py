"""tools/graph_gaps.py where there is no GPU: what it refuses, and how it tells what was found."""

import sys

import pytest

from tools import graph_gaps
from tools.graph_gaps import Found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ways", "kept,most"], "there are no ways most; --ways takes kept, freed"),
        (["--nodes", "0"], "--graphs and --nodes must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a GPU is looked for."""
    monkeypatch.setattr(sys, "argv", ["graph_gaps", "-o", "/nowhere/gaps.jsonl", *words])
    with pytest.raises(SystemExit):
        graph_gaps.main()
    assert said in capsys.readouterr().err


def test_a_way_is_a_line_of_its_graphs_in_order() -> None:
    """Each as captured, then those that live."""
    found = Found(way="freed", device="NVIDIA H200", nodes=2300, first_us=[1.52, 1.524, 1.8], again_us=[1.8])
    line = list(graph_gaps.table([found]))[-1]
    assert line == "| `freed`: each is dropped before the next | 2,300 | 1.52, 1.52, 1.80 | 1.80 |"
