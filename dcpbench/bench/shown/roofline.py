"""The picture of `bench attention`: a roofline, whose roofs were measured in the same run."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from dcpbench.bench.shown.rates import gpu_time
from dcpbench.show.figures import GREY, colour, drawing, headline, legend_below, marker, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from dcpbench.bench.record import BenchRecord, Result

SIZE = (7.2, 5.2)
ASIDE = 0.06
"""Backends stand side by side by this share of their intensity, which is the same for all."""


def write_roofline(record: BenchRecord, path: Path) -> None:
    """Write a PNG: operations per second against operations per byte, a point for each result that was timed."""
    timed = [r for r in record.results if r.outcome == "ok" and r.work and r.work.memory_bytes and gpu_time(r)]
    limits = {limit.name: limit.median for limit in record.limits}
    with drawing():
        figure = Figure(SIZE, layout="constrained")
        ax = figure.add_subplot()
        handles = _points(ax, timed)
        if timed:
            _axes(ax, timed, limits)
        if timed and {"read", "matmul"} <= limits.keys():
            handles.append(_roofs(ax, limits["read"], limits["matmul"]))
        device = record.environment.device if record.environment else ""
        headline(figure, f"bench {record.bench} under the roofs measured in the same run, {device}")
        if handles:
            legend_below(figure, handles)
        save(figure, path, "png")


def _points(ax: Axes, timed: Sequence[Result]) -> list[Line2D]:
    """Colour by backend, marker by heads; returns the legend."""
    variants = list(dict.fromkeys(r.case.variant for r in timed))
    heads = sorted({int(r.case.sizes["heads"]) for r in timed})
    for r in timed:
        place = variants.index(r.case.variant)
        aside = 1 + ASIDE * (place - (len(variants) - 1) / 2)
        ax.plot(
            _intensity(r) * aside,
            (r.flop_s or 0) / 1e12,
            linestyle="",
            color=colour(place),
            marker=marker(heads.index(int(r.case.sizes["heads"]))),
            markersize=6,
            alpha=0.8,
        )
    handles = [Line2D([], [], color=colour(i), marker="o", linestyle="", label=v) for i, v in enumerate(variants)]
    return handles + [
        Line2D([], [], color=GREY, marker=marker(i), linestyle="", label=f"{h} heads") for i, h in enumerate(heads)
    ]


def _axes(ax: Axes, timed: Sequence[Result], limits: dict[str, float]) -> None:
    """Both logarithmic; a tick for each number of heads, whose intensities differ by little."""
    of_heads: dict[int, list[float]] = {}
    for r in timed:
        of_heads.setdefault(int(r.case.sizes["heads"]), []).append(_intensity(r))
    ticks = [statistics.median(found) for _, found in sorted(of_heads.items())]
    rates = [*(r.flop_s / 1e12 for r in timed if r.flop_s), *(limits[n] / 1e12 for n in ("matmul",) if n in limits)]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(min(ticks) / 2, max([*ticks, limits.get("matmul", 0) / limits.get("read", 1)]) * 2)
    ax.set_ylim(min(rates) / 1.5, max(rates) * 1.4)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.minorticks_off()
    ax.set_xlabel("operations per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")


def _roofs(ax: Axes, read: float, matmul: float) -> Line2D:
    """min(matrix product, read · intensity) across the axes, each with its limit beside it."""
    left, right = ax.get_xlim()
    ridge = matmul / read
    ends = [left, ridge, right]
    (line,) = ax.plot(
        ends, [min(matmul, read * x) / 1e12 for x in ends], color=GREY, linestyle="--", linewidth=1.2, label="roofs"
    )
    beside = {"textcoords": "offset points", "color": GREY, "fontsize": 9}
    middle = (left * ridge) ** 0.5
    ax.annotate(f"read {read / 1e12:.3g} TB/s", (middle, middle * read / 1e12), (-6, 4), ha="right", **beside)
    ax.annotate(f"product {matmul / 1e12:.0f} TFLOP/s", (right, matmul / 1e12), (-2, 4), ha="right", **beside)
    return line


def _intensity(r: Result) -> float:
    return r.work.flops / r.work.memory_bytes if r.work else 0.0
