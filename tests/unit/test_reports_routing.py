"""Reports of records with several distributions of experts: comparisons and the figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.reports import dataframes, figures, plots, routing_figure, sections
from dcpbench.reports.style import Style
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

FILE = "runs/counts.json#0123abcd"
STEPS = {"": (60.0, 54.0, 0.64), "zipf:1": (40.0, 41.0, 0.39), FILE: (48.0, 46.0, 0.5)}
"""For each routing, ms of a step of tp4 and of tp4·dp4·ep4, and the share of experts hit."""


def step(layout: Layout, routing: str, ms: float, hit: float) -> Record:
    record = build.make_ok_record(build.make_point(layout, concurrency=32, routing=routing), median_ms=ms, noise=0.001)
    assert record.conditions is not None
    return msgspec.structs.replace(record, conditions=msgspec.structs.replace(record.conditions, experts_hit=hit))


@pytest.fixture
def skewed(tmp_path: Path) -> dataframes.Frames:
    """Return frames of two layouts under one load with three distributions, and a third layout with one."""
    records = [
        step(layout, routing, ms, hit)
        for routing, (tp, dp, hit) in STEPS.items()
        for layout, ms in ((Layout(4), tp), (Layout(4, 4), dp))
    ]
    return dataframes.load_frames(
        [build.write_records(tmp_path / "run", [*records, step(Layout(4, 1, 4), "", 63.0, 0.64)])]
    )


def test_layouts_are_compared_only_under_the_same_routing(skewed: dataframes.Frames) -> None:
    """Attention DP is ahead of the best other layout with even routing and with that of the file, and behind with
    zipf:1.
    """
    found = skewed.findings.against_others
    ratios = {(r["routing"], r["layout"]): r["ratio"] for r in found.to_dict("records") if r["dp"] > 1}
    assert {routing: ratio > 1 for (routing, _), ratio in ratios.items()} == {"": True, "zipf:1": False, FILE: True}
    assert set(skewed.points["rest"]) == {
        f"context 4,000{more}" for more in ("", " · zipf:1 routing", " · counts.json#0123abcd routing")
    }
    assert set(skewed.points["label"]) == {"tp4", "tp4·dcp4", "tp4·dp4·ep4"}


def test_figure_orders_routings_by_the_experts_hit(skewed: dataframes.Frames) -> None:
    """The order is even routing, that of the file, then zipf:1; the layout with only one routing is not drawn."""
    rows = routing_figure.select_skewed(skewed.points)
    figure = routing_figure.draw_routings(rows, Style.from_points(skewed.points), "title")
    (ax,) = figure.axes
    assert ax.get_title() == "32 × 4,000 tokens"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["even", "counts.json", "zipf:1"]
    *lines, fastest = [list(line.get_ydata()) for line in ax.get_lines()]  # type: ignore[arg-type]
    assert lines == [pytest.approx(expected, rel=0.01) for expected in ([60, 48, 40], [54, 46, 41])]
    assert fastest == pytest.approx([54, 46, 40], rel=0.01)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["tp4", "tp4·dp4·ep4", "fastest"]


def test_alternative_text_names_the_fastest_layout_of_each_routing(skewed: dataframes.Frames) -> None:
    rows = routing_figure.select_skewed(skewed.points)
    assert routing_figure.format_alt_routings("Steps", rows).startswith(
        "Steps. Fastest at 32 × 4,000 tokens: tp4·dp4·ep4 with even (54"
    )


def test_report_has_the_figure_only_with_several_routings(skewed: dataframes.Frames, tmp_path: Path) -> None:
    pictures = plots.draw_all(skewed, tmp_path, drawn=False)
    assert [p.png.name for p in pictures if p.subject == plots.ROUTINGS] == ["routings-kimi-k2.png"]
    (time,) = [s for s in sections.build_sections(skewed, pictures) if s.slug == "time"]
    assert "routings" in [picture.subject for picture in time.pictures]
    alone = dataframes.load_frames([build.write_records(tmp_path / "even", [step(Layout(4), "", 60.0, 0.64)])])
    assert plots.ROUTINGS not in {p.subject for p in plots.draw_all(alone, tmp_path, drawn=False)}
    assert routing_figure.select_skewed(alone.others).empty


def test_bars_of_phases_have_a_panel_for_each_routing(skewed: dataframes.Frames) -> None:
    axes = figures.draw_phases(skewed.points, Style.from_points(skewed.points), "title").axes
    assert [ax.get_title().replace("\n", " ") for ax in axes] == [
        "context 4,000",
        "context 4,000 · counts.json#0123abcd routing",
        "context 4,000 · zipf:1 routing",
    ]
