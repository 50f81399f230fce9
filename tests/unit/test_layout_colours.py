"""Colours of layouts: one colour per layout in all figures and pages; dashes and markers distinguish its lines."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dcpbench.imports import Overrides, import_files
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout, list_valid_layouts
from dcpbench.reports import dataframes, figures, plots
from dcpbench.reports.page.points import build_page_data
from dcpbench.reports.style import Style
from dcpbench.show import figure_style as show_figures
from dcpbench.show.layouts import UNKNOWN_DEGREES, Degrees, compute_shade, find_marker_index, get_colours
from tests.unit import engine_files_builder as files
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve

if TYPE_CHECKING:
    from pathlib import Path


TP, DCP2, DCP4, DP4 = Layout(4), Layout(4, 1, 2), Layout(4, 1, 4), Layout(4, 4)
APART, ALONE = 0.03, 0.05
"""Minimum distance in OKLab of two colours with different markers, and with the same; 0.02 is just visible."""


def decode(folder: Path) -> dataframes.Frames:
    """Return frames of four layouts, one of them with two exchanges."""
    points = [build.make_point(layout, concurrency=n) for layout in (TP, DCP2, DCP4, DP4) for n in (8, 32)]
    other = [build.make_point(DCP4, concurrency=n, exchange="symm") for n in (8, 32)]
    return dataframes.load_frames([build.write_records(folder, map(build.make_ok_record, (*points, *other)))])


def served(folder: Path) -> dataframes.Frames:
    """Return frames without tp4·dcp2, in another order."""
    points = [serve.make_point(layout, n) for layout in (DP4, DCP4, TP) for n in (8, 32)]
    return dataframes.load_frames([build.write_records(folder, map(serve.make_served_record, points))])


def imported(folder: Path) -> dataframes.Frames:
    """Return frames of two servers of tp4, one of tp4·dp4, and one of tp8."""
    servers = ({"tp": 4}, {"tp": 4, "hw": "b200"}, {"tp": 4, "dp_attention": "true"}, {"tp": 8})
    rows = [files.make_inferencex_row(conc=n, **server) for n in (4, 8) for server in servers]
    folder.mkdir()
    import_files([files.write_file(folder, *rows)], "inferencex", folder / "run", Overrides())
    return dataframes.load_frames([folder / "run"])


def collect_figure_colours(figure: Figure) -> dict[str, set[str]]:
    """Return the colours in the legend by the layout of the label; each of them must be drawn in a panel."""
    drawn = {line.get_color() for ax in figure.axes for line in ax.get_lines()}
    found: dict[str, set[str]] = {}
    for handle in figure.legends[0].legend_handles:
        assert handle is not None
        name = str(handle.get_label()).split(" ")[0]
        if name.startswith("tp"):
            found.setdefault(name, set()).add(handle.get_color())  # type: ignore[attr-defined]
    assert {colour for colours in found.values() for colour in colours} <= drawn
    return found


def collect_page_colours(read: dataframes.Frames) -> dict[str, set[str]]:
    """Return the light and dark colours of the page's series by the layouts of their points."""
    data = build_page_data(read)
    found: dict[str, set[str]] = {}
    for layout, series in zip(data["columns"]["layout"], data["columns"]["series"], strict=True):
        found.setdefault(layout, set()).add(data["series"][series]["colour"])
    return found


@pytest.mark.parametrize("make_frames", [decode, served, imported], ids=lambda make_frames: make_frames.__name__)
def test_layout_has_the_same_colour_in_figures_and_page(make_frames: object, tmp_path: Path) -> None:
    read = make_frames(tmp_path / "run")  # type: ignore[operator]
    points = read.points if len(read.points) else read.served
    style, names = Style.from_points(points), set(points["layout"])
    for draw in (figures.draw_throughput, figures.draw_itl, figures.draw_frontier):
        assert collect_figure_colours(draw(points, style, "title")) == {
            name: {get_colours(style.find_degrees(name))[0]} for name in names
        }
    assert collect_page_colours(read) == {
        name: {"light-dark({}, {})".format(*get_colours(style.find_degrees(name)))} for name in names
    }
    looks = [(one["colour"], one["dash"], one["symbol"]) for one in build_page_data(read)["series"]]
    assert len(set(looks)) == len(looks) == len(style.lines), "no two lines look the same"


