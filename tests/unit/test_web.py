"""Test the parts of pages: embedded data, the content security policy, and the style that figures share."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING

import pytest
from matplotlib.figure import Figure

from dcpbench.reports import style
from dcpbench.show import figure_style, web

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "text",
    ["</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028", "'\"\\", "\N{GRINNING FACE}"],
    ids=["script", "comment", "entity", "line", "quotes", "emoji"],
)
def test_embedded_strings_round_trip_without_markup(text: str) -> None:
    block = web.format_json_block({"name": [text]})
    assert json.loads(block) == {"name": [text]}
    assert not set("<>&\u2028\u2029") & set(block)


def test_non_finite_numbers_become_null() -> None:
    block = web.format_json_block({"a": [float("nan"), float("inf"), -float("inf"), 1.5, (2, None)]})
    assert json.loads(block) == {"a": [None, None, None, 1.5, [2, None]]}


def test_policy_allows_only_the_scripts_of_the_page() -> None:
    digest = base64.b64encode(hashlib.sha256(b"let a = 1").digest()).decode()
    policy = web.build_content_policy(["let a = 1"])
    assert f"script-src 'sha256-{digest}'" in policy
    assert "http" not in policy
    assert "connect-src 'none'" in policy
    assert "script-src 'none'" in web.build_content_policy()


def test_plotly_file_equals_the_npm_release() -> None:
    """Compare the digest of plotly.js-basic-dist-min 4.1.1, so that the file is never edited."""
    digest = hashlib.sha256(web.read_asset(web.PLOTLY).encode()).hexdigest()
    assert digest == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert "</script" not in web.read_asset(web.PLOTLY).lower()


def test_page_charts_have_the_colours_and_markers_of_figures() -> None:
    """Compare the light theme: colours of series by their place in the palette, and colours of phases."""
    theme, chart = web.read_asset(web.STYLE), web.read_asset("chart.js")
    light = dict(re.findall(r"--((?:series|phase)-[\w-]+): (?:light-dark\()?(#[0-9a-f]{6})", theme))
    assert [light[f"series-{i}"] for i in range(1, len(figure_style.COLOURS) + 1)] == [
        c.lower() for c in figure_style.COLOURS
    ]
    assert {name: light[f"phase-{name}"] for name in style.PHASE_COLOURS} == {
        name: colour.lower() for name, colour in style.PHASE_COLOURS.items()
    }
    for name, marks in (("SYMBOLS", figure_style.MARKERS), ("DASHES", figure_style.LINES)):
        (listed,) = re.findall(rf"const {name} = (\[.*\]);", chart)
        assert len(json.loads(listed)) == len(marks)


def test_equal_figures_give_identical_files(tmp_path: Path) -> None:
    """Check that SVG and PDF contain neither the time nor random names."""
    made = []
    for name in ("one", "other"):
        with figure_style.apply_style():
            figure = Figure((2, 2))
            figure.subplots().plot([1, 2], [2, 1], marker=figure_style.get_marker(1), color=figure_style.get_colour(8))
            made.append(figure_style.save_figure(figure, tmp_path / name, "png", "svg", "pdf"))
    assert [path.name for path in made[0]] == ["one.png", "one.svg", "one.pdf"]
    for one, other in zip(*made, strict=True):
        assert one.read_bytes() == other.read_bytes()
