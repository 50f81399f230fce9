"""The picture of a bench: its own, or time against tokens, a line for each variant, with synchronisations beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dcpbench.bench.shown.curves import write_curves
from dcpbench.bench.shown.roofline import write_roofline
from dcpbench.show.figures import (
    GREY,
    LINES,
    colour,
    columns_for,
    drawing,
    headline,
    legend_below,
    marker,
    measured_ticks,
    save,
    value_axis,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from dcpbench.bench.record import BenchRecord, Result, Timing

PANEL = (3.9, 3.1)
KINDS = ("eager", "host", "graph")
"""What is drawn of each variant, each with a line style of its own."""
X = "tokens"


OTHERS: dict[str, Callable[[BenchRecord, Path], None]] = {
    "attention": write_roofline,
    "exchange": write_curves,
    "collectives": write_curves,
    "merge": write_curves,
    "kv-gather": write_curves,
    "moe": write_curves,
}
"""Benches with a picture of their own; they have none on the CPU, where nothing of theirs is timed."""
WITHOUT = ("padded-slots",)
"""Benches that are told in numbers: two times that should be equal are no picture."""


def write_picture(record: BenchRecord, path: Path) -> None:
    """Write a PNG: times on a GPU; synchronisations alone on the CPU, where a time would be no performance."""
    if record.bench in WITHOUT:
        return
    if record.bench in OTHERS:
        if record.performance:
            OTHERS[record.bench](record, path)
        return
    ok = [r for r in record.results if r.outcome == "ok"]
    variants = list(dict.fromkeys(r.case.variant for r in ok))
    groups: dict[str, list[Result]] = {}
    for r in ok:
        groups.setdefault(_group(r), []).append(r)
    with drawing():
        columns = columns_for(len(groups))
        rows = -(-len(groups) // columns)
        figure = Figure((PANEL[0] * columns, PANEL[1] * rows + 0.9), layout="constrained")
        for place, (name, results) in enumerate(groups.items(), 1):
            ax = figure.add_subplot(rows, columns, place)
            draw = _draw_times if record.performance else _draw_syncs
            draw(ax, results, variants)
            ax.set_title("\n".join([name, *([_syncs(results, variants)] if record.performance else [])]), fontsize=9)
            if record.performance and place > len(groups) - columns:
                ax.set_xlabel(X)
        device = record.environment.device if record.environment else ""
        what = "time per call against tokens" if record.performance else "synchronisations per call (nothing is timed)"
        headline(figure, f"bench {record.bench}: {what}, {device}", width=40 if columns == 1 else 90)
        figure.supylabel("µs per call" if record.performance else "syncs per call", fontsize=10)
        if record.performance:
            legend_below(figure, _handles(variants, ok))
        save(figure, path, "png")


def _draw_times(ax: Axes, results: Sequence[Result], variants: Sequence[str]) -> None:
    for variant in variants:
        mine = sorted((r for r in results if r.case.variant == variant), key=lambda r: float(r.case.sizes[X]))
        for kind, line in zip(KINDS, LINES, strict=False):
            points = [(float(r.case.sizes[X]), t) for r in mine if (t := _timing(r, kind))]
            if not points:
                continue
            x, y = [p[0] for p in points], [p[1].median_us for p in points]
            spread = [[t.median_us - t.low_us for _, t in points], [t.high_us - t.median_us for _, t in points]]
            look = {"color": _colour(variants, variant), "linestyle": line, "marker": _marker(variants, variant)}
            ax.errorbar(x, y, yerr=spread, markersize=4, linewidth=1.5, capsize=2, **look)
    measured_ticks(ax, [float(r.case.sizes[X]) for r in results])
    value_axis(ax, [t.high_us for r in results for kind in KINDS if (t := _timing(r, kind))], "y")


def _draw_syncs(ax: Axes, results: Sequence[Result], variants: Sequence[str]) -> None:
    most = _most_syncs(results, variants)
    bars = ax.bar(list(most), list(most.values()), color=[_colour(variants, v) for v in most])
    ax.bar_label(bars, fmt="%g")
    value_axis(ax, list(most.values()), "y")


def _most_syncs(results: Sequence[Result], variants: Sequence[str]) -> dict[str, float]:
    """Synchronisations per call of each variant that has been counted, the most of all tokens."""
    counted = [(r.case.variant, r.syncs.per_call) for r in results if r.syncs]
    return {v: max(c for name, c in counted if name == v) for v in variants if any(name == v for name, _ in counted)}


def _syncs(results: Sequence[Result], variants: Sequence[str]) -> str:
    return "syncs: " + ", ".join(f"{v} {count:g}" for v, count in _most_syncs(results, variants).items())


def _timing(r: Result, kind: str) -> Timing | None:
    if kind == "graph":
        return r.graph.time if r.graph else None
    return r.time if kind == "eager" else r.host


def _group(r: Result) -> str:
    """`dcp 8, bf16`: everything but the variant and the tokens; a rank that owns none of them says so."""
    sizes = {name: value for name, value in r.case.sizes.items() if name not in (X, "owned")}
    words = [str(value) if isinstance(value, str) else f"{name} {value}" for name, value in sizes.items()]
    return ", ".join([*words, *(["no row owned"] if r.case.sizes.get("owned") == 0 else [])])


def _colour(variants: Sequence[str], variant: str) -> str:
    return colour(variants.index(variant))


def _marker(variants: Sequence[str], variant: str) -> str:
    return marker(variants.index(variant))


def _handles(variants: Sequence[str], results: Sequence[Result]) -> list[Line2D]:
    """Colours for variants, line styles for what was timed."""
    handles = [
        Line2D([], [], color=_colour(variants, v), marker=_marker(variants, v), markersize=5, label=v) for v in variants
    ]
    drawn = [k for k in KINDS if any(_timing(r, k) for r in results)]
    labels = {"eager": "eager", "host": "host time inside the call", "graph": "CUDA graph"}
    return handles + [Line2D([], [], color=GREY, linestyle=LINES[KINDS.index(k)], label=labels[k]) for k in drawn]