def test_ratio_of_dcp_has_the_colour_of_its_layout(tmp_path: Path) -> None:
    """Exchanges of a layout have separate panels, with shades of its hue for contexts."""
    read = decode(tmp_path / "run")
    style, ratios = Style.from_points(read.points), read.findings.ratios
    figure = figures.draw_break_even(ratios, style, "title")
    assert collect_figure_colours(figure) == {
        str(layout): {get_colours(degrees_of(layout))[0]} for layout in (DCP2, DCP4)
    }
    grid = [{"context": context, "concurrency": n} for context in (4000, 64000) for n in (8, 32)]
    variants = [{"exchange": name} | load for name in ("ag_rs", "symm") for load in grid]
    points = [
        *(build.make_point(TP, **load) for load in grid),
        *(build.make_point(DCP4, **changes) for changes in variants),
    ]
    more = dataframes.load_frames([build.write_records(tmp_path / "more", map(build.make_ok_record, points))])
    split = figures.draw_break_even(more.findings.ratios, Style.from_points(more.points), "title")
    assert [ax.get_title() for ax in split.axes] == [f"kimi-k2: tp4·dcp4 ({name})" for name in ("ag_rs", "symm")]
    for ax in split.axes:
        drawn = {line.get_color() for line in ax.get_lines() if line.get_marker() not in ("_", "|")}
        assert {compute_shade(degrees_of(DCP4), 0), compute_shade(degrees_of(DCP4), 1)} <= drawn


def test_bars_of_kv_capacity_have_the_colours_of_layouts(tmp_path: Path) -> None:
    read = decode(tmp_path / "run")
    style = Style.from_points(read.points)
    ax = figures.draw_capacity(read.points, style, "title").axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    shown = [tuple(round(255 * part) for part in bar.get_facecolor()[:3]) for bar in ax.patches]  # type: ignore[attr-defined]
    assert shown == [tuple(bytes.fromhex(get_colours(style.find_degrees(name))[0][1:])) for name in names]


@pytest.mark.parametrize("gpus", [(4,), (8,), (16,), (2, 4, 8), (4, 8, 16)], ids=str)
def test_layouts_of_a_report_differ_in_colour_or_marker(gpus: tuple[int, ...]) -> None:
    """Colours are compared on light and on dark; layouts with similar colours have different markers."""
    layouts = [degrees_of(layout) for tp in gpus for layout in list_valid_layouts(load_shape("deepseek-v3"), tp)]
    for one, other in itertools.combinations(layouts, 2):
        differ = find_marker_index(one) != find_marker_index(other)
        for theme in (0, 1):
            far = math.dist(convert_to_oklab(get_colours(one)[theme]), convert_to_oklab(get_colours(other)[theme]))
            assert far > (APART if differ else ALONE), (one, other)


def test_unknown_degrees_are_grey_and_any_degrees_have_a_colour() -> None:
    assert len({get_colours(UNKNOWN_DEGREES)[0][i : i + 2] for i in (1, 3, 5)}) == 1
    for degrees in (Degrees(1), Degrees(3, 3), Degrees(6, 2, 3), Degrees(256, 64, 4), Degrees(128, 1, 128)):
        assert all(len(colour) == 7 for colour in (*get_colours(degrees), compute_shade(degrees, 0)))
    assert get_colours(degrees_of(DCP4)) != get_colours(degrees_of(TP))


def degrees_of(layout: Layout) -> Degrees:
    """Return the degrees by which a layout is drawn."""
    return Degrees(layout.tp, layout.dp, layout.dcp)


