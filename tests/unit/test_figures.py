"""Figures: legends match the drawn lines, and compared lines share a panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pandas as pd
import pytest
from matplotlib.figure import Figure

from dcpbench.imports import Overrides, import_files
from dcpbench.points.layout import Layout
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.metrics import PERCENTILES
from dcpbench.reports import dataframes, figures, overview, plots
from dcpbench.reports.style import Style
from dcpbench.show.figure_style import set_measured_ticks
from dcpbench.show.layouts import Degrees, get_colours
from tests.unit import engine_files_builder as files
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TP, DCP = Layout(4), Layout(4, 1, 4)
LONG = {"gpu_memory_utilization": 0.95, "max_num_batched_tokens": 2048}


def list_looks(figure: Figure) -> tuple[set[tuple[object, ...]], set[tuple[object, ...]]]:
    """Return (colour, dash, marker) of each line in the panels that has points, and of each entry of the legend."""
    shown = [line for ax in figure.axes for line in ax.get_lines() if line.get_marker() not in ("None", "_", "|", "")]
    handles = [one for one in figure.legends[0].legend_handles if one is not None]
    return tuple({(o.get_color(), str(o.get_linestyle()), o.get_marker()) for o in lines} for lines in (shown, handles))  # type: ignore[attr-defined, return-value]


def list_legend(figure: Figure) -> list[str]:
    return [" ".join(text.get_text().split()) for text in figure.legends[0].get_texts()]


@pytest.fixture
def ours_and_theirs(tmp_path: Path) -> dataframes.Frames:
    """Return a run of dcpbench and one of another engine under the same loads: two layouts each, one of them in both."""
    load = {"input_tokens": "8192", "output_tokens": "1024"}
    points = [serve.make_point(layout, n, load, model="deepseek-r1") for n in (8, 32) for layout in (TP, DCP)]
    ours = build.write_records(tmp_path / "ours", map(serve.make_served_record, points))
    rows = [files.make_inferencex_row(tp=4, conc=n, **dp) for n in (8, 32) for dp in ({}, {"dp_attention": "true"})]
    overrides = Overrides(model="deepseek-r1")
    import_files([files.write_file(tmp_path, *rows)], "inferencex", tmp_path / "theirs", overrides, force=False)
    return dataframes.load_frames([tmp_path / "theirs", ours])


@pytest.mark.long
def test_every_line_of_two_engines_has_its_own_legend_entry(ours_and_theirs: dataframes.Frames) -> None:
    """A dash stands for a run and its server at once."""
    assert len(set(ours_and_theirs.served["rest"])) == 1
    figure = figures.draw_throughput(ours_and_theirs.served, Style.from_points(ours_and_theirs.served), "title")
    drawn, legend = list_looks(figure)
    assert len(drawn) == 4
    assert drawn == legend
    assert all(name.endswith((", ours", ", theirs")) for name in list_legend(figure))


def test_long_server_names_differ_in_legends_and_alt_texts(tmp_path: Path) -> None:
    for seqs in (128, 256):
        files.write_sweep(tmp_path / "sweep", {**LONG, "max_num_seqs": seqs}, {"max_concurrency": 8}, runs=1)
        more = {**LONG, "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 4096, "max_num_seqs": seqs}
        files.write_sweep(tmp_path / "sweep", more, {"max_concurrency": 8}, runs=1)
    import_files([tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides(tp=8), force=False)
    found = dataframes.load_frames([tmp_path / "run"]).served
    legend = list_legend(figures.draw_throughput(found, Style.from_points(found), "title"))
    assert len(set(legend)) == len(legend) == 4
    assert all(name.endswith(("max_num_seqs=128", "max_num_seqs=256")) for name in legend)
    words = figures.format_alt("throughput", "title", found)
    assert all(f"max_num_seqs={n})" in words for n in (128, 256))


def test_points_of_one_layout_at_one_load_are_drawn_side_by_side(tmp_path: Path) -> None:
    """Three servers at 8 requests: one at the load, one at each side of it."""
    for seqs in (4, 8, 16):
        files.write_sweep(tmp_path / "sweep", {"max_num_seqs": seqs}, {"max_concurrency": 8}, runs=1)
    import_files([tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides(tp=8), force=False)
    found = dataframes.load_frames([tmp_path / "run"]).served
    (ax,) = figures.draw_throughput(found, Style.from_points(found), "title").axes
    at = [line.get_xdata()[0] for line in ax.get_lines() if line.get_marker() not in ("None", "_", "|")]  # type: ignore[index]
    assert sorted(at) == pytest.approx([7.6, 8.0, 8.4])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["8"]


def test_ratios_of_each_run_have_a_panel(tmp_path: Path) -> None:
    """A ratio is against another layout of the same run: one line for two runs would go up and down at each load."""
    points = [build.make_point(layout, concurrency=n) for layout in (TP, DCP) for n in (8, 32)]
    runs = [build.write_records(tmp_path / name, map(build.make_ok_record, points)) for name in ("monday", "tuesday")]
    read = dataframes.load_frames(runs)
    look = Style.from_points(read.points)
    rows = read.findings.against_others
    compared = figures.draw_overview(rows, look, "title", overview.select_rejected_for_memory(read))
    assert [" ".join(ax.get_title().split()) for ax in compared.axes] == [
        f"kimi-k2, run {run}, context 4,000" for run in ("monday", "tuesday")
    ]
    assert [ax.get_title() for ax in figures.draw_break_even(read.findings.ratios, look, "title").axes] == [
        "kimi-k2, run monday",
        "kimi-k2, run tuesday",
    ]
    for ax in compared.axes:
        lines = [line for line in ax.get_lines() if line.get_linestyle() != "None" and len(line.get_xdata()) > 2]  # type: ignore[arg-type]
        assert all(list(line.get_xdata()) == sorted(set(line.get_xdata())) for line in lines)  # type: ignore[arg-type]


def test_layout_rejected_at_every_load_is_named_in_its_colour(tmp_path: Path) -> None:
    """tp4·dp4 was rejected for memory at every load, so that no line of it is drawn."""
    ran = [build.make_ok_record(build.make_point(layout, concurrency=n)) for layout in (TP, DCP) for n in (8, 32)]
    read = dataframes.load_frames(
        [build.write_records(tmp_path / "run", [*ran, build.make_rejected_record(build.make_point(Layout(4, 4)))])]
    )
    rejected = overview.select_rejected_for_memory(read)
    figure = figures.draw_overview(read.findings.against_others, Style.from_points(read.points), "title", rejected)
    (named,) = (text for ax in figure.axes for text in ax.texts if "does not fit from" in text.get_text())
    assert named.get_text() == "tp4·dp4·ep4: does not fit from 8"
    assert named.get_color() == get_colours(Degrees(4, 4))[0]


def test_ratios_are_drawn_for_a_limited_number_of_runs(tmp_path: Path) -> None:
    """A figure has a row for each run."""
    points = [build.make_point(layout) for layout in (TP, DCP)]
    runs = [
        build.write_records(tmp_path / f"run-{n}", map(build.make_ok_record, points))
        for n in range(plots.MAX_LENGTHS + 3)
    ]
    found = plots._select_sides(dataframes.load_frames(runs).findings.against_others)
    assert found["run"].nunique() == plots.MAX_LENGTHS


def test_layouts_with_different_ep_share_a_colour_and_differ_in_dashes(tmp_path: Path) -> None:
    """A layout drawn with a single expert parallel degree has a solid line, as a layout without attention DP has."""
    points = [build.make_point(TP), *(build.make_point(Layout(4, dp=4), ep=ep) for ep in ("1", "tp"))]
    both = Style.from_points(
        dataframes.load_frames([build.write_records(tmp_path / "both", map(build.make_ok_record, points))]).points
    )
    one = Style.from_points(
        dataframes.load_frames([build.write_records(tmp_path / "one", map(build.make_ok_record, points[:2]))]).points
    )
    split, parallel = (both.get_look(f"tp4·dp4·ep{n}", "", both.runs[0]) for n in (1, 4))
    assert split["color"] == parallel["color"]
    assert (split["linestyle"], split["marker"]) != (parallel["linestyle"], parallel["marker"])
    assert (
        one.get_look("tp4·dp4·ep1", "", one.runs[0])["linestyle"] == one.get_look("tp4", "", one.runs[0])["linestyle"]
    )


def test_variants_of_a_layout_have_distinct_markers(tmp_path: Path) -> None:
    """Neighbours in the list of markers look similar when small, such as a triangle and a diamond."""
    changes_of_variants = {"exchange": "ag_rs"}, {"exchange": "a2a"}, {"exchange": "symm"}
    points = [build.make_point(DCP, **changes) for changes in changes_of_variants]
    found = dataframes.load_frames([build.write_records(tmp_path / "run", map(build.make_ok_record, points))]).points
    look = Style.from_points(found)
    markers = [look.get_look("tp4·dcp4", name, look.runs[0])["marker"] for name in ("ag_rs", "a2a", "symm")]
    assert markers == ["^", "P", "s"]


@pytest.mark.parametrize(("least", "most"), [(38, 42), (10, 130)])
def test_error_bars_end_at_the_interval(least: float, most: float, tmp_path: Path) -> None:
    """With seven steps the interval goes from the smallest to the largest, further on one side of the median than on
    the other.
    """
    metrics = compute_decode_metrics([least, 39, 39.5, 40, 40.5, 41, most], 8, 4)
    record = msgspec.structs.replace(
        build.make_ok_record(build.make_point(TP, concurrency=8), steps=1), metrics=metrics
    )
    points = dataframes.load_frames([build.write_records(tmp_path / "run", [record])]).points
    for draw, name in ((figures.draw_throughput, "output_tok_s"), (figures.draw_itl, "step_ms")):
        (ax,) = draw(points, Style.from_points(points), "title").axes
        ((ends,),) = (bar.get_segments() for bar in ax.collections)  # type: ignore[attr-defined]
        (row,) = points.to_dict("records")
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        assert low < row[name] < high
        assert ends[:, 1].tolist() == pytest.approx([low, high])


@pytest.mark.parametrize(
    ("samples", "highest"),
    [
        (("p90 p95 p99", "p90 p95 p99"), "p99"),
        (("p90 p95 p99", "p90 p95"), "p95"),
        (("p90 p95 p99", "p90"), "p90"),
        (("p90 p95", ""), "p95"),
        (("p90", ""), "p90"),
        (("", ""), ""),
    ],
)
def test_highest_percentile_of_all_points_is_drawn_else_of_some(samples: tuple[str, str], highest: str) -> None:
    """Points without a median, which are first here, are ignored."""
    rows = [
        {f"ttft_{p}_ms": 1.0 if p in ("p50", *percentiles.split()) else None for p in PERCENTILES}
        for percentiles in samples
    ]
    nothing = dict.fromkeys(rows[0])
    assert figures._find_tail_percentile(pd.DataFrame([nothing, *rows]), "ttft") == highest
    assert figures._find_tail_percentile(pd.DataFrame([nothing]), "ttft") == ""


def test_cpu_watermark_is_behind_marks_and_below_bars(tmp_path: Path) -> None:
    """The watermark is behind points, lines and error bars, and below the axis of bars, which may fill their panel."""
    points = dataframes.load_frames([build.write_records(tmp_path / "run", build.make_cpu_sweep())]).points
    look = Style.from_points(points)
    for draw in (figures.draw_throughput, figures.draw_itl, figures.draw_frontier):
        for ax in draw(points, look, "title").axes:
            (watermark,) = [text for text in ax.texts if "functional run" in text.get_text()]
            assert watermark.get_zorder() < min(o.get_zorder() for o in (*ax.lines, *ax.collections))
    for draw in (figures.draw_phases, figures.draw_capacity):
        for ax in draw(points, look, "title").axes:
            assert ax.get_xlabel().endswith("\nCPU: functional run, not performance")
            assert not [text for text in ax.texts if "functional run" in text.get_text()]


@pytest.mark.parametrize("mode", ["live", "replay"])
@pytest.mark.parametrize("draw", [figures.draw_throughput, figures.draw_ttft, figures.draw_frontier])
@pytest.mark.sample(3)
def test_legend_explains_hollow_marks_of_replayed_points(
    draw: Callable[..., Figure], mode: str, tmp_path: Path
) -> None:
    """Other legends do not mention hollow marks."""
    served = dataframes.load_frames([build.write_records(tmp_path / "run", serve.make_run())]).served
    points = served[served["mode"] == mode]
    figure = draw(points, Style.from_points(points), "title")
    hollow = {line.get_markerfacecolor() for ax in figure.axes for line in ax.get_lines() if line.get_marker() == "o"}
    assert ("white" in hollow) == (mode == "replay")
    assert ("hollow: replayed" in list_legend(figure)) == (mode == "replay")


def test_legend_of_replayed_ratios_explains_hollow_marks(tmp_path: Path) -> None:
    ratios = dataframes.load_frames([build.write_records(tmp_path / "run", serve.make_run())]).findings.ratios
    legends = {
        mode: list_legend(figures.draw_break_even(found, Style.from_points(found), "title"))
        for mode, found in ratios.groupby("mode")
    }
    assert {mode: "hollow: replayed" in legend for mode, legend in legends.items()} == {"live": False, "replay": True}


def test_progress_has_number_and_total_before_each_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.FigureWriter, "write_figure", lambda *_: None)
    messages: list[str] = []
    read = dataframes.load_frames([build.write_records(tmp_path / "run", serve.make_run())])
    pictures = plots.draw_all(read, tmp_path / "figures", watch=messages.append)
    assert messages == [f"figure {n} of {len(pictures)}: {one.title}" for n, one in enumerate(pictures, 1)]
    assert plots.draw_all(read, tmp_path / "none", drawn=False, watch=messages.append)
    assert len(messages) == len(pictures) > 1


def test_panel_titles_mark_the_name_of_the_run() -> None:
    """A run may have the same name as its model."""
    runs = ["deepseek-v3", "b"]
    labels = [f"run {name}" for name in runs]
    points = pd.DataFrame({"model": ["deepseek-v3", "deepseek-v3"], "run": runs, "run_label": labels})
    assert figures.get_sides(points).tolist() == ["deepseek-v3, run deepseek-v3", "deepseek-v3, run b"]
    assert figures.get_sides(points[:1]).tolist() == ["deepseek-v3"]


def test_break_even_distinguishes_exchanges_next_to_served_points_without_them(tmp_path: Path) -> None:
    decode = [build.make_ok_record(build.make_point(TP))]
    decode += [build.make_ok_record(build.make_point(DCP, exchange=name)) for name in ("ag_rs", "symm")]
    served = [serve.make_served_record(serve.make_point(layout, exchange="none")) for layout in (TP, DCP)]
    read = dataframes.load_frames([build.write_records(tmp_path / "run", [*decode, *served])])
    figure = figures.draw_break_even(read.findings.ratios.query("mode == 'decode'"), plots.assign_looks(read)[True], "")
    shown, legend = list_looks(figure)
    assert len(shown) == 2
    assert shown <= legend


def test_ticks_of_request_rates_keep_their_decimals() -> None:
    ax = Figure().subplots()
    set_measured_ticks(ax, [0.5, 2.5, 4])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0.5", "2.5", "4"]


def test_panel_without_a_comparison_states_that(tmp_path: Path) -> None:
    """At context 32,000 only kimi-k2 ran with two layouts."""
    ran = [("kimi-k2", 4000), ("kimi-k2", 32000), ("deepseek-v3", 4000)]
    found = [build.make_ok_record(build.make_point(layout, model=m, context=c)) for m, c in ran for layout in (TP, DCP)]
    read = dataframes.load_frames([build.write_records(tmp_path / "run", found)])
    rows = read.findings.against_others
    figure = figures.draw_overview(rows, Style.from_points(rows), "", overview.select_rejected_for_memory(read))
    empty = [ax for ax in figure.axes if any(text.get_text() == "fewer than two layouts" for text in ax.texts)]
    assert [ax.get_title().replace("\n", " ") for ax in empty] == ["deepseek-v3, context 32,000"]


@pytest.mark.parametrize(
    ("conditions", "titles"),
    [
        ([{"emulate": "H100"}, {"emulate": "H200"}], ["emulated on H100", "emulated on H200"]),
        ([{"mtp": 1, "acceptance": a} for a in ("0.5", "0.8")], ["acceptance 0.5", "acceptance 0.8"]),
        ([{}, {"mtp": 1, "acceptance": "0.8"}], ["", "mtp1 · acceptance 0.8"]),
        (
            [{"kv_dtype": kv} for kv in ("bf16", "fp8")],
            ["bfloat16 weights, bf16 KV", "bfloat16 weights, fp8 KV"],
        ),
    ],
    ids=["machine", "acceptance", "drafts", "precision"],
)
def test_overview_has_a_panel_for_each_condition(
    conditions: list[dict[str, object]], titles: list[str], tmp_path: Path
) -> None:
    """Otherwise a layout's line would join points that are not compared."""
    found = [
        build.make_ok_record(build.make_point(layout, concurrency=n, **changes))
        for changes in conditions
        for n in (8, 32)
        for layout in (TP, DCP)
    ]
    read = dataframes.load_frames([build.write_records(tmp_path / "run", found)])
    rows = read.findings.against_others
    figure = figures.draw_overview(rows, Style.from_points(rows), "", overview.select_rejected_for_memory(read))
    shown = [" ".join(ax.get_title().split()) for ax in figure.axes]
    assert shown == [" · ".join(filter(None, ("kimi-k2, context 4,000", title))) for title in titles]
