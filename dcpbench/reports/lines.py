"""Figures with one line per layout and one panel per context or shape of requests: throughput, latency, frontier."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dcpbench.points.names import CLOSED, GAMMA, REPLAY
from dcpbench.records.metrics import METRIC, PERCENTILES
from dcpbench.reports.style import (
    Style,
    columns_for,
    headline,
    legend_below,
    measured_ticks,
    plain,
    value_axis,
    watermark,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from matplotlib.axes import Axes

    from dcpbench.records.metrics import Metric

WIDE_PANEL = (3.7, 3.0)
GREY = "#555555"
FRONTIER = (METRIC["tok_s_per_user"], METRIC["output_tok_s_per_gpu"])
SINGLE_PANEL = (4.4, 3.0)
TITLE_WIDTH = 42
"""Characters of a line above a panel."""


@dataclasses.dataclass(frozen=True)
class Along:
    """What makes a load heavier."""

    column: str
    against: str
    label: str


ALONG = {
    CLOSED: Along("concurrency", "concurrency", "concurrency (closed loop)"),
    GAMMA: Along("load_request_rate", "request rate", "request rate (requests/s)"),
}
"""By arrival. A trace has one load, which no line can show."""
IN_STEPS = Along("concurrency", "concurrency", "concurrency (requests in flight)")
"""Of `decode`."""


def start(points: pd.DataFrame, title: str) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]], Along]:
    """A panel for each context of `decode` or each shape of requests, and what its x axis shows."""
    if bool((points["mode"] == "decode").all()):
        return *panels(points, title), IN_STEPS
    figure, drawn = panels(points, title, by="rest", form=said("{}", points), order="input_typical")
    return figure, drawn, ALONG[points["load_arrival"].iloc[0]]


def said(form: str, points: pd.DataFrame) -> str:
    """A panel's title, which says of a replay that it is one."""
    return f"{form} (replay)" if points["mode"].iloc[0] == REPLAY else form


def axis_label(metric: Metric) -> str:
    """`speed for one user (tok/s/user)`."""
    return f"{metric.label} ({metric.shown_unit})"


