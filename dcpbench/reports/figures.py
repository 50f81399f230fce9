"""Draw figures with a line per layout and a panel per request length, and figures with a bar per layout.

A figure holds points of `decode`, live runs, or replays. Replays have hollow markers, and each panel's title names
them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import textwrap
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.points.layout import DEGREES
from dcpbench.points.names import CLOSED, GAMMA, REPLAY
from dcpbench.points.point import AXES
from dcpbench.records.metrics import METRIC, PERCENTILES
from dcpbench.records.record import SERVER_FLAG
from dcpbench.records.stats import find_lasting_start
from dcpbench.reports import findings, launch_bands, load_labels
from dcpbench.reports.floors import find_phases
from dcpbench.reports.style import FLOOR_LOOK, IDLE_COLOUR, PHASE_COLOURS, REST_COLOUR, Style, format_label
from dcpbench.show.figure_style import (
    GREY,
    LEGEND_LINE_INCHES,
    choose_columns,
    draw_legend_below,
    draw_watermark,
    draw_watermark_below,
    format_axis_label,
    get_colour,
    get_line_style,
    get_marker,
    make_hollow_entry,
    set_axis_labels,
    set_headline,
    set_measured_ticks,
    set_value_axis,
)
from dcpbench.show.layouts import UNKNOWN_DEGREES, compute_shade, get_colours
from dcpbench.show.numbers import format_integer, format_number
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    Panels = list[tuple[Axes, pd.DataFrame]]

WIDE_PANEL = (3.7, 3.0)
SINGLE_PANEL = (4.4, 3.0)
PHASES_TITLE_WIDTH = 28  # maximum number of characters per line of a title in the narrower panels of phases
TITLE_WIDTH = 42  # maximum number of characters per line of a panel's title
PALE = "#D0D0D0"
FRONTIER = (METRIC["tok_s_per_user"], METRIC["output_tok_s_per_gpu"])  # metrics on the axes of the frontier
MAX_CURVES = 8  # curves of a panel of break-even at most; with more, each layout and exchange has a panel
MAX_LOADS = 3  # concurrencies of the phase figure at most: of more the lowest, the middle and the highest
IDLE = "idle"  # name of the part of a step that belongs to no phase, drawn at the end of each bar
LABEL_WIDTH = 30  # maximum number of characters per line of a bar's label; a longer label takes two lines
ASIDE = 0.05  # horizontal offset between points of the same load, as a share of the load
LINE_OF_WORDS = 0.1  # height of a line of small text, as a share of the panel's height
LEGEND_WIDTH = 64  # maximum number of characters per line of a legend entry
MAX_NAME_CHARS = 160  # maximum number of characters of a name; names of a server's settings differ at their ends


@dataclasses.dataclass(frozen=True)
class LoadAxis:
    """Describe the quantity that makes a load heavier, for the x axis."""

    column: str
    against: str
    label: str


DECODE = LoadAxis("concurrency", "concurrency", "concurrency (requests in flight)")
AXIS_OF_ARRIVAL = {  # x axis of served requests by arrival; a trace is a single load, which no line shows
    CLOSED: LoadAxis("concurrency", "concurrency", "concurrency (closed loop)"),
    GAMMA: LoadAxis("load_request_rate", "request rate", "request rate (requests/s)"),
}


def draw_throughput(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Draw output tok/s of the whole layout, with 95 % intervals for `decode` and the range over repeats for served runs."""
    figure, drawn, load = _start_figure(points, title)
    for ax, panel in drawn:
        for line, look in _iterate_series(panel, style, load.column):
            columns = (load.column, "output_tok_s", "output_tok_s_low", "output_tok_s_high")
            _draw_intervals(ax, line, *columns, capsize=3, **look)
        set_measured_ticks(ax, panel[load.column])
        set_value_axis(ax, points["output_tok_s_high"], "y")
    set_axis_labels(figure, load.label, "output throughput (tok/s)")
    _draw_legend(figure, points, style, [])
    return figure


def _draw_latency(points: pd.DataFrame, style: Style, title: str, name: str, label: str) -> Figure:
    """Draw the median with its interval, and p99 or the highest percentile with enough samples as a dash."""
    figure, drawn, load = _start_figure(points, title)
    top = _find_tail_percentile(points, name)
    tail = f"{name}_{top or 'p99'}_ms"
    decode = load is DECODE
    median = "step_ms" if decode else f"{name}_p50_ms"
    dash = {"markersize": 9} if decode else {"markersize": 11, "markeredgewidth": 2}
    for ax, panel in drawn:
        for line, look in _iterate_series(panel, style, load.column):
            if decode:
                _draw_intervals(ax, line, load.column, median, f"{median}_low", f"{median}_high", **look)
            else:
                ax.plot(line[load.column], line[median], **look)
            ax.plot(line[load.column], line[tail].astype(float), "_", color=look["color"], **dash)
        set_measured_ticks(ax, panel[load.column])
        set_value_axis(ax, [*points[f"{median}_high" if decode else median].dropna(), *points[tail].dropna()], "y")
    set_axis_labels(figure, load.label, label)
    tail_label = top if top == "p99" else f"{top} (p99 lacks samples)"
    tail_look = {"color": GREY, "marker": "_", "linestyle": "", "markersize": dash["markersize"], "markeredgewidth": 2}
    handles = [_make_entry(tail_label, **tail_look)] if top else []
    _draw_legend(figure, points, style, handles)
    return figure