def convert_to_oklab(colour: str) -> tuple[float, float, float]:
    """Convert sRGB to OKLab, the inverse of show/layouts.py."""
    parts = [byte / 255 for byte in bytes.fromhex(colour[1:])]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    long, medium, short = (
        math.cbrt(v)
        for v in (
            0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
            0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
            0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
        )
    )
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_single_curve_of_a_figure_is_labelled_with_its_load(tmp_path: Path) -> None:
    """The x axis has the context. Several layouts are labelled without the load."""

    def list_legend(*layouts: Layout) -> list[str]:
        grid = [(layout, context) for layout in (TP, *layouts) for context in (4000, 64000)]
        run = tmp_path / str(len(layouts))
        points = [
            build.make_ok_record(build.make_point(layout, context=context, concurrency=8)) for layout, context in grid
        ]
        read = dataframes.load_frames([build.write_records(run, points)])
        (found,) = figures.draw_break_even(read.findings.ratios, Style.from_points(read.points), "title").legends
        return [text.get_text() for text in found.get_texts()]

    assert list_legend(DCP4, Layout(4, 1, 2)) == ["tp4·dcp2", "tp4·dcp4"]
    assert list_legend(DCP4) == ["tp4·dcp4", "concurrency 8"]


def test_short_phase_has_a_bar() -> None:
    """Attention takes 0.4 ms in all; a phase without time has no bar, and an unknown phase belongs to the rest."""
    table = pd.DataFrame(
        {"phase_attention_us": [300.0, 100.0], "phase_moe_us": [0.0, 0.0], "phase_strange_us": [5.0, None]}
    )
    found = figures.compute_phases_ms(table)
    assert found.columns.tolist() == ["attention", "rest"]
    assert found["attention"].tolist() == [0.3, 0.1]
    assert found["rest"].tolist()[0] == 0.005


@pytest.mark.parametrize(
    "values",
    [
        [8, 32, 48],
        [512, 576, 640, 768, 896, 1024, 1792, 1920, 2048],
        [4_000, 16_000, 30_000, 32_000, 33_000, 128_000],
        list(range(1, 40)),
        [1_000_000, 1_000_001, 1_000_002],
        [5],
    ],
)
def test_ticks_are_measured_values_with_labels_that_do_not_overlap(values: list[int]) -> None:
    """The largest value always has a tick."""
    figure = Figure(figsize=(3.4, 2.5), dpi=100)
    ax = figure.add_subplot()
    ax.plot(values, values, "o")
    show_figures.set_measured_ticks(ax, map(float, values))
    ticks = ax.get_xticks().tolist()
    assert set(ticks) <= set(values)
    assert ticks[-1] == values[-1]
    FigureCanvasAgg(figure).draw()
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize(("names", "extra_lines"), [(4, 0), (5, 1), (7, 3)])
def test_figure_grows_with_each_legend_line_after_the_fourth(names: int, extra_lines: int) -> None:
    """Each name fills a line."""
    figure = Figure(figsize=(4.0, 3.0))
    show_figures.draw_legend_below(figure, [Line2D([], [], label="x" * 60) for _ in range(names)])
    assert figure.get_figheight() == pytest.approx(3.0 + 0.2 * extra_lines)


@pytest.mark.parametrize(("runs", "name"), [(["a"], "phases-kimi-k2"), (["a", "b"], "phases-kimi-k2-b")])
def test_file_name_of_a_figure_contains_the_run_if_there_are_several(
    runs: list[str], name: str, tmp_path: Path
) -> None:
    studio = plots.FigureWriter(tmp_path, {True: Style([("tp4", "")], runs)}, drawn=False)
    points = pd.DataFrame({"model": ["kimi-k2"], "run": [runs[-1]], "load_arrival": ["closed"]})
    assert studio._make_name(plots.PHASES, "", points) == name
