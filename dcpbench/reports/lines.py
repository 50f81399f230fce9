"""Figures with one line per layout and one panel per context: throughput, latency, frontier."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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

WIDE_PANEL = (3.7, 3.0)
GREY = "#555555"
SINGLE_PANEL = (4.4, 3.0)
TITLE_WIDTH = 42
"""Characters of a line above a panel."""


def draw_throughput(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Output tok/s of the whole layout against concurrency, with 95 % intervals."""
    figure, drawn = panels(points, title)
    for ax, panel in drawn:
        for line, look in series(panel, style):
            low, high = (
                line["output_tok_s"] - line["output_tok_s_low"],
                line["output_tok_s_high"] - line["output_tok_s"],
            )
            ax.errorbar(line["concurrency"], line["output_tok_s"], yerr=[low, high], capsize=3, **look)
        measured_ticks(ax, panel["concurrency"])
        value_axis(ax, points["output_tok_s_high"].dropna(), "y")
    axis_labels(figure, "concurrency (requests in flight)", "output throughput (tok/s)")
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
    known = {p: some[f"{name}_{p}_ms"].notna() for p in ("p99", "p95", "p90")}
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
    """Output tok/s/GPU against tok/s/user; grey joins the points that no other beats in both."""
    figure, drawn = panels(points, title)
    for ax, panel in drawn:
        best = frontier(panel)
        ax.plot(best["tok_s_per_user"], best["output_tok_s_per_gpu"], color="#D0D0D0", linewidth=7, zorder=1)
        for line, look in series(panel, style):
            ax.plot(line["tok_s_per_user"], line["output_tok_s_per_gpu"], **look)
        for _, point in _one_per_concurrency(best).iterrows():
            at = (point["tok_s_per_user"], point["output_tok_s_per_gpu"])
            ax.annotate(f"{point['concurrency']}", at, (6, 6), textcoords="offset points", fontsize=9, color="#444444")
        value_axis(ax, points["tok_s_per_user"].dropna(), "x")
        value_axis(ax, points["output_tok_s_per_gpu"].dropna(), "y")
    axis_labels(figure, "speed for one user (tok/s/user)", "output per GPU (tok/s/GPU)")
    best_line = Line2D([], [], color="#D0D0D0", linewidth=7, label="best (concurrency)")
    legend(figure, points, style, [best_line])
    return figure


def frontier(points: pd.DataFrame) -> pd.DataFrame:
    """Points for which no other has both more tok/s/user and more tok/s/GPU, fastest user first."""
    ordered = points.dropna(subset=["tok_s_per_user", "output_tok_s_per_gpu"])
    ordered = ordered.sort_values(["tok_s_per_user", "output_tok_s_per_gpu"], ascending=False)
    before = ordered["output_tok_s_per_gpu"].cummax().shift(fill_value=-math.inf)
    return ordered[ordered["output_tok_s_per_gpu"] > before]


def _one_per_concurrency(best: pd.DataFrame) -> pd.DataFrame:
    return best.drop_duplicates("concurrency", keep="last")


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
        }
        yield line.sort_values(along), look


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
