"""The table of a bench in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from dcpbench.bench.shown.bench_findings import compute_share, compute_speed_up, format_limits, list_baselines
from dcpbench.show.numbers import format_short_number

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from dcpbench.bench.bench_record import BenchRecord, Result, Timing

    Cell = Callable[[Result], str]

NARROW = "{what} are left out: this terminal has fewer than {columns} columns. --json and -o have them."
NUMBERS = (int, float)
WIDE, MEDIUM = 140, 100  # minimum terminal widths in columns for intervals and warnings, and for rates and errors
DETAILS = ("TB/s", "TFLOP/s", "GB/s", "wire KB", "error")
MEDIANS = "Per call: medians, 95 % intervals in parentheses."
LEGEND = {  # explanations of the columns, by the name of a column
    "eager µs": "eager: calls back to back, GPU clock, the host's waiting in it.",
    "graph µs": "graph: replayed from a CUDA graph, GPU time only.",
    "TB/s": "TB/s, TFLOP/s: what a call must read, write and compute on paper, over its time.",
    "GB/s": "GB/s: the minimum that a rank must receive, over the time; the bus bandwidth of collectives.",
    "wire KB": "wire KB: what a rank receives by the variant's own formula.",
    "of limit": "of limit: the least time that this machine allows for that (docs/benches.md), over the time taken.",
    "error": "error is ‖x − ref‖ / ‖ref‖ against fp64, of the worst rank.",
}
FRESH = ("exchange", "collectives")  # benches with inputs that an engine would also have just written
L2 = {
    True: "L2 cache: inputs lie in it, where an engine's step before them leaves them.",
    False: "L2 cache: cold, where a case is not marked l2_warm.",
}


def make_table(record: BenchRecord, width: int = WIDE) -> Table:
    """Return one row for each case, with times of a GPU only, and without their intervals in a narrow terminal."""
    wide = width >= WIDE
    sizes, same = _split_sizes(record.results)
    title = ", ".join([f"bench {record.bench}", *same])
    out = Table(title=title, box=box.SIMPLE, title_justify="left", padding=(0, 1 if wide else 0))
    out.add_column("variant", no_wrap=True)
    for name in sizes:
        number = all(isinstance(r.case.sizes.get(name, 0), NUMBERS) for r in record.results)
        out.add_column(name, justify="right" if number else "left", no_wrap=True)
    columns = _choose_columns(record, width)
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("correct")
    if record.performance and wide:
        out.add_column("warnings")
    shown_reasons: set[str] = set()
    for r in record.results:
        cells: list[str | Text] = [r.case.variant, *(_format_size(r.case.sizes.get(name, "")) for name in sizes)]
        cells += [*(cell(r) for cell in columns.values()), _format_verdict(r, shown_reasons)]
        shown_reasons.add(r.reason)
        out.add_row(*cells, *([" ".join(r.warnings)] if record.performance and wide else []))
    return out


def format_legend(record: BenchRecord, width: int = WIDE) -> list[str]:
    """Return the explanations of the columns, and the machine's limits."""
    columns = _choose_columns(record, width)
    lines = [MEDIANS, L2[record.bench in FRESH]] if record.performance else []
    lines += [line for name, line in LEGEND.items() if name in columns]
    lines += format_limits(record)
    if record.performance and width < WIDE:
        what, least = (
            ("Intervals and warnings", WIDE) if width >= MEDIUM else ("Intervals, warnings, rates and errors", MEDIUM)
        )
        lines.append(NARROW.format(what=what, columns=least))
    return lines


def _split_sizes(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Return the names of sizes that differ between results, which become columns, and the constant ones as text."""
    names = dict.fromkeys(name for r in results for name in r.case.sizes)
    values = {name: {r.case.sizes.get(name, "") for r in results} for name in names}
    differ = [name for name in names if len(values[name]) > 1 or len(results) == 1]
    return differ, [f"{name} {_format_size(next(iter(values[name])))}" for name in names if name not in differ]


def _choose_columns(record: BenchRecord, width: int) -> dict[str, Cell]:
    """Return the columns between sizes and verdict, as far as any result has a value."""
    results = record.results
    wide = width >= WIDE
    columns: dict[str, Cell] = {
        "eager µs": lambda r: _format_time(r.time, wide=wide),
        "graph µs": lambda r: _format_time(r.graph.time if r.graph else None, wide=wide),
        "TB/s": lambda r: _format_rate(r.bytes_s, 1e12),
        "TFLOP/s": lambda r: _format_rate(r.flop_s, 1e12),
        "GB/s": lambda r: _format_rate(r.received_bytes_s, 1e9),
        "wire KB": lambda r: _format_rate(r.work.comm_bytes or None, 1e3) if r.work else "",
        "of limit": lambda r: "" if (share := compute_share(r)) is None else f"{100 * share:.0f} %",
    }
    for name in list_baselines(record):
        columns[f"× {name}"] = lambda r, name=name: _format_ratio(compute_speed_up(r, name, results))  # type: ignore[misc]
    columns["error"] = lambda r: f"{r.error:.1e}" if r.error is not None else ""
    always = ("graph µs",) if record.performance else ()
    left_out = () if width >= MEDIUM else DETAILS
    return {
        name: cell
        for name, cell in columns.items()
        if name not in left_out and (name in always or any(map(cell, results)))
    }


def _format_verdict(r: Result, shown_reasons: Container[str]) -> Text:
    """Return the verdict as text; a reason already shown for an earlier case is not repeated."""
    if r.outcome != "ok":
        return Text.assemble(("failed", "red"), ", as above" if r.reason in shown_reasons else f": {r.reason}")
    return Text("yes", "green") if r.correct else Text("WRONG", "red bold")


def _format_size(value: float | str) -> str:
    return f"{value:,}" if isinstance(value, NUMBERS) else value


def _format_time(t: Timing | None, *, wide: bool) -> str:
    if t is None:
        return ""
    interval = f" ({format_short_number(t.low_us)}–{format_short_number(t.high_us)})" if wide else ""
    return format_short_number(t.median_us) + interval


def _format_rate(value: float | None, scale: float) -> str:
    return "" if value is None else format_short_number(value / scale)


def _format_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