draw_ttft = functools.partial(_draw_latency, name="ttft", label="time to first token (ms)")
draw_itl = functools.partial(_draw_latency, name="itl", label="inter-token latency (ms)")


def _draw_intervals(ax: Axes, line: pd.DataFrame, x: str, y: str, low: str, high: str, **look: Any) -> None:  # noqa: ANN401 - as of errorbar
    """Draw a line with its intervals; the names are those of columns.

    The intervals are lists, as Matplotlib converts each Series to a float, and pandas 2 warns if it has one element.
    """
    ax.errorbar(line[x], line[y], yerr=[(line[y] - line[low]).to_list(), (line[high] - line[y]).to_list()], **look)


def _find_tail_percentile(points: pd.DataFrame, name: str) -> str:
    """Return the highest percentile of a latency that all points with a median have, else one that some have."""
    some = points[points[f"{name}_p50_ms"].notna()]
    known = {p: some[f"{name}_{p}_ms"].notna() for p in PERCENTILES[:0:-1]}
    every = [p for p, has in known.items() if len(some) and has.all()]
    return next(iter(every or [p for p, has in known.items() if has.any()]), "")


def draw_frontier(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Draw output tok/s/GPU against tok/s/user; a grey line joins the Pareto-optimal points, which are labelled with their load."""
    figure, drawn, load = _start_figure(points, title)
    for ax, panel in drawn:
        best = find_frontier(panel)
        ax.plot(best["tok_s_per_user"], best["output_tok_s_per_gpu"], color=PALE, linewidth=7, zorder=1)
        for line, look in _iterate_series(panel, style, load.column):
            ax.plot(line["tok_s_per_user"], line["output_tok_s_per_gpu"], **look)
        for _, point in best.drop_duplicates(load.column, keep="last").iterrows():
            at = (point["tok_s_per_user"], point["output_tok_s_per_gpu"])
            label = f"{point[load.column]:g}"
            ax.annotate(label, at, (6, 6), textcoords="offset points", fontsize=9, color="#444444")
        set_value_axis(ax, points["tok_s_per_user"].dropna(), "x")
        set_value_axis(ax, points["output_tok_s_per_gpu"].dropna(), "y")
    set_axis_labels(figure, *(f"{metric.label} ({metric.shown_unit})" for metric in FRONTIER))
    _draw_legend(figure, points, style, [_make_entry(f"best ({load.against})", color=PALE, linewidth=7)])
    return figure


def find_frontier(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points for which no other has both more tok/s/user and more tok/s/GPU, fastest user first."""
    ordered = points.dropna(subset=["tok_s_per_user", "output_tok_s_per_gpu"])
    ordered = ordered.sort_values(["tok_s_per_user", "output_tok_s_per_gpu"], ascending=False)
    before = ordered["output_tok_s_per_gpu"].cummax().shift(fill_value=-math.inf)
    return ordered[ordered["output_tok_s_per_gpu"] > before]


LINES = (  # kind, title and drawing function of each line figure; a `decode` point has no first token
    ("throughput", "Output throughput against {}", draw_throughput),
    ("ttft", "Time to first token against {}", draw_ttft),
    ("itl", "Inter-token latency against {}", draw_itl),
    ("frontier", "Throughput per GPU against speed per user", draw_frontier),
)
SUBJECTS = [kind for kind, _, _ in LINES]
EDGE = {  # text for each metric that a point on the frontier needs
    "tok_s_per_user": "a speed for one user (1000 / median TPOT)",
    "output_tok_s_per_gpu": "an output per GPU (an import with --tp says how many there were)",
}
NAMES = load_labels.OBJECTIVES | {"frontier": "Throughput per GPU against speed per user"}
"""Names of the figures from which some points can be missing."""


def find_missing_values(kind: str, points: pd.DataFrame) -> str:
    """Return which values a figure of LINES needs that no point has; empty if there is something to draw."""
    if kind in ("ttft", "itl"):
        columns = [f"{kind}_{p}_ms" for p in PERCENTILES]
        shown = points.reindex(columns=[*columns, *(["step_ms"] if kind == "itl" else [])])
        return "" if shown.notna().any(axis=None) else f"a median or percentile of {NAMES[kind]}"
    if kind != "frontier" or points[list(EDGE)].notna().all(axis=1).any():
        return ""
    return ", and none ".join(text for column, text in EDGE.items() if points[column].isna().all()) or "both"


def explain_not_drawn(served: pd.DataFrame, *kinds: str) -> list[str]:
    """Return a sentence for each of these figures, mode and model for which nothing can be drawn, with the reason."""
    groups = list(served.groupby(["mode", "model"], sort=False)) if len(served) else []
    sentences = []
    for (mode, model), points in groups:
        where = f" for {model}, {mode}" if len(groups) > 1 else ""
        sentences += [
            f"{NAMES[k]} is not drawn{where}: no point has {what}."
            for k in kinds
            if (what := find_missing_values(k, points))
        ]
    return sentences


def draw_break_even(ratios: pd.DataFrame, style: Style, title: str) -> Figure:
    """Draw output tok/s with DCP over output tok/s of the same layout without it.

    The x axis has concurrency or request length, whichever has more values; each value of the other has a curve, and
    each model a panel. If that makes too many curves, or curves of one colour that differ only in the exchange, each
    layout with its exchange has a panel.
    """
    from matplotlib.ticker import FuncFormatter

    x, other = _choose_axes(ratios)
    others = list(dict.fromkeys(ratios.sort_values(["input_typical", "concurrency"], kind="stable")[other]))
    order = ratios.sort_values(["tp", "dcp", "variant"], kind="stable")
    labels = list(dict.fromkeys(order["label"]))
    one = len(others) == 1
    same_colours = not one and ratios["layout"].nunique() < len(labels)
    split = len(labels) > 1 and (same_colours or len(labels) * len(others) > MAX_CURVES)
    names = get_sides(ratios)
    names = names.str.cat(ratios["label"], sep=": ") if split else names
    table = ratios.assign(cpu=False, panel=names)
    figure, drawn = _make_panels(table, title, by="panel", order="panel")
    for ax, panel in drawn:
        for (run, layout, variant, value), line in panel.sort_values(x).groupby(
            ["run", "layout", "variant", other], sort=False
        ):
            look = style.get_look(str(layout), str(variant), str(run))
            look |= {} if one else _make_curve_look(others.index(value))
            if split:
                look["color"] = compute_shade(style.find_degrees(str(layout)), _compute_share(others, value))
            look["markersize"] = 5
            _draw_intervals(ax, line, x, "ratio", "low", "high", capsize=3, **look, **_get_marker_look(panel, look))
        ax.axhline(1, color=GREY, linewidth=1)
        set_measured_ticks(ax, panel[x])
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    decode = bool((ratios["mode"] == "decode").all())
    length = "context (tokens)" if decode else "prompt (tokens)"
    loads = (DECODE if decode else AXIS_OF_ARRIVAL[CLOSED]).label
    set_axis_labels(figure, length if x == "input_typical" else loads, "with DCP / without")
    named = [format_label(f"concurrency {v}" if other == "concurrency" else v) for v in others]
    curves = []
    for i, (value, name) in enumerate(zip(others, named, strict=True)):
        colour = compute_shade(UNKNOWN_DEGREES, _compute_share(others, value)) if split else GREY
        curves.append(_make_entry(name, color=colour, **_make_curve_look(i)))
    pairs = order.drop_duplicates("label")[["layout", "variant"]].astype(str)
    looks = [style.get_look(layout, variant, style.runs[0]) for layout, variant in pairs.itertuples(index=False)]
    bare = {} if one else {"linestyle": "-", "marker": ""}
    layouts = [_make_entry(_format_legend_label(name), **look | bare) for name, look in zip(labels, looks, strict=True)]
    entries = curves if split else [*layouts, *([] if one and len(labels) > 1 else curves)]
    draw_legend_below(figure, [*entries, *_make_hollow_entries(ratios)])
    return figure


def get_sides(points: pd.DataFrame) -> pd.Series[str]:
    """Return the group within which each point is compared: its model, and its run if the model is in several."""
    names: pd.Series[str] = points["model"].astype(str)
    several = points.groupby("model")["run"].transform("nunique") > 1
    return names.mask(several, names.str.cat(points["run_label"].astype(str), sep=", "))


def _choose_axes(ratios: pd.DataFrame) -> tuple[str, str]:
    """Return the column for the x axis, and the column that has a curve for each of its values."""
    lengths, loads = ratios["rest"].nunique(), ratios["concurrency"].nunique()
    known = bool(ratios["input_typical"].notna().all())
    return ("input_typical", "concurrency") if known and lengths > loads else ("concurrency", "rest")


def _make_curve_look(index: int) -> dict[str, Any]:
    return {"linestyle": get_line_style(index), "marker": get_marker(index)}


def _compute_share(values: list[Any], value: object) -> float:
    return values.index(value) / max(len(values) - 1, 1)


def draw_overview(rows: pd.DataFrame, style: Style, title: str, lost: pd.DataFrame) -> Figure:
    """Draw each layout's output over that of the best other layout (Findings.against_others).

    Rows are models, with a row per run if there are several; columns are request lengths. In the shaded band no layout
    is clearly ahead. Hollow markers miss the SLO. `lost` holds the points rejected for memory; a vertical line marks
    the concurrency from which a layout with DCP is ahead of all layouts without it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows = _separate_conditions(rows)
    there = set(zip(rows["model"], rows["run"], strict=True))
    sides = [side for side in itertools.product(dict.fromkeys(rows["model"]), style.runs) if side in there]
    names = dict(zip(zip(rows["model"], rows["run"], strict=True), get_sides(rows), strict=True))
    short = load_labels.make_short_shapes(rows.sort_values(["input_typical", "rest"], kind="stable"))
    rests = list(short)
    wide = max(2.7, 6.0 / len(rests))  # inches of a panel, at 12.6 letters of its title each
    figure = Figure(figsize=(len(rests) * wide + 0.6, len(sides) * 2.3 + 1.2), layout="constrained")
    set_headline(figure, title)
    grid = figure.subplots(len(sides), len(rests), sharex=True, sharey=True, squeeze=False)
    band = launch_bands.find_largest(rows)
    for (i, (model, run)), (j, rest) in itertools.product(enumerate(sides), enumerate(rests)):
        ax = grid[i][j]
        panel = rows[(rows["model"] == model) & (rows["run"] == run) & (rows["rest"] == rest)]
        name = names[model, run]
        ax.axhspan(1 - band, 1 + band, color="#EEEEEE", zorder=0)
        ax.axhline(1, color=GREY, linewidth=1)
        ax.set_title(
            textwrap.fill(format_label(f"{name}, {short[rest]}", 2 * TITLE_WIDTH), int(12.6 * wide)), fontsize=9
        )
        for (layout, who), line in panel.groupby(["layout", "who"], sort=False):
            look = _get_look_of_any_run(style, str(layout), str(who), line)
            ordered = line.sort_values("concurrency")
            ax.plot(ordered["concurrency"], ordered["ratio"], linewidth=1.6, **look | {"marker": ""})
            for meets, some in ordered.groupby("meets"):
                face = look["color"] if meets else "white"
                signs = look | {"linestyle": "", "markerfacecolor": face, "markersize": 5}
                ax.plot(some["concurrency"], some["ratio"], **signs)
        paying = _find_first_ahead(panel)
        if paying is not None:
            ax.axvline(paying, color=GREY, linestyle=":", linewidth=1.4)
            left = paying**2 < rows["concurrency"].min() * rows["concurrency"].max()  # on an axis that is logarithmic
            ax.text(
                paying,
                0.99,
                f" DCP ahead from {format_integer(paying)} ",
                transform=ax.get_xaxis_transform(),
                ha="left" if left else "right",
                va="top",
                fontsize=8,
            )
        if panel.empty:
            ax.text(0.5, 0.55, "fewer than two layouts", transform=ax.transAxes, ha="center", fontsize=8, color=GREY)
        gone = _select_panel(lost, panel)
        for place, (layout, own) in enumerate(gone.groupby("layout", sort=False) if len(gone) else ()):
            color = get_colours(own["drawn_layout"].iloc[0].degrees)[0]
            text = f"{layout!s}: does not fit from {format_integer(own['concurrency'].min())}"
            ax.text(
                0.98, 0.03 + LINE_OF_WORDS * place, text, transform=ax.transAxes, ha="right", fontsize=8, color=color
            )
        set_measured_ticks(ax, rows["concurrency"])
        ax.tick_params(labelleft=j == 0, labelbottom=i == len(sides) - 1)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    for ax in grid[-1]:
        ax.set_xlabel(format_axis_label(DECODE.label, ax.get_xscale()), fontsize=8)
    bottom, top = grid[0][0].get_ylim()
    grid[0][0].set_ylim(bottom, top + LINE_OF_WORDS * (top - bottom))
    figure.supylabel("output relative to the best other layout", fontsize=10)
    _draw_overview_legend(figure, rows, style)
    return figure


def _separate_conditions(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with precision, drafts and emulated machine as part of their request length if a layout ran a load with several.

    Layouts are compared under equal conditions, so that each condition has a panel.
    """
    if not rows.duplicated(["model", "run", "rest", "who", "concurrency"]).any():
        return rows
    conditions: dict[Hashable, Callable[[Any], str]] = {"precision": str}
    conditions |= {axis.name: axis.format_value for axis in AXES if axis.name in ("mtp", "acceptance", "emulate")}
    several = [name for name in conditions if len(set(rows[name])) > 1]
    parts = [
        [str(row.pop("rest")), *(conditions[name](value) for name, value in row.items())]
        for row in rows[["rest", *several]].to_dict("records")
    ]
    rest = [load_labels.SEPARATOR.join(filter(None, own)) for own in parts]
    return rows.assign(rest=rest, rest_parts=pd.Series([(text,) for text in rest], rows.index))


def _draw_overview_legend(figure: Figure, rows: pd.DataFrame, style: Style) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for (layout, who), line in rows.sort_values([*DEGREES], kind="stable").groupby(["layout", "who"], sort=False):
        look = _get_look_of_any_run(style, str(layout), str(who), line)
        handles.append(_make_entry(_format_legend_label(str(who)), **look))
    if not rows["meets"].all():
        handles.append(make_hollow_entry("misses the SLO"))
    within = f"within {launch_bands.find_largest(rows) * 100:.2g} %"
    level = f"{within}, {launch_bands.IN_ONE_LAUNCH}" if launch_bands.has_single_launches(rows) else f"level ({within})"
    handles.append(Patch(color="#EEEEEE", label=level))
    draw_legend_below(figure, handles)


def _get_look_of_any_run(style: Style, layout: str, who: str, line: pd.DataFrame) -> dict[str, Any]:
    """Return the look of a line of the overview, which does not distinguish runs; `who` names its variant if that matters."""
    variant = "" if who == layout else str(line["variant"].iloc[0])
    return dataclasses.replace(style, runs=[""]).get_look(layout, variant, "")


def _find_first_ahead(panel: pd.DataFrame) -> float | None:
    """Return the lowest concurrency from which DCP pays (findings.compare_dcp_with_best)."""
    pays = panel.groupby("concurrency")["pays"].any()
    start = find_lasting_start(pays.tolist())
    return None if start is None else float(pays.index[start])


def _select_panel(lost: pd.DataFrame, panel: pd.DataFrame) -> pd.DataFrame:
    """Return the rejected points that belong to a panel."""
    if lost.empty or panel.empty:
        return lost.head(0)
    first = panel.iloc[0]
    same = [lost[name] == first[name] for name in ("model", "mode", "run")]
    own: pd.DataFrame = lost[functools.reduce(operator.and_, same)]
    column = "context" if first["mode"] == "decode" else "shape"
    found: pd.DataFrame = own[own[column] == first[column]]
    return found


def format_alt_overview(title: str, rows: pd.DataFrame) -> str:
    """Return the alternative text of the overview figure: its layouts and the largest lead."""
    top = rows.sort_values("ratio", kind="stable").iloc[-1]
    lead = f"{top['who']} over {top['rival']}, {top['model']}, {top['load']}"
    return f"{title}. Layouts: {', '.join(dict.fromkeys(rows['who']))}. Largest lead: {top['ratio']:.2f} times, {lead}."


def format_alt(subject: str, title: str, points: pd.DataFrame) -> str:
    """Return one sentence with the main result of a figure as alternative text; the tables have the full numbers."""
    known = points[points["output_tok_s"].notna()].sort_values("output_tok_s", kind="stable")
    top = known.iloc[-1] if len(known) else None
    text = f"{title}. Layouts: {format_layouts(points)}."
    if points["mode"].iloc[0] != "decode" and subject in SUBJECTS:
        text += f" Requests: {'; '.join(format_label(rest) for rest in dict.fromkeys(map(str, points['rest'])))}."
        if top is not None:
            text += f" Highest output: {top['label']} with {top['output_tok_s']:,.0f} tok/s under {top['load']}."
        return text + format_cpu_aside(points)
    text += f" Contexts: {', '.join(format_integer(c) for c in sorted(points['context'].unique()))} tokens."
    if subject in ("throughput", "frontier") and top is not None:
        text += (
            f" Highest: {top['label']} with {top['output_tok_s']:,.0f} tok/s at context {top['context']:,} "
            f"and concurrency {top['concurrency']}."
        )
    return text + format_cpu_aside(points)


def format_alt_break_even(title: str, ratios: pd.DataFrame) -> str:
    """Return the alternative text of the break-even figure."""
    low, high = ratios["ratio"].min(), ratios["ratio"].max()
    return f"{title}. Layouts: {format_layouts(ratios)}. From {low:.2f} to {high:.2f} times."


def format_layouts(points: pd.DataFrame) -> str:
    """Return the names of all layouts that are shown."""
    return ", ".join(format_label(label, MAX_NAME_CHARS) for label in dict.fromkeys(map(str, points["label"])))


def format_cpu_aside(points: pd.DataFrame) -> str:
    """Return the watermark's statement as alternative text."""
    return " CPU: functional run, not performance." if bool(points["cpu"].any()) else ""


def _start_figure(points: pd.DataFrame, title: str) -> tuple[Figure, Panels, LoadAxis]:
    """Create a figure with a panel for each request shape, and return it with the panels and the quantity of the x axis."""
    load = get_load_axis(points)
    return *_make_panels(points, title, by="rest", order="input_typical"), load


def get_load_axis(points: pd.DataFrame) -> LoadAxis:
    """Return the quantity that makes the load of these points heavier; all points must have one mode and arrival."""
    return DECODE if points["mode"].iloc[0] == "decode" else AXIS_OF_ARRIVAL[points["load_arrival"].iloc[0]]


def _make_panels(points: pd.DataFrame, title: str, *, by: str, order: str) -> tuple[Figure, Panels]:
    """Create a figure with one panel per value of the column `by`, ordered by the column `order`, on a shared y axis.

    The value is the panel's title; a replay's title names the replay.
    """
    replayed = " (replay)" if points["mode"].iloc[0] == REPLAY else ""
    values = list(dict.fromkeys(points.sort_values(order, kind="stable")[by]))
    columns = choose_columns(len(values))
    width, height = SINGLE_PANEL if columns == 1 else WIDE_PANEL
    figure, axes = make_grid(title, len(values), columns, (max(columns * width, 6.0), height), 1.0, sharey=True)
    found = []
    for ax, value in zip(axes, values, strict=True):
        panel = points[points[by] == value]
        ax.set_title(textwrap.fill(format_label(f"{value}{replayed}", 2 * TITLE_WIDTH), TITLE_WIDTH))
        ax.tick_params(labelleft=True)
        if bool(panel["cpu"].any()):
            draw_watermark(ax)
        found.append((ax, panel))
    return figure, found


def make_grid(
    title: str, panels: int, columns: int, size: tuple[float, float], margin: float, *, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a number of panels.

    `size` is the total width and the height of each row in inches; `margin` is additional height in inches.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(size[0], rows * size[1] + margin), layout="constrained")
    set_headline(figure, title)
    axes = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.remove()
    return figure, axes[:panels]


def _iterate_series(panel: pd.DataFrame, style: Style, along: str) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """Yield the points of each layout, variant and run with the style of their line.

    If there is only one load, points of the same layout are drawn side by side, because they would hide each other.
    """
    lines = list(panel.groupby(["layout", "variant", "run"], sort=False))
    alone = len(set(panel[along])) == 1
    for (layout, variant, run), line in lines:
        own = [key for key, _ in lines if key[0] == layout]
        place = own.index((layout, variant, run)) - (len(own) - 1) / 2
        aside = line.assign(**{along: line[along] * (1 + ASIDE * place)}) if alone else line
        look = style.get_look(str(layout), str(variant), str(run)) | {"markersize": 5, "linewidth": 1.6}
        yield aside.sort_values(along), look | _get_marker_look(panel, look)


def _make_hollow_entries(points: pd.DataFrame) -> list[Line2D]:
    """Return the legend entry for hollow markers; an empty list if there are none."""
    return [make_hollow_entry("replayed")] if points["mode"].iloc[0] == REPLAY else []


def _get_marker_look(panel: pd.DataFrame, look: dict[str, Any]) -> dict[str, Any]:
    """Return hollow markers for replays."""
    return {"markerfacecolor": "white" if panel["mode"].iloc[0] == REPLAY else look["color"]}


def _draw_legend(figure: Figure, points: pd.DataFrame, style: Style, more: list[Line2D]) -> None:
    """Draw the legend below the panels: each layout with its variant, markers of runs if there are several, and `more`.

    With several runs and several variants a dash style identifies a pair of run and variant, so that the legend lists
    each line.
    """
    named = [points[name].astype(str) for name in ("layout", "variant", "run")]
    shown = set(zip(*named[:2], strict=True))
    several = len(style.runs) > 1
    if several and len(set(named[1])) > 1:
        drawn = set(zip(*named, strict=True))
        lines = [(*line, run) for line in style.lines for run in style.runs if (*line, run) in drawn]
        handles = [
            _make_entry(
                _format_legend_label(f"{layout} {variant}".strip() + f", {run}"), **style.get_look(layout, variant, run)
            )
            for layout, variant, run in lines
        ]
    else:
        runs = [name for name in style.runs if several and name in set(named[2])]
        bare = {"marker": ""} if runs else {}
        handles = [
            _make_entry(
                _format_legend_label(f"{layout} {variant}".strip()),
                **style.get_look(layout, variant, style.runs[0]) | bare,
            )
            for layout, variant in style.lines
            if (layout, variant) in shown
        ]
        labels = dict(zip(points["run"], points["run_label"], strict=True))
        looks = {name: style.get_look("", "", name) | {"color": GREY} for name in runs}
        handles += [_make_entry(format_label(labels[name], 28), **look) for name, look in looks.items()]
    draw_legend_below(figure, [*handles, *more, *_make_hollow_entries(points)])


def _make_entry(label: str, **look: Any) -> Line2D:  # noqa: ANN401 - matplotlib's
    """Return a legend entry for a line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"markersize": 5} | look)


def _format_legend_label(name: str) -> str:
    return textwrap.fill(format_label(name, MAX_NAME_CHARS), LEGEND_WIDTH)


def compute_phases_ms(points: pd.DataFrame) -> pd.DataFrame:
    """Return the time of each phase in ms, in stacking order; small and unknown phases are summed as `rest`."""
    columns = find_phases(points)
    times = points[list(columns.values())].set_axis(list(columns), axis=1) / 1e3
    shown = [name for name in PHASE_COLOURS if name in columns and times[name].sum() > 0]
    rest = [name for name in columns if name not in PHASE_COLOURS]
    return times[shown].assign(rest=times[rest].sum(axis=1, min_count=1)) if rest else times[shown]


def compute_floors_ms(points: pd.DataFrame) -> pd.DataFrame:
    """Return the floors of the columns of `compute_phases_ms` in ms, without columns in which no point has a floor."""
    columns = find_phases(points)
    found = {}
    for name in compute_phases_ms(points):
        own = [n for n in columns if n not in PHASE_COLOURS] if name == "rest" else [name]
        held = [floor for n in own if (floor := f"floor_{n}_us") in points]
        if held:
            found[name] = points[held].sum(axis=1, min_count=1) / 1e3
    return pd.DataFrame(found, index=points.index).dropna(axis=1, how="all")


def has_phases(points: pd.DataFrame) -> bool:
    """Return True if any point was profiled."""
    return bool(points["idle_us"].notna().any()) and compute_phases_ms(points).sum().sum() > 0


def draw_phases(points: pd.DataFrame, style: Style, title: str) -> Figure:  # noqa: ARG001 - same call for all
    """Draw stacked bars of GPU time per step by phase, one panel per context, grouped by concurrency.

    A thin bar inside each part starts at its left end and is as long as the machine needs at least for it.
    """
    from matplotlib.patches import Patch

    contexts = sorted(set(zip(points["context"], points["routing"], strict=True)))
    loads = _select_some(sorted(points["concurrency"].unique()))
    labels = list(dict.fromkeys(points.sort_values([*DEGREES], kind="stable")["label"]))
    rows: list[tuple[int, str]] = [row for c in loads for row in ((c, ""), *((c, label) for label in labels))]
    columns = choose_columns(len(contexts))
    row_inches = 0.32 if any("\n" in _format_bar_name(label) for label in labels) else 0.2
    size = (max(2.9 * columns + 1.3, 6.0), row_inches * len(rows) + 0.9 + _get_height_below(points))
    figure, axes = make_grid(title, len(contexts), columns, size, 1.1)
    times, floors = compute_phases_ms(points), compute_floors_ms(points)
    for ax, (context, routing) in zip(axes, contexts, strict=True):
        panel = points[(points["context"] == context) & (points["routing"] == routing)]
        _draw_stack(ax, panel, rows, times, floors)
        title = f"context {load_labels.format_context(context, routing)}"
        ax.set_title(textwrap.fill(format_label(title), PHASES_TITLE_WIDTH))
        ax.set_xlabel("profiled step (ms)")
        if bool(panel["cpu"].any()):
            draw_watermark_below(ax)
    handles = [Patch(color=_get_phase_colour(str(name)), label=str(name).replace("_", " ")) for name in times]
    outside = "outside ranges" if bool(points["cpu"].all()) else "idle"
    handles.append(Patch(facecolor=IDLE_COLOUR, hatch="///", edgecolor="#999999", label=outside))
    if len(floors.columns):
        handles.append(Patch(**FLOOR_LOOK, label="floor"))
    draw_legend_below(figure, handles)
    return figure


def _get_phase_colour(phase: str) -> str:
    return IDLE_COLOUR if phase == IDLE else PHASE_COLOURS.get(phase, REST_COLOUR)


def _format_bar_name(label: str) -> str:
    """Format a bar's label on up to two lines."""
    return "\n".join(textwrap.wrap(format_label(label, 2 * LABEL_WIDTH), LABEL_WIDTH)[:2])


def _draw_stack(
    ax: Axes, panel: pd.DataFrame, rows: list[tuple[int, str]], times: pd.DataFrame, floors: pd.DataFrame
) -> None:
    """Draw one bar per row; a row without a label is the heading of its group."""
    bars = times.loc[panel.index].to_dict("records")
    # A table without columns has no records (pandas 2).
    least = floors.loc[panel.index].to_dict("records") or [{}] * len(panel)
    found = dict(
        zip(
            zip(panel["concurrency"], panel["label"], strict=True),
            zip(bars, least, panel["idle_us"], strict=True),
            strict=True,
        )
    )
    drawn: dict[str, list[tuple[int, float, float]]] = {name: [] for name in (*map(str, times), IDLE)}
    marked: list[tuple[int, float, float]] = []
    for y, key in enumerate(rows):
        bar, floor, idle_us = found.get(key, ({}, {}, None))
        if not key[1]:
            continue
        if idle_us is None or not idle_us >= 0:
            ax.text(0, y, " not profiled" if key in found else " did not run", va="center", fontsize=8, color="#777777")
            continue
        left = 0.0
        for name, ms in (*bar.items(), (IDLE, idle_us / 1e3)):
            if ms > 0 or name == IDLE:
                drawn[str(name)].append((y, ms, left))
                if floor.get(name, 0.0) > 0:
                    marked.append((y, floor[name], left))
                left += ms
    for name, parts in drawn.items():
        look = {"hatch": "///", "edgecolor": "#999999"} if name == IDLE else {}
        _draw_bars(ax, parts, height=0.8, color=_get_phase_colour(name), **look)
    _draw_bars(ax, marked, height=0.24, **FLOOR_LOOK)
    ax.set_yticks(
        range(len(rows)), [_format_bar_name(label) if label else f"concurrency {c}" for c, label in rows], fontsize=9
    )
    ax.set_ylim(len(rows) - 0.4, -0.6)
    for tick, (_, label) in zip(ax.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if label else "bold")
    ax.set_xlim(left=0)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0, labelleft=True)


