"""Draw the picture of a bench: time against bytes, with a line for each variant, or a roofline."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dcpbench.bench.shown.bench_findings import get_gpu_time, group_results, is_right
from dcpbench.points.roofline import get_flops_limit
from dcpbench.show.figure_style import (
    COLOURS,
    GREY,
    apply_style,
    choose_columns,
    draw_legend_below,
    get_colour,
    get_line_style,
    get_marker,
    save_figure,
    set_axis_labels,
    set_headline,
    set_value_axis,
)
from dcpbench.show.numbers import BYTES, format_with_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from dcpbench.bench.bench_record import BenchRecord, Result, Timing
    from dcpbench.bench.shown.bench_findings import Groups

    Draw = Callable[[Axes, str, list[Result]], None]

ALONG = {  # sizes that vary along a line; default `requests`; others make panels
    "kv-gather": ("tokens", "buffer", "pool_bytes"),
    "linear": ("rows",),
}
MAX_TICKS = 8
WHAT = {  # label of the axis of each bench that is drawn over bytes
    "exchange": "bytes that a rank must receive",
    "collectives": "bytes that a rank receives",
    "merge": "bytes read and written",
    "kv-gather": "bytes that a rank must receive",
    "linear": "bytes of weights and rows",
    "moe": "bytes of experts that have a row, and of rows",
}
BYTES_PANEL, ROOFLINE = (7.2, 4.4), (7.2, 4.3)  # inches of a panel
ASIDE = 0.06  # horizontal offset between backends, as a share of their common intensity


def write_picture(record: BenchRecord, path: Path) -> None:
    """Write a PNG of the times; nothing on the CPU, where times have no meaning for performance."""
    if not record.performance:
        return
    draw = _plot_over_bytes if record.bench in WHAT else _plot_roofline
    with apply_style():
        save_figure(draw(record), path, "png")


def _draw_panels(groups: Groups, size: tuple[float, float], draw: Draw) -> Figure:
    """Return a figure with a panel for each group."""
    columns = choose_columns(len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure((size[0] * columns, size[1] * rows + 0.9), layout="constrained")
    for place, (name, results) in enumerate(groups.items(), 1):
        draw(figure.add_subplot(rows, columns, place), name, results)
    return figure


def _draw_title(figure: Figure, record: BenchRecord, what: str) -> None:
    device = record.environment.device if record.environment else ""
    set_headline(figure, f"bench {record.bench}{what}, {device}")


def _draw_line(ax: Axes, points: Sequence[tuple[float, Timing]], **look: Any) -> Line2D:  # noqa: ANN401 - as matplotlib's
    """Draw medians with their intervals."""
    times = [t for _, t in points]
    spread = [[t.median_us - t.low_us for t in times], [t.high_us - t.median_us for t in times]]
    drawn = ax.errorbar(
        [x for x, _ in points], [t.median_us for t in times], yerr=spread, linewidth=1.5, capsize=2, **look
    )
    return drawn.lines[0]


def _plot_over_bytes(record: BenchRecord) -> Figure:
    """Draw time per call against bytes, both logarithmic, and the minimum time of this machine."""
    timed = [r for r in record.results if is_right(r) and _get_time(r) and _get_bytes(r)]
    names, along = list(dict.fromkeys(map(_format_name, timed))), ALONG.get(record.bench, ("requests",))
    handles: dict[str, Line2D] = {}

    def draw_panel(ax: Axes, name: str, results: list[Result]) -> None:
        handles.update(_draw_bytes(ax, results, names))
        ax.set_title(name, fontsize=9)

    def format_other_sizes(r: Result) -> str:
        return ", ".join(f"{name} {value}" for name, value in r.case.sizes.items() if name not in along)

    figure = _draw_panels(group_results(timed, format_other_sizes), BYTES_PANEL, draw_panel)
    _draw_title(figure, record, ": time per call against bytes")
    eager = any("buffer" in r.case.sizes for r in timed)
    set_axis_labels(figure, WHAT[record.bench], "µs per eager call" if eager else "µs per call")
    if handles:
        draw_legend_below(figure, list(handles.values()))
    return figure


def _draw_bytes(ax: Axes, results: Sequence[Result], names: Sequence[str]) -> dict[str, Line2D]:
    handles = {}
    for place, name in enumerate(names):
        mine = sorted((r for r in results if _format_name(r) == name), key=_get_bytes)
        points = [(_get_bytes(r), t) for r in mine if (t := _get_time(r))]
        if points:
            look: dict[str, Any] = {"color": get_colour(place), "marker": get_marker(place)}
            look["linestyle"] = get_line_style(place // len(COLOURS))  # else further variants would look like the first
            handles[name] = _draw_line(ax, points, markersize=5, **look)
            handles[name].set_label(name)
    floors = sorted({(_get_bytes(r), r.floor_us) for r in results if r.floor_us})
    if floors:
        (line,) = ax.plot(*zip(*floors, strict=True), color=GREY, linestyle="--", linewidth=1.2)
        line.set_label("limit of this machine")
        handles["limit"] = line
    set_value_axis(ax, [*(t.median_us for r in results if (t := _get_time(r))), *(y for _, y in floors)], "y")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(select_spaced([_get_bytes(r) for r in results])))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: format_with_unit(v, BYTES)))
    return handles


def select_spaced(values: Iterable[int]) -> list[int]:
    """Return the values with enough space for a label on a logarithmic axis, chosen from the largest down."""
    falling = sorted(set(values), reverse=True)
    step = (falling[0] / falling[-1]) ** (1 / MAX_TICKS)
    kept = falling[:1]
    for value in falling[1:]:
        if value * step <= kept[-1] * 1.001:
            kept.append(value)
    return kept[::-1]


def _get_bytes(r: Result) -> int:
    return (r.work.received_bytes or r.work.memory_bytes) if r.work else 0


def _get_time(r: Result) -> Timing | None:
    """Return the eager time if buffers are compared, because a graph has its buffer from before; else the GPU time."""
    return r.time if "buffer" in r.case.sizes else get_gpu_time(r)


def _format_name(r: Result) -> str:
    return ", ".join([r.case.variant, *([str(r.case.sizes["buffer"])] if "buffer" in r.case.sizes else [])])


def _plot_roofline(record: BenchRecord) -> Figure:
    """Draw operations per second against operations per byte, a point for each timed result."""
    timed = [r for r in record.results if is_right(r) and r.work and r.work.memory_bytes and get_gpu_time(r)]
    limits = {limit.name: limit.median for limit in record.limits}
    read = limits.get("read", 0.0)
    product = max((limits.get(get_flops_limit(r.work, limits), 0.0) for r in timed if r.work), default=0.0)
    handles: list[Line2D] = []

    def draw_panel(ax: Axes, _name: str, results: list[Result]) -> None:
        handles.extend(_draw_points(ax, results))
        if results:
            _set_axes(ax, results, product, product / read if read else 0.0)
        if results and read and product:
            handles.append(_draw_roofs(ax, read, product))

    figure = _draw_panels({"": timed}, ROOFLINE, draw_panel)
    _draw_title(figure, record, " under the roofs measured in the same run")
    set_axis_labels(figure, "operations per byte of memory traffic", "TFLOP/s")
    if handles:
        draw_legend_below(figure, handles)
    return figure


def _draw_points(ax: Axes, timed: Sequence[Result]) -> list[Line2D]:
    """Draw points, with colour by backend and marker by heads; return the legend."""
    variants = list(group_results(timed))
    heads = sorted({int(r.case.sizes["heads"]) for r in timed})
    for r in timed:
        place = variants.index(r.case.variant)
        aside = 1 + ASIDE * (place - (len(variants) - 1) / 2)
        ax.plot(
            _compute_intensity(r) * aside,
            (r.flop_s or 0) / 1e12,
            linestyle="",
            color=get_colour(place),
            marker=get_marker(heads.index(int(r.case.sizes["heads"]))),
            markersize=6,
            alpha=0.8,
        )
    handles = [Line2D([], [], color=get_colour(i), marker="o", linestyle="", label=v) for i, v in enumerate(variants)]
    return handles + [
        Line2D([], [], color=GREY, marker=get_marker(i), linestyle="", label=f"{h} heads") for i, h in enumerate(heads)
    ]


def _set_axes(ax: Axes, timed: Sequence[Result], product: float, ridge: float) -> None:
    """Set up logarithmic axes, with a tick for each number of heads, as intensities differ little; unknown roofs are 0."""
    of_heads: dict[int, list[float]] = {}
    for r in timed:
        of_heads.setdefault(int(r.case.sizes["heads"]), []).append(_compute_intensity(r))
    ticks = [statistics.median(found) for _, found in sorted(of_heads.items())]
    rates = [*(r.flop_s / 1e12 for r in timed if r.flop_s), *([product / 1e12] if product else [])]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(min(ticks) / 2, max([*ticks, ridge]) * 2)
    ax.set_ylim(min(rates) / 1.5, max(rates) * 1.4)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.minorticks_off()


def _draw_roofs(ax: Axes, read: float, matmul: float) -> Line2D:
    """Draw min(matrix product, read · intensity) across the axes, with a label for each limit."""
    left, right = ax.get_xlim()
    ridge = matmul / read
    ends = [left, ridge, right]
    (line,) = ax.plot(
        ends, [min(matmul, read * x) / 1e12 for x in ends], color=GREY, linestyle="--", linewidth=1.2, label="roofs"
    )
    label_style = {"textcoords": "offset points", "color": GREY, "fontsize": 9}
    middle = (left * ridge) ** 0.5
    ax.annotate(f"read {read / 1e12:.3g} TB/s", (middle, middle * read / 1e12), (-6, 4), ha="right", **label_style)
    ax.annotate(f"product {matmul / 1e12:.0f} TFLOP/s", (right, matmul / 1e12), (-2, 4), ha="right", **label_style)
    return line


def _compute_intensity(r: Result) -> float:
    return r.work.flops / r.work.memory_bytes if r.work else 0.0
