"""Draw step times against the distribution of experts that tokens took: a line per layout, a panel per load."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dcpbench.points.expert_distribution import EVEN, HASH_MARK
from dcpbench.reports.figures import make_grid
from dcpbench.reports.style import format_label
from dcpbench.show.figure_style import (
    choose_columns,
    draw_legend_below,
    draw_watermark,
    set_axis_labels,
    set_value_axis,
)
from dcpbench.show.numbers import format_number
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcpbench.reports.style import Style

ROUTING = "routing"
MAX_PANELS = 6
MAX_TICK_CHARS = 14
PANEL = (3.7, 3.0)
FASTEST_LOOK: dict[str, Any] = {  # ring around the fastest layout of each distribution
    "marker": "o",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgecolor": "#000000",
    "linestyle": "",
}


def select_skewed(points: pd.DataFrame) -> pd.DataFrame:
    """Return the decode steps of layouts that ran with several distributions, with their `place` by experts read."""
    if points.empty:
        return points.iloc[:0]
    known = points[points["step_ms"].notna() & points["experts_hit"].notna()]
    own = ["run", "model", "layout", "variant", "concurrency", "context"]
    several = known[known.groupby(own)[ROUTING].transform("nunique") > 1]
    hit = several.groupby(["model", ROUTING])["experts_hit"].mean()
    order = hit.groupby(level="model").rank(ascending=False, method="first").sub(1).astype(int)
    return several.assign(place=[order[key] for key in zip(several["model"], several[ROUTING], strict=True)])


def draw_routings(rows: pd.DataFrame, style: Style, title: str) -> Figure:
    """Draw the step of each layout over the distributions, from the most even one to that with the fewest experts.

    A ring marks the fastest layout of each.
    """
    loads = rows.drop_duplicates(["context", "concurrency"]).sort_values(["context", "concurrency"])
    loads = loads[["context", "concurrency"]].iloc[:MAX_PANELS]
    columns = choose_columns(len(loads))
    size = (max(columns * PANEL[0], 6.0), PANEL[1])
    figure, axes = make_grid(title, len(loads), columns, size, 1.0)
    for ax, (context, concurrency) in zip(axes, loads.itertuples(index=False), strict=True):
        panel = rows[(rows["context"] == context) & (rows["concurrency"] == concurrency)]
        _draw_panel(ax, panel, style)
        ax.set_title(f"{concurrency:,} × {context:,} tokens")
    set_axis_labels(figure, "routing, from many experts in a step to few", "step (ms)")
    _draw_legend(figure, rows, style)
    return figure


def _draw_panel(ax: Axes, panel: pd.DataFrame, style: Style) -> None:
    for (layout, variant, run), found in panel.groupby(["layout", "variant", "run"], sort=False):
        steps = found.sort_values("place")
        ax.plot(steps["place"], steps["step_ms"], markersize=5, **style.get_look(str(layout), str(variant), str(run)))
    fastest = panel.loc[panel.groupby(["run", "place"])["step_ms"].idxmin()]
    ax.plot(fastest["place"], fastest["step_ms"], **FASTEST_LOOK)
    ticks = panel.drop_duplicates("place").sort_values("place")
    names = [format_label(_format_routing(routing), MAX_TICK_CHARS) for routing in ticks[ROUTING]]
    ax.set_xticks(list(ticks["place"]), names)
    ax.set_xlim(-0.4, float(ticks["place"].max()) + 0.4)
    set_value_axis(ax, panel["step_ms"], "y")
    if bool(panel["cpu"].any()):
        draw_watermark(ax)


def _draw_legend(figure: Figure, rows: pd.DataFrame, style: Style) -> None:
    from matplotlib.lines import Line2D

    lines = rows.drop_duplicates(["layout", "variant", "run"]).sort_values(["layout", "variant"])
    several = len(set(lines["run"])) > 1
    handles = [
        Line2D(
            [],
            [],
            label=format_label(_format_line(row, named=several)),
            markersize=5,
            **style.get_look(row["layout"], row["variant"], row["run"]),
        )
        for row in lines.to_dict("records")
    ]
    draw_legend_below(figure, [*handles, Line2D([], [], label="fastest", **FASTEST_LOOK)])


def _format_line(row: dict[Any, Any], *, named: bool) -> str:
    words = f"{row['layout']} {row['variant']}".strip()
    return f"{words}, {row['run_label']}" if named else words


def _format_routing(routing: str) -> str:
    """Return `even`, `zipf:1`, or the name of a file."""
    return PurePath(routing.partition(HASH_MARK)[0]).name or EVEN


def format_alt_routings(title: str, rows: pd.DataFrame) -> str:
    """Return the alternative text: the fastest layout of each distribution at the heaviest load."""
    heaviest = rows.sort_values(["context", "concurrency"]).iloc[-1]
    same = rows[(rows["context"] == heaviest["context"]) & (rows["concurrency"] == heaviest["concurrency"])]
    fastest = same.loc[same.groupby("place")["step_ms"].idxmin()].sort_values("place")
    texts = [
        f"{_format_line(row, named=False)} with {_format_routing(row[ROUTING])} ({format_number(row['step_ms'], 3)} ms)"
        for row in fastest.to_dict("records")
    ]
    return f"{title}. Fastest at {heaviest['concurrency']:,} × {heaviest['context']:,} tokens: {format_list(texts)}."