def _get_height_below(points: pd.DataFrame) -> float:
    """Return the height in inches that `draw_watermark_below` adds to panels of bars."""
    return LEGEND_LINE_INCHES if bool(points["cpu"].any()) else 0.0


def _draw_bars(ax: Axes, parts: list[tuple[int, float, float]], **look: Any) -> None:  # noqa: ANN401 - matplotlib's
    """Draw parts of bars with the same look, each given as row, width and left end, in one call, which is much faster."""
    if parts:
        places, widths, lefts = zip(*parts, strict=True)
        ax.barh(places, widths, left=lefts, **look)


def draw_capacity(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Draw the tokens that each GiB of KV memory on each GPU holds and, where it is meaningful, tokens in all."""
    best = points.dropna(subset=["kv_tokens_per_gib"]).sort_values("kv_tokens_per_gib", ascending=False)
    best = best.assign(layout=best["instance"])
    best = best.drop_duplicates("layout").sort_values([*DEGREES], kind="stable")
    panels = [("kv_tokens_per_gib", "tokens held per GiB of KV memory on each GPU", best)]
    real = best[~best["kv_bounded_by"].isin(findings.NO_CAPACITY)]
    if len(real):
        panels.append(("kv_capacity_tokens", "tokens held in all", real))
    columns = len(panels)
    figure, axes = make_grid(
        title, columns, columns, (max(5.0 * columns, 6.4), 0.38 * len(best) + 0.9 + _get_height_below(best)), 0.6
    )
    for ax, (column, label, table) in zip(axes, panels, strict=True):
        values = table[column].astype(float).tolist()
        ax.barh(
            range(len(values)),
            values,
            color=[get_colours(style.find_degrees(name))[0] for name in table["layout"]],
            height=0.7,
        )
        for y, value in enumerate(values):
            ax.text(value, y, f" {format_integer(value)}  ({value / values[0]:.3g}×)", va="center", fontsize=9)
        ax.set_yticks(range(len(values)), [format_label(layout, 30) for layout in table["layout"]])
        ax.invert_yaxis()
        ax.set_xlim(0, max(values) * 1.5)
        ax.set_xticks([])
        ax.set_xlabel(f"{label} (× of {format_label(table['layout'].iloc[0])})")
        ax.grid(visible=False)
        ax.spines["bottom"].set_visible(False)
        if bool(table["cpu"].any()):
            draw_watermark_below(ax)
        ax.tick_params(axis="y", length=0)
    return figure


def _select_some(values: list[int]) -> list[int]:
    return values if len(values) <= MAX_LOADS else [values[0], values[len(values) // 2], values[-1]]


ENGINE_PANELS = (METRIC["output_tok_s"], METRIC["ttft_p50_ms"], METRIC["itl_p50_ms"], METRIC["kv_capacity_tokens"])
"""Metrics of the figure of engines, each in a panel."""
MAX_ENGINE_CELLS = 12  # maximum number of layouts × loads in the figure of engines; the table has all


def draw_engines(rows: pd.DataFrame, style: Style, title: str) -> Figure:  # noqa: ARG001 - same call for all
    """Draw a bar per engine at each layout and load (EngineComparison.rows of one model and mode), a panel per metric.

    KV capacities are left out if those of an engine are limited by a flag.
    """
    from matplotlib.patches import Patch

    runs = list(dict.fromkeys(rows.sort_values("place", kind="stable")["run"]))
    cells = list(dict.fromkeys(rows["cell"]))[:MAX_ENGINE_CELLS]
    limited = {"kv_capacity_tokens"} if rows["kv_bounded_by"].eq(SERVER_FLAG).any() else set()
    panels = [metric for metric in ENGINE_PANELS if metric.name not in limited and rows[metric.name].notna().any()]
    height = 0.17 * len(cells) * (len(runs) + 1) + 1.2
    columns = choose_columns(len(panels))
    figure, axes = make_grid(title, len(panels), columns, (columns * 4.2, height), 0.8)
    thickness = 0.85 / len(runs)
    for ax, metric in zip(axes, panels, strict=True):
        for place, run in enumerate(runs):
            own = rows[rows["run"] == run].set_index("cell")[metric.name].astype(float)
            known = [(i, own[cell]) for i, cell in enumerate(cells) if cell in own.index and own[cell] == own[cell]]
            ys = [i + (place - (len(runs) - 1) / 2) * thickness for i, _ in known]
            ax.barh(ys, [value for _, value in known], height=thickness, color=get_colour(place))
            for y, (_, value) in zip(ys, known, strict=True):
                ax.text(value, y, f" {format_number(value, 3)}", va="center", fontsize=8)
        ax.set_xlim(0, rows[metric.name].max() * (1.4 if metric.whole else 1.2))
        ax.set_xticks([])
        ax.spines["bottom"].set_visible(False)
        ax.set_title(f"{metric.label} ({metric.shown_unit})", fontsize=10)
        ax.set_yticks(range(len(cells)), _list_cell_names(rows, cells), fontsize=9)
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.tick_params(axis="y", length=0)
    draw_legend_below(
        figure, [Patch(color=get_colour(i), label=format_label(run, MAX_NAME_CHARS)) for i, run in enumerate(runs)]
    )
    return figure


def _list_cell_names(rows: pd.DataFrame, cells: list[int]) -> list[str]:
    """Return `tp2, 8 clients` for each cell, with the part of the request lengths that differs between them."""
    short = load_labels.make_short_shapes(rows)
    first = rows.drop_duplicates("cell").set_index("cell")
    several = len(short) > 1
    names = []
    for _, cell in first.loc[cells].iterrows():
        sent = "request" if cell["mode"] == "decode" else "client"
        load = format_count(int(cell["concurrency"]), sent) if cell["load_arrival"] == CLOSED else str(cell["arrival"])
        lines = [f"{cell['layout']}, {load}", short[str(cell["rest"])] if several else ""]
        names.append("\n".join(format_label(line, LABEL_WIDTH) for line in lines if line))
    return names


def format_alt_engines(title: str, rows: pd.DataFrame) -> str:
    """Return the alternative text of the figure of engines: output and latencies of each at the first layout and load."""
    first = rows[rows["cell"] == rows["cell"].iloc[0]]
    texts = [f"{r['run']} {r['output_tok_s']:,.0f} output tok/s" for _, r in first.iterrows()]
    where = f"{first['layout'].iloc[0]}, {first['load'].iloc[0]}"
    return f"{title}. At {where}: {', '.join(texts)}."
