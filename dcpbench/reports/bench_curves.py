"""The picture of benches whose cases differ in bytes: time against bytes, a line for each variant, above the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dcpbench.reports.bench_rates import gpu_time
from dcpbench.reports.style import LAYOUT_COLOURS, MARKERS, RC, columns_for, headline, legend_below, value_axis

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from dcpbench.bench_records import BenchRecord, Result

PANEL = (7.2, 4.4)
LIMIT = "#555555"
ALONG = ("requests",)
"""Sizes along a line; the others make panels."""
MOST_TICKS = 8
WHAT = {
    "exchange": "bytes that a rank must receive",
    "collectives": "bytes that a rank receives",
    "merge": "bytes read and written",
}
"""Label of the x axis."""


def write_curves(record: BenchRecord, path: Path) -> None:
    """Write a PNG: time per call against bytes, both logarithmic, and the least time this machine allows."""
    timed = [r for r in record.results if r.outcome == "ok" and gpu_time(r) and _bytes(r)]
    variants = list(dict.fromkeys(r.case.variant for r in timed))
    groups: dict[str, list[Result]] = {}
    for r in timed:
        groups.setdefault(_group(r), []).append(r)
    with mpl.rc_context(RC):
        columns = columns_for(len(groups), narrow=False)
        rows = -(-len(groups) // columns)
        figure = Figure((PANEL[0] * columns, PANEL[1] * rows + 0.9), layout="constrained")
        handles: dict[str, Line2D] = {}
        for place, (name, results) in enumerate(groups.items(), 1):
            ax = figure.add_subplot(rows, columns, place)
            handles |= _draw(ax, results, variants)
            ax.set_title(name, fontsize=9)
            ax.set_xlabel(WHAT.get(record.bench, "bytes"))
        device = record.environment.device if record.environment else ""
        headline(figure, f"bench {record.bench}: time per call against bytes, {device}", narrow=False)
        figure.supylabel("µs per call", fontsize=10)
        legend_below(figure, list(handles.values()))
        figure.savefig(path, dpi=150)


def _draw(ax: Axes, results: Sequence[Result], variants: Sequence[str]) -> dict[str, Line2D]:
    handles = {}
    for place, variant in enumerate(variants):
        mine = sorted((r for r in results if r.case.variant == variant), key=_bytes)
        times = [t for r in mine if (t := gpu_time(r))]
        spread = [[t.median_us - t.low_us for t in times], [t.high_us - t.median_us for t in times]]
        look = {"color": LAYOUT_COLOURS[place % len(LAYOUT_COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        drawn = ax.errorbar(
            [_bytes(r) for r in mine], [t.median_us for t in times], yerr=spread, markersize=5, linewidth=1.5,
            capsize=2, label=variant, **look,
        )  # fmt: skip
        handles[variant] = drawn.lines[0]
        handles[variant].set_label(variant)
    floors = sorted({(_bytes(r), r.floor_us) for r in results if r.floor_us})
    if floors:
        (line,) = ax.plot(*zip(*floors, strict=True), color=LIMIT, linestyle="--", linewidth=1.2)
        line.set_label("limit of this machine")
        handles["limit"] = line
    heights = [t.median_us for r in results if (t := gpu_time(r))] + [y for _, y in floors]
    value_axis(ax, heights, "y")
    _byte_axis(ax, [_bytes(r) for r in results])
    return handles


def _byte_axis(ax: Axes, values: Sequence[int]) -> None:
    ticks = sorted(set(values))
    ax.set_xscale("log", base=2)
    ticks = ticks if len(ticks) <= MOST_TICKS else [*ticks[:: -(-len(ticks) // MOST_TICKS)]]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: size(v)))


def size(value: float) -> str:
    """`96 KB`, `1.5 MB`."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _bytes(r: Result) -> int:
    return (r.work.received_bytes or r.work.memory_bytes) if r.work else 0


def _group(r: Result) -> str:
    return ", ".join(f"{name} {value}" for name, value in r.case.sizes.items() if name not in ALONG)
