"""Draw the decode steps of several engines as stacked bars of common parts, one panel per context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dcpbench.records.record import MAX_DISTURBANCE
from dcpbench.reports.engine_steps import PROLONGED_STAR, is_prolonged
from dcpbench.reports.figures import make_grid
from dcpbench.reports.step_parts import IDLE, STEP_PARTS, UNKNOWN
from dcpbench.reports.style import IDLE_COLOUR, format_label
from dcpbench.show.figure_style import choose_columns, draw_legend_below
from dcpbench.show.numbers import format_integer, format_ratio, is_missing
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcpbench.reports.style import Style

MAX_CONTEXTS = 6  # maximum number of panels; the table has all
MAX_GROUPS = 8  # maximum number of pairs of layout and concurrency in a panel
MAX_NAME_CHARS = 24
BAR_INCHES, MARGIN_INCHES = 0.23, 1.9
IDLE_LOOK = {"facecolor": IDLE_COLOUR, "hatch": "///", "edgecolor": "#999999"}
UNKNOWN_LOOK = {"facecolor": "#FFFFFF", "hatch": "xxx", "edgecolor": "#000000"}
TIMED_LOOK: dict[str, Any] = {"color": "#000000", "linewidth": 1.8, "solid_capstyle": "butt"}
ABSENT_LOOK: dict[str, Any] = {"va": "center", "fontsize": 8, "color": "#777777"}
MIN_VISIBLE = 0.002  # share of the longest step below which a part has no entry in the legend
Group = tuple[int, int, int, int]  # degrees tp, dp and dcp, and concurrency
Bar = tuple[Group, str]  # group and engine of a bar; the engine is empty for the heading of the group


def draw_engine_steps(rows: pd.DataFrame, style: Style, title: str) -> Figure:  # noqa: ARG001 - same call for all
    """Draw a bar for each engine at each layout, concurrency and context (StepComparison.rows of one model).

    A bar is the profiled step by part. A vertical line is the step that was timed without the profiler; behind the bar is its
    ratio to the reference. A star marks profiled steps that the profiler prolongs.
    """
    contexts = sorted(set(rows["context"]))[:MAX_CONTEXTS]
    bars, headings = _list_bars(rows), _list_headings(rows)
    columns = choose_columns(len(contexts))
    size = (max(3.6 * columns + 1.3, 6.4), BAR_INCHES * len(bars) + 0.9)
    figure, axes = make_grid(title, len(contexts), columns, size, MARGIN_INCHES)
    for i, (ax, context) in enumerate(zip(axes, contexts, strict=True)):
        _draw_panel(ax, rows[rows["context"] == context], bars, headings, named=i % columns == 0)
        ax.set_title(f"context {format_integer(context)} tokens")
    draw_legend_below(figure, _list_legend_entries(rows))
    return figure


def _list_bars(rows: pd.DataFrame) -> list[Bar]:
    """Return the rows of a panel: for each layout and concurrency a heading and a bar per engine."""
    runs = list(dict.fromkeys(map(str, rows.sort_values("place", kind="stable")["run"])))
    return [(group, run) for group in _list_groups(rows)[:MAX_GROUPS] for run in ("", *runs)]


def _list_groups(rows: pd.DataFrame) -> list[Group]:
    """Return the groups in the order in which they are drawn."""
    return sorted({_get_group(row) for row in rows.to_dict("records")})


def _get_group(row: Mapping[Any, Any]) -> Group:
    """Return the group of a point; engines may name the same layout with different degrees of expert parallelism."""
    tp, dp, dcp, concurrency = (int(row[name]) for name in ("tp", "dp", "dcp", "concurrency"))
    return tp, dp, dcp, concurrency


def format_left_out(rows: pd.DataFrame) -> str:
    """Return what a figure of these rows leaves out, for its title; empty if it shows everything."""
    contexts, groups = len(set(rows["context"])), len(_list_groups(rows))
    texts = [
        f"{most} of {count} {what}"
        for most, count, what in (
            (MAX_CONTEXTS, contexts, "contexts"),
            (MAX_GROUPS, groups, "layouts and concurrencies"),
        )
        if count > most
    ]
    return f" (the first {' and '.join(texts)})" if texts else ""


def _draw_panel(ax: Axes, panel: pd.DataFrame, bars: list[Bar], headings: Mapping[Group, str], *, named: bool) -> None:
    """Draw the bars of one context; with `named` the engines are written to the left of them."""
    found = {(_get_group(row), str(row["run"])): row for row in panel.to_dict("records")}
    ends = [_draw_bar(ax, y, found[bar]) for y, bar in enumerate(bars) if bar in found]
    compared = {group for group, _ in found}
    for y, (group, run) in enumerate(bars):
        if run and group in compared and (group, run) not in found:
            ax.text(0, y, " not measured", **ABSENT_LOOK)
        if not run and group not in compared:
            ax.text(0, y + 1, " measured on fewer than two engines", **ABSENT_LOOK)
    names = [headings[group] if not run else format_label(run, MAX_NAME_CHARS) for group, run in bars]
    ax.set_yticks(range(len(bars)), names if named else [""] * len(bars), fontsize=9)
    for tick, (_, run) in zip(ax.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("normal" if run else "bold")
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.set_xlim(0, max(ends, default=1.0) * 1.22)
    of = format_label(panel["reference"].iloc[0], MAX_NAME_CHARS) if len(panel) else ""
    ax.set_xlabel("step (ms)" + (f"; ×: timed step over {of}" if of else ""))
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _draw_bar(ax: Axes, y: int, row: dict[Any, Any]) -> float:
    """Draw the parts of one step, and the timed step as a line; return where they end."""
    left = 0.0
    for name, look in _list_looks():
        ms = row["parts"].get(name, 0.0) / 1e3
        if ms > 0:
            ax.barh(y, ms, left=left, height=0.78, linewidth=0 if "hatch" not in look else 0.4, **look)
            left += ms
    end = left
    if not is_missing(row["step_ms"]):
        end = max(left, row["step_ms"])
        ax.plot([row["step_ms"]] * 2, [y - 0.46, y + 0.46], **TIMED_LOOK)
    note = "" if row["parts"] else "  not profiled"
    star = PROLONGED_STAR if is_prolonged(row["profiled_times"]) else ""
    ratio = star if is_missing(row["step_times"]) else f" {format_ratio(row['step_times'], 2)}{star}"
    ax.text(end, y, f"{ratio}{note}", va="center", fontsize=8)
    return end


def _list_looks() -> list[tuple[str, dict[str, Any]]]:
    """Return the parts in stacking order with the look of each."""
    known = [(part.name, {"facecolor": part.colour}) for part in STEP_PARTS if part.name != UNKNOWN]
    return [*known, (UNKNOWN, UNKNOWN_LOOK), (IDLE, IDLE_LOOK)]


def _list_legend_entries(rows: pd.DataFrame) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    steps_us = rows[["profiled_us", "step_ms"]].astype(float).mul([1.0, 1e3]).to_numpy()
    present = {
        name for parts in rows["parts"] for name, us in parts.items() if us >= MIN_VISIBLE * float(np.nanmax(steps_us))
    }
    entries: list[Any] = [Patch(label=name, **look) for name, look in _list_looks() if name in present]
    marker = {"marker": "|", "markersize": 11, "markeredgewidth": 1.8, "linestyle": ""}
    entries.append(Line2D([], [], color=TIMED_LOOK["color"], label="timed step, without profiler", **marker))
    if rows["profiled_times"].map(is_prolonged).any():
        label = f"{PROLONGED_STAR} bar over {MAX_DISTURBANCE * 100:g} % longer: waits of the profiler"
        entries.append(Line2D([], [], linestyle="", label=label))
    return entries


def _list_headings(rows: pd.DataFrame) -> dict[Group, str]:
    """Return `tp2·dcp2, 8 requests` for each group, with the layout as the first engine names it."""
    ordered = rows.sort_values("place", kind="stable", ascending=False).to_dict("records")
    return {_get_group(row): f"{row['layout']}, {format_count(int(row['concurrency']), 'request')}" for row in ordered}


def format_alt_engine_steps(title: str, rows: pd.DataFrame) -> str:
    """Return the alternative text: the timed steps of each engine at the first point."""
    first = rows[rows["cell"] == rows["cell"].iloc[0]]
    steps = ", ".join(f"{r['run']} {r['step_ms']:.2f} ms" for _, r in first.iterrows() if not is_missing(r["step_ms"]))
    where = f"{first['layout'].iloc[0]}, {format_count(int(first['concurrency'].iloc[0]), 'request')}, context {first['context'].iloc[0]:,}"
    return f"{title}. At {where}: {steps}."
