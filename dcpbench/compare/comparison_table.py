"""Render a comparison for a terminal: what differs first, then rows by point, then the verdict. Fits 80 columns."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from rich.text import Text

from dcpbench.compare.comparison import WORST_FIRST
from dcpbench.compare.comparison_text import (
    count_launches,
    format_gate,
    format_interval,
    format_label,
    format_method,
    format_ratio,
    format_summary,
    format_verdicts,
    list_notes,
    list_unmatched,
)
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.compare.comparison import Comparison, PointResult, Row

MAX_POINTS = 40  # in a terminal, worst first; JSON has them all
MAX_DIFFERENCES = 20
STYLES = {
    "SLOWER": "red bold",
    "FASTER": "green bold",
    "MORE": "yellow bold",
    "FEWER": "yellow bold",
    "SAME": "dim",
    "UNDECIDED": "yellow",
}
HEAD = f"  {'':<18} {'A':>9} {'B':>9} {'B/A':>6} {'interval':>13}  verdict (+more)"


def render(c: Comparison, *, every: bool = False) -> list[Text]:
    """Return lines for `rich`, none of which is parsed as markup; `every` includes all points."""
    shown = c.points if every else c.points[:MAX_POINTS]
    lines = [Text(note, style="yellow") for note in list_notes(c)]
    lines += [Text(f"A  {_format_launches(c.a)}"), Text(f"B  {_format_launches(c.b)}")]
    lines += _format_differences(c)
    lines += [Text(line, style="yellow") for line in list_unmatched(c)]
    lines += [Text(), Text(HEAD, style="bold")]
    for point in shown:
        lines += _iter_point_lines(point)
    if len(c.points) > len(shown):
        lines.append(_format_left_out(c.points[len(shown) :]))
    lines += [Text(), Text(format_summary(c), style="bold"), Text(format_method(c))]
    lines += [Text(note) for note in c.notes]
    lines += list(_open_ends(c))
    if gate := format_gate(c):
        named = [*c.fails, *c.unjudged, *(f for f in c.findings if f.status == "undecided")][:MAX_DIFFERENCES]
        lines += [Text(f"- {f.message}", style="red" if f.status == "fails" else "yellow") for f in named]
        lines.append(Text(gate, style="red bold" if c.fails else "yellow" if c.findings else "green"))
    return lines


def _format_left_out(points: list[PointResult]) -> Text:
    """Return the number of points left out, by their worst verdict."""
    found = collections.Counter[str](WORST_FIRST[point.rank] for point in points if point.rows)
    worst = f" ({format_verdicts(found)})" if found else ""
    return Text(
        f"… and {format_count(len(points), 'more point')}{worst}; --all shows {'it' if len(points) == 1 else 'them'}."
    )


def _format_launches(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} launches)"


def _format_differences(c: Comparison) -> list[Text]:
    if not c.differences:
        return [Text("Environment and settings: the same.")]
    lines = [Text("Not the same in A and B:", style="bold")]
    lines += [Text(f"  {d.what}: {d.a} | {d.b}") for d in c.differences[:MAX_DIFFERENCES]]
    if len(c.differences) > MAX_DIFFERENCES:
        lines.append(Text(f"  and {len(c.differences) - MAX_DIFFERENCES} more"))
    return lines


def _iter_point_lines(point: PointResult) -> Iterator[Text]:
    rates = point.output_tok_s  # of decode; other workloads have rows for it
    rate_text = f": {' → '.join(format_short_number(rate, 4) for rate in rates)} tok/s" if rates else ""
    yield Text(point.name + rate_text, style="bold")
    if point.other_name:
        yield Text(f"  B: {point.other_name}")
    warnings = [f"{side}: {', '.join(m)}" for side, m in (("A", point.warnings_a), ("B", point.warnings_b)) if m]
    if warnings:
        yield Text(f"  warnings of {'; of '.join(warnings)}", style="yellow")
    for row in point.rows:
        yield _format_row(row)
    if point.not_compared:
        yield Text(f"  not compared: {', '.join(map(str, point.not_compared))}", style="dim")


def _format_row(row: Row) -> Text:
    more = f" +{row.more_launches}" if row.more_launches and row.verdict == "UNDECIDED" else ""
    text = Text(
        f"  {format_label(row)[:18]:<18} {format_short_number(row.a, 4):>9} {format_short_number(row.b, 4):>9} {format_ratio(row):>6} {format_interval(row):>13}  "
    )
    text.append(row.verdict, style=STYLES[row.verdict])
    text.append(more)
    return text


def _open_ends(c: Comparison) -> Iterator[Text]:
    """Yield the ways to decide undecided rows, each once."""
    rows = [row for point in c.points for row in point.rows if row.verdict == "UNDECIDED" and row.reason]
    decidable = sorted(row.more_launches for row in rows if row.judged and row.more_launches)
    if decidable:
        least, most = f"{decidable[0]} to " if decidable[-1] > decidable[0] else "", decidable[-1]
        needed = format_count(most, "more round") if c.paired else f"{count_launches(most, 'more ')} of each side"
        them = "it" if len(decidable) == 1 else "them"
        yield Text(f"UNDECIDED, {len(decidable)}×: {least}{needed} would decide {them} (+N in a row).")
    reasons: dict[str, int] = {}
    for row in rows:
        if not (row.judged and row.more_launches):
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    for reason, times in sorted(reasons.items(), key=lambda item: -item[1])[:6]:
        yield Text(f"UNDECIDED, {times}×: {reason}.")