def draw_throughput(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Output tok/s of the whole layout against load, with 95 % intervals; of served runs bars reach over the repeats.

    Of these it is that of the whole run, ramp and drain included.
    """
    figure, drawn, along = start(points, title)
    for ax, panel in drawn:
        for line, look in series(panel, style, along.column):
            low, high = (
                line["output_tok_s"] - line["output_tok_s_low"],
                line["output_tok_s_high"] - line["output_tok_s"],
            )
            ax.errorbar(line[along.column], line["output_tok_s"], yerr=[low, high], capsize=3, **look)
        measured_ticks(ax, panel[along.column])
        value_axis(ax, points["output_tok_s_high"].dropna(), "y")
    axis_labels(figure, along.label, "output throughput (tok/s)")
    legend(figure, points, style, [])
    return figure


def draw_itl(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Median inter-token latency with its 95 % interval; p99 as a dash, or the highest percentile that has samples."""
    figure, drawn = panels(points, title)
    top = tail_percentile(points, "itl")
    tail = f"itl_{top or 'p99'}_ms"
    for ax, panel in drawn:
        for line, look in series(panel, style):
            low, high = line["step_ms"] - line["step_ms_low"], line["step_ms_high"] - line["step_ms"]
            ax.errorbar(line["concurrency"], line["step_ms"], yerr=[low, high], **look)
            ax.plot(line["concurrency"], line[tail].astype(float), "_", color=look["color"], markersize=9)
        measured_ticks(ax, panel["concurrency"])
        value_axis(ax, [*points["step_ms_high"].dropna(), *points[tail].dropna()], "y")
    axis_labels(figure, "concurrency (requests in flight)", "inter-token latency (ms)")
    legend(figure, points, style, tail_legend(top, 9))
    return figure


def tail_percentile(points: pd.DataFrame, name: str) -> str:
    """The highest percentile of a latency that all points have that have a median, else one that some have, else ''."""
    some = points[points[f"{name}_p50_ms"].notna()]
    known = {p: some[f"{name}_{p}_ms"].notna() for p in PERCENTILES[:0:-1]}
    return next((p for p, has in known.items() if len(some) and has.all()), "") or next(
        (p for p, has in known.items() if has.any()), ""
    )


def tail_legend(percentile: str, size: float) -> list[Line2D]:
    """A dash for this percentile, which says that p99 lacks samples where it is another."""
    if not percentile:
        return []
    label = percentile if percentile == "p99" else f"{percentile} (p99 lacks samples)"
    return [Line2D([], [], color=GREY, marker="_", linestyle="", markersize=size, markeredgewidth=2, label=label)]


def draw_frontier(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Output tok/s/GPU against tok/s/user; grey joins the points that no other beats in both, each with its load."""
    figure, drawn, along = start(points, title)
    x, y = FRONTIER
    for ax, panel in drawn:
        best = frontier(panel)
        ax.plot(best[x.name], best[y.name], color="#D0D0D0", linewidth=7, zorder=1)
        for line, look in series(panel, style, along.column):
            ax.plot(line[x.name], line[y.name], **look)
        for _, point in best.drop_duplicates(along.column, keep="last").iterrows():
            load, at = f"{point[along.column]:g}", (point[x.name], point[y.name])
            ax.annotate(load, at, (6, 6), textcoords="offset points", fontsize=9, color="#444444")
        value_axis(ax, points[x.name].dropna(), "x")
        value_axis(ax, points[y.name].dropna(), "y")
    axis_labels(figure, axis_label(x), axis_label(y))
    legend(figure, points, style, [Line2D([], [], color="#D0D0D0", linewidth=7, label=f"best ({along.against})")])
    return figure


def frontier(points: pd.DataFrame) -> pd.DataFrame:
    """Points for which no other has both more tok/s/user and more tok/s/GPU, fastest user first."""
    ordered = points.dropna(subset=["tok_s_per_user", "output_tok_s_per_gpu"])
    ordered = ordered.sort_values(["tok_s_per_user", "output_tok_s_per_gpu"], ascending=False)
    before = ordered["output_tok_s_per_gpu"].cummax().shift(fill_value=-math.inf)
    return ordered[ordered["output_tok_s_per_gpu"] > before]


def panels(
    points: pd.DataFrame,
    title: str,
    *,
    by: str = "context",
    form: str = "context {:,} tokens",
    order: str = "",
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A figure with one panel per value of the column `by`, on shared axes so that panels compare.

    In the order of these values, or of those that the column `order` has.
    """
    values = list(dict.fromkeys(points.sort_values(order or by, kind="stable")[by]))
    columns = columns_for(len(values))
    rows = math.ceil(len(values) / columns)
    width, height = SINGLE_PANEL if columns == 1 else WIDE_PANEL
    size = (max(columns * width, 6.0), rows * height + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    figure.set_layout_engine("constrained", hspace=0.03)
    headline(figure, title)
    axes = figure.subplots(rows, columns, sharex=False, sharey=True, squeeze=False).flat
    found = []
    for ax, value in zip(axes, values, strict=False):
        panel = points[points[by] == value]
        ax.set_title(textwrap.fill(plain(form.format(value), 2 * TITLE_WIDTH), TITLE_WIDTH))
        ax.tick_params(labelleft=True)
        if bool(panel["cpu"].any()):
            watermark(ax)
        found.append((ax, panel))
    for ax in list(figure.axes)[len(values) :]:
        ax.remove()
    return figure, found


def axis_labels(figure: Figure, x: str, y: str) -> None:
    """Label the x axis of every panel and the y axis of the first in each row."""
    for ax in figure.axes:
        ax.set_xlabel(_scaled(x, ax.get_xscale()))
        spec = ax.get_subplotspec()
        if spec is None or spec.is_first_col():
            ax.set_ylabel(_scaled(y, ax.get_yscale()))


def _scaled(label: str, scale: str) -> str:
    """The label, and in its brackets that the axis is logarithmic where it is."""
    return label.removesuffix(")") + ", log scale)" if scale == "log" else label


def series(
    panel: pd.DataFrame, style: Style, along: str = "concurrency"
) -> Iterator[tuple[pd.DataFrame, dict[str, object]]]:
    """The points of each layout, variant and run with the look of their line."""
    for (layout, variant, run), line in panel.groupby(["layout", "variant", "run"], sort=False):
        look: dict[str, object] = {
            "color": style.colour(str(layout), str(variant)),
            "linestyle": style.line(str(variant)),
            "marker": style.marker(str(layout), str(run), str(variant)),
            "markersize": 5,
            "linewidth": 1.6,
            **marked(panel, style.colour(str(layout), str(variant))),
        }
        yield line.sort_values(along), look


def marked(panel: pd.DataFrame, colour: str) -> dict[str, object]:
    """Hollow markers for replays."""
    return {"markerfacecolor": "white" if panel["mode"].iloc[0] == REPLAY else colour}


def legend(figure: Figure, points: pd.DataFrame, style: Style, more: list[Line2D]) -> None:
    """Below the panels: colours for layouts, lines for variants, markers for runs, whichever there are."""
    layouts, variants, runs = (
        [name for name in names if name in set(points[column])]
        for names, column in ((style.layouts, "layout"), (style.variants, "variant"), (style.runs, "run"))
    )
    several = len(style.runs) > 1
    handles = []
    for layout, variant in (
        [(style.layouts[0], v) for v in variants] if style.by_variant else [(x, "") for x in layouts]
    ):
        look = {
            "color": style.colour(layout, variant),
            "marker": "" if several else style.marker(layout, "", variant),
            "linestyle": style.line(variant) if variant else "-",
        }
        handles.append(Line2D([], [], markersize=5, label=plain(f"{layout} {variant}".strip()), **look))
    if len(style.variants) > 1 and not style.by_variant:
        lines = [(style.line(name), plain(name) or "no exchange") for name in variants]
        handles += [Line2D([], [], color=GREY, linestyle=line, label=label) for line, label in lines]
    if several:
        marks = [(style.marker("", name), f"run {plain(name, 24)}") for name in runs]
        handles += [Line2D([], [], color=GREY, linestyle="", marker=mark, label=label) for mark, label in marks]
    legend_below(figure, [*handles, *more])
