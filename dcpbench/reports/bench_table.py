"""The table of a bench in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.bench_records import BenchRecord, Result, Timing

NARROW = "Intervals and marks are left out: this terminal has fewer than 130 columns. --json and -o have them."
NUMBERS = (int, float)
WIDE = 130
"""Columns of a terminal in which intervals and marks find room beside the rest."""
TIMES = ("eager µs", "host µs", "graph µs")
LEGEND = (
    "Per call: medians, 95 % intervals in parentheses. eager: calls back to back, GPU clock, the host's waiting in it.",
    "host: time the host spends inside a call while the GPU is {backlog:g} µs behind. graph: replayed, GPU time only.",
    "syncs: how often the host waits for the GPU in a call, counted apart from the timing ({detector}).",
)


def table(record: BenchRecord, width: int = WIDE) -> Table:
    """One row for each case; times only where they are of a GPU, and below WIDE columns without their intervals."""
    wide = width >= WIDE
    out = Table(title=f"bench {record.bench}", box=box.SIMPLE, title_justify="left", padding=(0, 1 if wide else 0))
    sizes = list(dict.fromkeys(name for r in record.results for name in r.case.sizes))
    out.add_column("variant", no_wrap=True)
    for name in sizes:
        number = all(isinstance(r.case.sizes.get(name, 0), NUMBERS) for r in record.results)
        out.add_column(name, justify="right" if number else "left", no_wrap=True)
    for name in (*(TIMES if record.performance else ()), "syncs"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("correct")
    if record.performance and wide:
        out.add_column("marks")
    refused = {r.case.variant for r in record.results if r.graph and not r.graph.captured}
    for r in record.results:
        out.add_row(*_row(r, sizes, refused, performance=record.performance, wide=wide))
    return out


def legend(record: BenchRecord, width: int = WIDE) -> list[str]:
    """What the columns mean."""
    detector = next((r.syncs.detector for r in record.results if r.syncs), "not counted")
    lines = (*LEGEND, NARROW) if record.performance and width < WIDE else LEGEND if record.performance else LEGEND[-1:]
    return [line.format(backlog=record.settings.backlog_us, detector=f"detector: {detector}") for line in lines]


def _row(r: Result, sizes: Sequence[str], refused: set[str], *, performance: bool, wide: bool) -> list[str]:
    cells = [r.case.variant, *(_size(r.case.sizes.get(name, "")) for name in sizes)]
    if performance:
        times = [_time(t, wide=wide) for t in (r.time, r.host, r.graph.time if r.graph else None)]
        cells += [*times[:2], "refused" if r.case.variant in refused else times[2]]
    cells.append(f"{r.syncs.per_call:g}" if r.syncs else "")
    cells.append(_verdict(r))
    if performance and wide:
        cells.append(" ".join(r.marks))
    return cells


def _verdict(r: Result) -> str:
    if r.outcome != "ok":
        return f"[red]failed[/]: {escape(r.reason)}"
    return "[green]yes[/]" if r.correct else "[red bold]WRONG[/]"


def _size(value: float | str) -> str:
    return f"{value:,}" if isinstance(value, NUMBERS) else escape(value)


def _time(t: Timing | None, *, wide: bool) -> str:
    if t is None:
        return ""
    return f"{_us(t.median_us)} ({_us(t.low_us)}–{_us(t.high_us)})" if wide else _us(t.median_us)


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits
