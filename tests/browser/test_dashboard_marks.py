"""Charts of the dashboard over real runs: a mark for each value that records have, in the colour of the layout."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench.dashboard import discovery, site
from dcpbench.records.metrics import DASHBOARD
from dcpbench.show.layouts import Degrees, get_colours

if TYPE_CHECKING:
    from tests.browser.conftest import Visit

RUNS = Path(__file__).parents[2] / "results" / "decode_4xH200/decode-deepseek-v3-kimi-k2_4xH200_2026-11-20"
EXPECTED_LINES = 8
COUNT = """() => Object.fromEntries([...document.querySelectorAll("#charts figure")].map((figure) => [
  figure.dataset.measure,
  [...figure.querySelectorAll(".scatterlayer .point")].filter((mark) => mark.getAttribute("d").length > 5)
    .map((mark) => getComputedStyle(mark).fill),
]))"""
"""Return the fill colour of each mark with an outline, by chart."""
MAX_POLLS = 400  # of a page that is still drawing


def parse_rgb(hexadecimal: str) -> str:
    """Return the colour in the notation of a browser's computed style."""
    return f"rgb({', '.join(str(int(hexadecimal[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_record_value_has_a_mark_in_the_colour_of_its_layout(scheme: str, tmp_path: Path, visit: Visit) -> None:
    """Pick two histories of each of four layouts, and count the values in the records instead of in the page's data."""
    site.build(RUNS, tmp_path / "site", newest=0)
    entries = collections.defaultdict(list)
    for run in discovery.load_runs(RUNS, {}, lambda _: None).runs:
        for line, entry in run.entries.items():
            entries[line].append(entry)
    by_layout = collections.defaultdict(list)
    for line, found in entries.items():
        if any(entry.values for entry in found):
            by_layout[line.example.layout_name].append(line)
    picked = [line for lines in by_layout.values() for line in lines[:2]]
    assert len(picked) == EXPECTED_LINES
    expected = {
        metric.shown_name: collections.Counter(
            parse_rgb(get_colours(Degrees(line.example.tp, line.example.dp, line.example.dcp))[scheme == "dark"])
            for line in picked
            for entry in entries[line]
            if metric.shown_name in entry.values
        )
        for metric in DASHBOARD
    }
    fragment = "#all=true&" + "&".join(f"p={line.id}" for line in picked)
    page = visit(tmp_path / "site" / "index.html", fragment, color_scheme=scheme)
    wanted = {name: marks for name, marks in expected.items() if marks}
    assert wanted
    counted: dict[str, collections.Counter[str]] = {}
    for _ in range(MAX_POLLS):
        counted = {name: collections.Counter(marks) for name, marks in page.evaluate(COUNT).items()}
        if counted == wanted:
            break
        page.wait_for_timeout(50)
    assert counted == wanted
