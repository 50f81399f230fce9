"""The picture of benches whose cases differ in bytes: time against bytes, a line for each variant, above the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dcpbench.bench.shown.rates import gpu_time
from dcpbench.reports.style import LAYOUT_COLOURS, MARKERS, RC, columns_for, headline, legend_below, value_axis
from dcpbench.show.numbers import BYTES, with_unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from dcpbench.bench.record import BenchRecord, Result, Timing

PANEL = (7.2, 4.4)
LIMIT = "#555555"
ALONG = {"kv-gather": ("tokens", "buffer", "pool_bytes")}
"""Sizes along a line or in its name, `requests` where nothing else is; the others make panels."""
MOST_TICKS = 8
WHAT = {
    "exchange": "bytes that a rank must receive",
    "collectives": "bytes that a rank receives",
    "merge": "bytes read and written",
    "kv-gather": "bytes that a rank must receive",
    "moe": "bytes of experts that have a row, and of rows",
}
"""Label of the x axis."""


def write_curves(record: BenchRecord, path: Path) -> None:
    """Write a PNG: time per call against bytes, both logarithmic, and the least time this machine allows."""
    timed = [r for r in record.results if r.outcome == "ok" and _time(r) and _bytes(r)]
    lines = list(dict.fromkeys(map(_line, timed)))
    groups: dict[str, list[Result]] = {}
    for r in timed:
        groups.setdefault(_group(r, ALONG.get(record.bench, ("requests",))), []).append(r)
    with mpl.rc_context(RC):
        columns = columns_for(len(groups))
        rows = -(-len(groups) // columns)
        figure = Figure((PANEL[0] * columns, PANEL[1] * rows + 0.9), layout="constrained")
        handles: dict[str, Line2D] = {}
        for place, (name, results) in enumerate(groups.items(), 1):
            ax = figure.add_subplot(rows, columns, place)
            handles |= _draw(ax, results, lines)
            ax.set_title(name, fontsize=9)
            ax.set_xlabel(WHAT.get(record.bench, "bytes"))
        device = record.environment.device if record.environment else ""
        headline(figure, f"bench {record.bench}: time per call against bytes, {device}")
        eager = record.bench in ALONG
        figure.supylabel("µs per eager call" if eager else "µs per call", fontsize=10)
        if handles:
            legend_below(figure, list(handles.values()))
        figure.savefig(path, dpi=150)


def _draw(ax: Axes, results: Sequence[Result], lines: Sequence[str]) -> dict[str, Line2D]:
    handles = {}
    for place, name in enumerate(lines):
        mine = sorted((r for r in results if _line(r) == name), key=_bytes)
        times = [t for r in mine if (t := _time(r))]
        if not times:
            continue
        spread = [[t.median_us - t.low_us for t in times], [t.high_us - t.median_us for t in times]]
        look = {"color": LAYOUT_COLOURS[place % len(LAYOUT_COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        drawn = ax.errorbar(
            [_bytes(r) for r in mine],
            [t.median_us for t in times],
            yerr=spread,
            markersize=5,
            linewidth=1.5,
            capsize=2,
            **look,
        )
        handles[name] = drawn.lines[0]
        handles[name].set_label(name)
    floors = sorted({(_bytes(r), r.floor_us) for r in results if r.floor_us})
    if floors:
        (line,) = ax.plot(*zip(*floors, strict=True), color=LIMIT, linestyle="--", linewidth=1.2)
        line.set_label("limit of this machine")
        handles["limit"] = line
    heights = [t.median_us for r in results if (t := _time(r))] + [y for _, y in floors]
    value_axis(ax, heights, "y")
    _byte_axis(ax, [_bytes(r) for r in results])
    return handles


def _byte_axis(ax: Axes, values: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(spaced(values)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: with_unit(v, BYTES)))


def spaced(values: Iterable[int]) -> list[int]:
    """Those that have room for a label on a logarithmic axis, from the largest down."""
    falling = sorted(set(values), reverse=True)
    step = (falling[0] / falling[-1]) ** (1 / MOST_TICKS)
    kept = falling[:1]
    for value in falling[1:]:
        if value * step <= kept[-1] * 1.001:
            kept.append(value)
    return kept[::-1]


def _bytes(r: Result) -> int:
    return (r.work.received_bytes or r.work.memory_bytes) if r.work else 0


def _time(r: Result) -> Timing | None:
    """Where buffers are compared, of an eager call: a graph has its buffer from before."""
    return r.time if "buffer" in r.case.sizes else gpu_time(r)


def _line(r: Result) -> str:
    return ", ".join([r.case.variant, *([str(r.case.sizes["buffer"])] if "buffer" in r.case.sizes else [])])


def _group(r: Result, along: Sequence[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in r.case.sizes.items() if name not in along)
