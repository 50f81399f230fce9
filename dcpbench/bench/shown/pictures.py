"""The picture of a bench: time against tokens or against bytes, a line for each variant, or a roofline."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dcpbench.bench.shown.findings import get_gpu_time, group_results
from dcpbench.points.floors import get_flops_limit
from dcpbench.show.figures import (
    GREY,
    LINES,
    apply_style,
    choose_columns,
    draw_legend_below,
    get_colour,
    get_marker,
    save_figure,
    set_headline,
    set_measured_ticks,
    set_value_axis,
)
from dcpbench.show.numbers import BYTES, format_with_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from dcpbench.bench.record import BenchRecord, Result, Timing
    from dcpbench.bench.shown.findings import Groups

    Draw = Callable[[Axes, str, list[Result]], None]

KINDS = {"eager": "eager", "host": "host time inside the call", "graph": "CUDA graph"}
"""Curves of each variant over tokens, each with its own line style, and their labels."""
X = "tokens"
ALONG = {"kv-gather": ("tokens", "buffer", "pool_bytes")}
"""Sizes that vary along a line over bytes or name it, `requests` by default; other sizes make panels."""
MAX_TICKS = 8
WHAT = {
    "exchange": "bytes that a rank must receive",
    "collectives": "bytes that a rank receives",
    "merge": "bytes read and written",
    "kv-gather": "bytes that a rank must receive",
    "linear": "bytes of weights and rows",
    "moe": "bytes of experts that have a row, and of rows",
}
"""Benches that are drawn over bytes, each with the label of the axis."""
TOKENS_PANEL, BYTES_PANEL, ROOFLINE = (3.9, 3.1), (7.2, 4.4), (7.2, 4.3)
"""Inches of a panel."""
ASIDE = 0.06
"""Horizontal offset between backends, as a share of their common intensity."""
WITHOUT = ("padded-slots",)
"""Benches shown without a picture: two times that should be equal need none."""


def write_picture(record: BenchRecord, path: Path) -> None:
    """Write a PNG: times on a GPU; only synchronisations on the CPU, where times have no meaning for performance.

    On the CPU, benches with variants that never wait get no picture, as they have no times.
    """
    draw = (
        _plot_roofline
        if record.bench == "attention"
        else _plot_over_bytes
        if record.bench in WHAT
        else _plot_over_tokens
    )
    if record.bench in WITHOUT or not (record.performance or draw is _plot_over_tokens):
        return
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


def _draw_title(figure: Figure, record: BenchRecord, what: str, width: int = 90) -> None:
    device = record.environment.device if record.environment else ""
    set_headline(figure, f"bench {record.bench}{what}, {device}", width=width)


def _draw_line(ax: Axes, points: Sequence[tuple[float, Timing]], **look: Any) -> Line2D:  # noqa: ANN401 - as matplotlib's
    """Draw medians with their intervals."""
    times = [t for _, t in points]
    spread = [[t.median_us - t.low_us for t in times], [t.high_us - t.median_us for t in times]]
    drawn = ax.errorbar(
        [x for x, _ in points], [t.median_us for t in times], yerr=spread, linewidth=1.5, capsize=2, **look
    )
    return drawn.lines[0]


def _plot_over_tokens(record: BenchRecord) -> Figure:
    """Draw times, or on the CPU the number of waits of each variant."""
    ok = [r for r in record.results if r.outcome == "ok"]
    variants, groups, timed = list(group_results(ok)), group_results(ok, _format_other_sizes), record.performance

    def draw_panel(ax: Axes, name: str, results: list[Result]) -> None:
        syncs = _find_max_syncs(results, variants)
        if timed:
            _draw_times(ax, results, variants)
            name = f"{name}\nsyncs: " + ", ".join(f"{v} {count:g}" for v, count in syncs.items())
        else:
            bars = ax.bar(list(syncs), list(syncs.values()), color=[get_colour(variants.index(v)) for v in syncs])
            ax.bar_label(bars, fmt="%g")
            set_value_axis(ax, list(syncs.values()), "y")
        ax.set_title(name, fontsize=9)

    figure = _draw_panels(groups, TOKENS_PANEL, draw_panel)
    what = "time per call against tokens" if timed else "synchronisations per call (nothing is timed)"
    _draw_title(figure, record, f": {what}", width=40 if len(groups) == 1 else 90)
    figure.supylabel("µs per call" if timed else "syncs per call", fontsize=10)
    if timed:
        for ax in figure.axes[-choose_columns(len(groups)) :]:
            ax.set_xlabel(X)
        draw_legend_below(figure, _make_handles(variants, ok))
    return figure


def _format_other_sizes(r: Result) -> str:
    """Return the sizes except the tokens, such as `dcp 8, bf16`, with a note for a rank without owned tokens."""
    sizes = {name: value for name, value in r.case.sizes.items() if name not in (X, "owned")}
    words = [str(value) if isinstance(value, str) else f"{name} {value}" for name, value in sizes.items()]
    return ", ".join([*words, *(["no row owned"] if r.case.sizes.get("owned") == 0 else [])])


def _draw_times(ax: Axes, results: Sequence[Result], variants: Sequence[str]) -> None:
    for place, variant in enumerate(variants):
        mine = sorted((r for r in results if r.case.variant == variant), key=lambda r: float(r.case.sizes[X]))
        for kind, line in zip(KINDS, LINES, strict=False):
            points = [(float(r.case.sizes[X]), t) for r in mine if (t := _get_timing(r, kind))]
            if points:
                _draw_line(ax, points, markersize=4, color=get_colour(place), linestyle=line, marker=get_marker(place))
    set_measured_ticks(ax, [float(r.case.sizes[X]) for r in results])
    set_value_axis(ax, [t.high_us for r in results for kind in KINDS if (t := _get_timing(r, kind))], "y")


def _find_max_syncs(results: Sequence[Result], variants: Sequence[str]) -> dict[str, float]:
    """Return the maximum synchronisations per call of each counted variant over all tokens."""
    counted = [(r.case.variant, r.syncs.per_call) for r in results if r.syncs]
    return {v: max(c for name, c in counted if name == v) for v in variants if any(name == v for name, _ in counted)}


def _get_timing(r: Result, kind: str) -> Timing | None:
    if kind == "graph":
        return r.graph.time if r.graph else None
    return r.time if kind == "eager" else r.host


def _make_handles(variants: Sequence[str], results: Sequence[Result]) -> list[Line2D]:
    """Return legend entries: colours for variants, line styles for kinds of times."""
    return [
        *(
            Line2D([], [], color=get_colour(i), marker=get_marker(i), markersize=5, label=v)
            for i, v in enumerate(variants)
        ),
        *(
            Line2D([], [], color=GREY, linestyle=line, label=label)
            for (kind, label), line in zip(KINDS.items(), LINES, strict=False)
            if any(_get_timing(r, kind) for r in results)
        ),
    ]


def _plot_over_bytes(record: BenchRecord) -> Figure:
    """Draw time per call against bytes, both logarithmic, and the minimum time of this machine."""
    timed = [r for r in record.results if r.outcome == "ok" and _get_time(r) and _get_bytes(r)]
    names, along = list(dict.fromkeys(map(_format_name, timed))), ALONG.get(record.bench, ("requests",))
    handles: dict[str, Line2D] = {}

    def draw_panel(ax: Axes, name: str, results: list[Result]) -> None:
        handles.update(_draw_bytes(ax, results, names))
        ax.set_title(name, fontsize=9)
        ax.set_xlabel(WHAT[record.bench])

    def format_other_sizes(r: Result) -> str:
        return ", ".join(f"{name} {value}" for name, value in r.case.sizes.items() if name not in along)

    figure = _draw_panels(group_results(timed, format_other_sizes), BYTES_PANEL, draw_panel)
    _draw_title(figure, record, ": time per call against bytes")
    figure.supylabel("µs per eager call" if record.bench in ALONG else "µs per call", fontsize=10)
    if handles:
        draw_legend_below(figure, list(handles.values()))
    return figure


def _draw_bytes(ax: Axes, results: Sequence[Result], names: Sequence[str]) -> dict[str, Line2D]:
    handles = {}
    for place, name in enumerate(names):
        mine = sorted((r for r in results if _format_name(r) == name), key=_get_bytes)
        points = [(_get_bytes(r), t) for r in mine if (t := _get_time(r))]
        if points:
            handles[name] = _draw_line(ax, points, markersize=5, color=get_colour(place), marker=get_marker(place))
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
    timed = [r for r in record.results if r.outcome == "ok" and r.work and r.work.memory_bytes and get_gpu_time(r)]
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
    """Set up logarithmic axes, with a tick for each number of heads, as their intensities differ little. Roofs are 0 if
    unknown.
    """
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
    ax.set_xlabel("operations per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")


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
