"""Figures of served requests: rates and latencies against load, and where DCP begins to pay.

A figure holds live runs or replays. Replays have hollow markers and say so above each
panel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from dcpbench.points.names import CLOSED
from dcpbench.records.metrics import PERCENTILES
from dcpbench.reports import lines
from dcpbench.reports.serving import words
from dcpbench.reports.style import (
    LAYOUT_COLOURS,
    MARKERS,
    Style,
    legend_below,
    measured_ticks,
    plain,
    value_axis,
)
from dcpbench.reports.style import (
    LINES as LINE_STYLES,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


GREY = "#555555"


def draw_ttft(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Median time to first token, p99 as a dash, or the highest percentile that has samples."""
    return _draw_latency(points, style, title, "ttft", "time to first token (ms)")


def draw_itl(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Median inter-token latency, p99 as a dash, or the highest percentile that has samples."""
    return _draw_latency(points, style, title, "itl", "inter-token latency (ms)")


LINES = (
    ("throughput", "Output throughput against {}", lines.draw_throughput),
    ("ttft", "Time to first token against {}", draw_ttft),
    ("itl", "Inter-token latency against {}", draw_itl),
    ("frontier", "Throughput per GPU against speed per user", lines.draw_frontier),
)
EDGE = {
    "tok_s_per_user": "a speed for one user (1000 / median ITL)",
    "output_tok_s_per_gpu": "an output per GPU (an import with --tp says how many there were)",
}
"""What a point on the frontier has, in words."""
NAMES = words.OBJECTIVES | {"frontier": "Throughput per GPU against speed per user"}
"""Of the figures that some points cannot be in."""


def lacks(kind: str, points: pd.DataFrame) -> str:
    """What no point has that a figure of LINES would show; empty where there is something to draw."""
    if kind in ("ttft", "itl"):
        shown = points[[f"{kind}_{p}_ms" for p in PERCENTILES]]
        return "" if shown.notna().any(axis=None) else f"a median or percentile of {NAMES[kind]}"
    if kind != "frontier" or points[list(EDGE)].notna().all(axis=1).any():
        return ""
    return ", and none ".join(said for column, said in EDGE.items() if points[column].isna().all()) or "both"


def not_drawn(served: pd.DataFrame, *kinds: str) -> list[str]:
    """A sentence for each of these figures, mode and model of which nothing can be drawn, and why."""
    groups = list(served.groupby(["mode", "model"], sort=False)) if len(served) else []
    said = []
    for (mode, model), points in groups:
        where = f" for {model}, {mode}" if len(groups) > 1 else ""
        said += [f"{NAMES[k]} is not drawn{where}: no point has {what}." for k in kinds if (what := lacks(k, points))]
    return said


MOST_CURVES = 8
"""Curves of a panel of the break-even figure; of more, each layout with its exchange has a panel of its own."""


def draw_break_even(ratios: pd.DataFrame, style: Style, title: str) -> Figure:  # noqa: ARG001 - same call for all
    """Output tok/s with DCP over that of the same layout without it.

    Along the x axis runs whichever of concurrency and length of requests has more values, a curve stands for each value
    of the other, and a panel for each model; where that makes too many curves, for each layout with its exchange.
    """
    x, other = _axes(ratios)
    others = list(dict.fromkeys(ratios.sort_values(["input_typical", "concurrency"], kind="stable")[other]))
    order = ratios.sort_values(["tp", "dcp", "variant"], kind="stable")
    labels = list(dict.fromkeys(order["label"]))
    split = len(labels) > 1 and len(labels) * len(others) > MOST_CURVES
    names = ratios["model"].str.cat(ratios["label"], sep=": ") if split else ratios["model"]
    table = ratios.assign(cpu=False, panel=names)
    figure, panels = lines.panels(table, title, by="panel", form=lines.said("{}", ratios))
    for ax, panel in panels:
        for (_, label, value), line in panel.sort_values(x).groupby(["run", "label", other], sort=False):
            i = others.index(value)
            colour = LAYOUT_COLOURS[(i if split else labels.index(label)) % len(LAYOUT_COLOURS)]
            look = {"color": colour, **_curve(i)}
            spread = [line["ratio"] - line["low"], line["high"] - line["ratio"]]
            ax.errorbar(line[x], line["ratio"], yerr=spread, capsize=3, **look, **lines.marked(panel, colour))
        ax.axhline(1, color=GREY, linewidth=1)
        measured_ticks(ax, panel[x])
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    decode = bool((ratios["mode"] == "decode").all())
    length = "context (tokens)" if decode else "prompt (tokens)"
    loads = "concurrency (requests in flight)" if decode else lines.ALONG[CLOSED].label
    lines.axis_labels(figure, length if x == "input_typical" else loads, "with DCP / without")
    legend_below(figure, _break_even_legend(labels, others, other, split=split))
    return figure


def _axes(ratios: pd.DataFrame) -> tuple[str, str]:
    """The column along the x axis, and the one that has a curve for each of its values."""
    lengths, loads = ratios["rest"].nunique(), ratios["concurrency"].nunique()
    known = bool(ratios["input_typical"].notna().all())
    return ("input_typical", "concurrency") if known and lengths > loads else ("concurrency", "rest")


def _break_even_legend(labels: list[str], others: list[Any], other: str, *, split: bool) -> list[Line2D]:
    named = [f"concurrency {v}" if other == "concurrency" else str(v) for v in others]
    colours = [LAYOUT_COLOURS[i % len(LAYOUT_COLOURS)] if split else GREY for i in range(len(named))]
    curves = [
        Line2D([], [], color=colour, label=plain(name), **_curve(i))
        for i, (colour, name) in enumerate(zip(colours, named, strict=True))
    ]
    if split:
        return curves
    return [
        *(Line2D([], [], color=LAYOUT_COLOURS[i % len(LAYOUT_COLOURS)], label=plain(x)) for i, x in enumerate(labels)),
        *curves,
    ]


def alt(title: str, points: pd.DataFrame) -> str:
    """What a reader would take from the picture; the full numbers stand in the tables."""
    shown = ", ".join(plain(label) for label in dict.fromkeys(map(str, points["label"])))
    shapes = "; ".join(plain(rest) for rest in dict.fromkeys(map(str, points["rest"])))
    top = points.sort_values("output_tok_s", kind="stable").iloc[-1]
    text = f"{title}. Layouts: {shown}. Requests: {shapes}."
    text += f" Highest output: {top['label']} with {top['output_tok_s']:,.0f} tok/s under {top['load']}."
    return text + (" CPU: functional run, not performance." if bool(points["cpu"].any()) else "")


def alt_break_even(title: str, ratios: pd.DataFrame) -> str:
    """The same of the break-even curves."""
    low, high = ratios["ratio"].min(), ratios["ratio"].max()
    shown = ", ".join(plain(label) for label in dict.fromkeys(map(str, ratios["label"])))
    return f"{title}. Layouts: {shown}. From {low:.2f} to {high:.2f} times."


def _draw_latency(points: pd.DataFrame, style: Style, title: str, name: str, label: str) -> Figure:
    figure, panels, along = lines.start(points, title)
    top = lines.tail_percentile(points, name)
    p50, high = f"{name}_p50_ms", f"{name}_{top or 'p99'}_ms"
    for ax, panel in panels:
        for line, look in lines.series(panel, style, along.column):
            ax.plot(line[along.column], line[p50], **look)
            ax.plot(
                line[along.column], line[high].astype(float), "_", color=look["color"], markersize=11, markeredgewidth=2
            )
        measured_ticks(ax, panel[along.column])
        value_axis(ax, [*points[p50].dropna(), *points[high].dropna()], "y")
    lines.axis_labels(figure, along.label, label)
    lines.legend(figure, points, style, lines.tail_legend(top, 11))
    return figure


def _curve(index: int) -> dict[str, Any]:
    return {
        "linestyle": LINE_STYLES[index % len(LINE_STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
    }
