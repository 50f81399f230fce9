"""Show the quality of the communication model: a table, and a picture of measured times with the fitted curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dcpbench.show.numbers import BYTES, format_percent, format_short_number, format_with_unit
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.table import Table

    from dcpbench.bench.calibration import Quality
    from dcpbench.points.comm_model import Call

COLUMNS = ("call", "ranks", "received", "launch", "a rank more", "rate", "error p50", "p90", "a doubling of ranks")
STEPS = 60  # number of points of a curve
LINES = ("-", "--", ":")  # styles of the curves, by their number of barriers


def format_row(q: Quality) -> list[str]:
    """Return the cells in the order of COLUMNS; errors are those of a prediction without the size or the most ranks."""
    fitted, call = q.call.fitted, q.call
    rate = fitted.bytes_s
    more = format_percent(call.ranks_error) if len(call.ranks) > 1 else f"{format_percent(call.ranks_error)}, assumed"
    return [
        call.name,
        ", ".join(map(str, call.ranks)),
        " to ".join(format_with_unit(size, BYTES) for size in q.sizes),
        f"{format_short_number(fitted.launch_us)} µs",
        f"{format_short_number(fitted.per_rank_us)} µs" if len(call.ranks) > 1 else "—",
        "—" if rate is None else f"{format_short_number(rate / 1e9)} GB/s",
        format_percent(q.compute_percentile(0.5)),
        format_percent(q.compute_percentile(0.9)) if q.errors else f"{format_percent(call.size_error)}, assumed",
        more,
    ]


def make_table(found: Iterable[Quality]) -> Table:
    """Return a table of each call with its fit, and the error of predictions without the respective measurement."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(
        box=SIMPLE_HEAD,
        title="Communication model: launch + per rank · (ranks − 1) + bytes / rate, and residuals by size",
    )
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in ("call", "ranks", "received") else "right")
    for q in found:
        shown.add_row(*format_row(q))
    return shown


def write_picture(calls: Sequence[Call], path: Path, title: str) -> None:
    """Write a PNG with a panel for each call: times as marks, the model as a line for each number of barriers, a colour per number
    of ranks.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    from dcpbench.show.figure_style import COLOURS, MARKERS, apply_style, choose_columns, save_figure, set_headline

    columns = choose_columns(len(calls))
    rows = -(-len(calls) // columns)
    all_ranks = sorted({n for call in calls for n in call.ranks})
    look: dict[int, dict[str, Any]] = {
        n: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, n in enumerate(all_ranks)
    }
    with apply_style():
        figure = Figure((3.6 * columns, 2.7 * rows + 0.6), layout="constrained")
        set_headline(figure, title)
        for place, call in enumerate(calls, 1):
            ax = figure.add_subplot(rows, columns, place)
            ax.set_title(call.name, loc="left")
            ax.set(xscale="log", yscale="log", xlabel="bytes that a rank receives (log scale)", ylabel="µs (log scale)")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_with_unit(size, BYTES)))
            ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 5, 7)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,g}"))
            ax.minorticks_off()
            counts = sorted({s.barriers for s in call.samples})
            for n in call.ranks:
                of = [s for s in call.samples if s.ranks == n]
                ax.plot(
                    [s.received_bytes for s in of],
                    [s.us for s in of],
                    linestyle="",
                    label=f"{n} ranks, measured",
                    **look[n],
                )
                for barriers in sorted({s.barriers for s in of}):
                    sizes = [s.received_bytes for s in of if s.barriers == barriers]
                    low, high = math.log(min(sizes)), math.log(max(sizes))
                    along = [math.exp(low + (high - low) * i / STEPS) for i in range(STEPS + 1)]
                    ax.plot(
                        along,
                        [call.predict_us(n, x, barriers) for x in along],
                        color=look[n]["color"],
                        linewidth=1,
                        linestyle=LINES[counts.index(barriers) % len(LINES)],
                        label=f"{n} ranks, model"
                        + (f", {format_count(barriers, 'barrier')}" if len(counts) > 1 else ""),
                    )
            ax.legend(fontsize=8)
        save_figure(figure, path, "png")
