"""Figures with one bar per layout: where a step's time goes, and how much KV cache fits."""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dcpbench.points.layout import DEGREES
from dcpbench.reports.style import IDLE_COLOUR, PHASE_COLOURS, REST_COLOUR, Style, plain
from dcpbench.show.figures import columns_for, headline, legend_below, watermark
from dcpbench.show.numbers import count

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PHASE_COLUMN = re.compile(r"phase_.+_us")
MOST_LOADS = 3
"""Concurrencies shown in the phase figure; of more, the lowest, the middle and the highest."""
LABEL_WIDTH = 30
"""Letters of a bar's label on a line; a longer one takes two."""


def phases_in_ms(points: pd.DataFrame) -> pd.DataFrame:
    """Time of each phase in ms, one column per phase in stacking order, the small and the unknown ones as `rest`."""
    columns = {c.removeprefix("phase_").removesuffix("_us"): c for c in map(str, points) if PHASE_COLUMN.fullmatch(c)}
    times = points[list(columns.values())].set_axis(list(columns), axis=1) / 1e3
    shown = [name for name in PHASE_COLOURS if name in columns and times[name].sum() > 0]
    rest = [name for name in columns if name not in PHASE_COLOURS]
    return times[shown].assign(rest=times[rest].sum(axis=1, min_count=1)) if rest else times[shown]


def has_phases(points: pd.DataFrame) -> bool:
    """Whether any point was profiled."""
    return bool(points["idle_us"].notna().any()) and phases_in_ms(points).sum().sum() > 0


def has_capacity(points: pd.DataFrame) -> bool:
    """Whether any point says what its KV cache holds."""
    return bool(points["kv_tokens_per_gib"].notna().any())


def draw_phases(points: pd.DataFrame, style: Style, title: str) -> Figure:  # noqa: ARG001 - same call for all
    """Stacked bars of GPU time per step by phase, one panel per context, grouped by concurrency."""
    contexts = sorted(points["context"].unique())
    loads = _some(sorted(points["concurrency"].unique()))
    labels = list(dict.fromkeys(points.sort_values([*DEGREES], kind="stable")["label"]))
    rows: list[tuple[int, str]] = [row for c in loads for row in ((c, ""), *((c, label) for label in labels))]
    columns = columns_for(len(contexts))
    height = math.ceil(len(contexts) / columns)
    width = max(2.9 * columns + 1.3, 6.0)
    row_inches = 0.32 if any("\n" in _name(label) for label in labels) else 0.2
    figure = Figure(figsize=(width, height * (row_inches * len(rows) + 0.9) + 1.1), layout="constrained")
    headline(figure, title)
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for ax in axes[len(contexts) :]:
        ax.remove()
    times = phases_in_ms(points)
    for ax, context in zip(axes, contexts, strict=False):
        panel = points[points["context"] == context]
        _stack(ax, panel, rows, times)
        ax.set_title(f"context {count(context)} tokens")
        ax.set_xlabel("profiled step (ms)")
        if bool(panel["cpu"].any()):
            watermark(ax)
    handles = [Patch(color=_colour(str(name)), label=str(name).replace("_", " ")) for name in times]
    outside = "outside ranges" if bool(points["cpu"].all()) else "idle"
    handles.append(Patch(facecolor=IDLE_COLOUR, hatch="///", edgecolor="#999999", label=outside))
    legend_below(figure, handles)
    return figure


def _colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, REST_COLOUR)


def _name(label: str) -> str:
    """A bar's label on up to two lines."""
    return "\n".join(textwrap.wrap(plain(label, 2 * LABEL_WIDTH), LABEL_WIDTH)[:2])


def _stack(ax: Axes, panel: pd.DataFrame, rows: list[tuple[int, str]], times: pd.DataFrame) -> None:
    """One bar per row; a row without a label is the heading of its group."""
    bars = times.loc[panel.index].to_dict("records")
    found = dict(
        zip(
            zip(panel["concurrency"], panel["label"], strict=True),
            zip(bars, panel["idle_us"], strict=True),
            strict=True,
        )
    )
    for y, key in enumerate(rows):
        bar, idle_us = found.get(key, ({}, None))
        if not key[1]:
            continue
        if idle_us is None or not idle_us >= 0:
            ax.text(0, y, " not profiled" if key in found else " did not run", va="center", fontsize=8, color="#777777")
            continue
        left = 0.0
        for name, ms in bar.items():
            if ms > 0:
                ax.barh(y, ms, left=left, height=0.8, color=_colour(str(name)))
                left += ms
        ax.barh(y, idle_us / 1e3, left=left, height=0.8, color=IDLE_COLOUR, hatch="///", edgecolor="#999999")
    ax.set_yticks(range(len(rows)), [_name(label) if label else f"concurrency {c}" for c, label in rows], fontsize=9)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    for tick, (_, label) in zip(ax.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if label else "bold")
    ax.set_xlim(left=0)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0, labelleft=True)


def draw_capacity(points: pd.DataFrame, style: Style, title: str) -> Figure:
    """Tokens that each GiB of KV memory on each GPU holds and, where it means something, tokens in all."""
    best = points.dropna(subset=["kv_tokens_per_gib"]).sort_values("kv_tokens_per_gib", ascending=False)
    best = best.drop_duplicates("layout").sort_values([*DEGREES], kind="stable")
    panels = [("kv_tokens_per_gib", "tokens held per GiB of KV memory on each GPU", best)]
    real = best[best["kv_bounded_by"] != "sweep"]
    if len(real):
        panels.append(("kv_capacity_tokens", "tokens held in all", real))
    columns = len(panels)
    size = (max(5.0 * columns, 6.4), (0.38 * len(best) + 0.9) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    headline(figure, title)
    for ax, (column, label, table) in zip(figure.subplots(1, columns, squeeze=False).flat, panels, strict=True):
        values = table[column].astype(float).tolist()
        colours = [style.colour(layout) for layout in table["layout"]]
        ax.barh(range(len(values)), values, color=colours, height=0.7)
        for y, value in enumerate(values):
            ax.text(value, y, f" {count(value)}  ({value / values[0]:.3g}×)", va="center", fontsize=9)
        ax.set_yticks(range(len(values)), [plain(layout, 30) for layout in table["layout"]])
        ax.invert_yaxis()
        ax.set_xlim(0, max(values) * 1.5)
        ax.set_xticks([])
        ax.set_xlabel(f"{label} (× of {plain(table['layout'].iloc[0])})")
        ax.grid(visible=False)
        ax.spines["bottom"].set_visible(False)
        if bool(table["cpu"].any()):
            watermark(ax)
        ax.tick_params(axis="y", length=0)
    return figure


def _some(values: list[int]) -> list[int]:
    return values if len(values) <= MOST_LOADS else [values[0], values[len(values) // 2], values[-1]]
