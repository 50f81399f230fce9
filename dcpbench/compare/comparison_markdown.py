"""Render a comparison as Markdown: for a step summary, a comment on a change, or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.comparison_text import (
    format_gate,
    format_interval,
    format_label,
    format_method,
    format_ratio,
    format_summary,
    list_notes,
    list_unmatched,
)
from dcpbench.show import ci
from dcpbench.show.ci import format_bullet_list
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_markdown_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.compare.comparison import Comparison, PointResult, Row

MAX_POINTS = 300  # maximum number of points in the table; JSON has them all
MAX_NAMES = 5
SIGNS = {"SLOWER": "🔴", "FASTER": "🟢", "MORE": "▲", "FEWER": "▼", "SAME": "=", "UNDECIDED": "?"}
HEAD = "| Point | Metric | A | B | B/A | Interval | Verdict | |\n|---|---|--:|--:|--:|:-:|---|---|"


def render(c: Comparison, *, picture: str = "") -> str:
    """Return the verdict, what differs, rows, points that could not be compared, and how it was judged."""
    parts = [_render_verdict(c)]
    parts += [f"> {format_markdown_text(note)}" for note in list_notes(c)]
    parts.append(_render_differences(c))
    if picture:
        parts.append(f"![Ratio of B to A with its interval, for every metric of every point]({picture})")
    parts.append("\n".join([HEAD, *(_render_row(p, row) for p in c.points[:MAX_POINTS] for row in p.rows)]))
    if len(c.points) > MAX_POINTS:
        parts.append(f"{len(c.points) - MAX_POINTS} more points are left out here; `--json` has them.")
    if lines := [*list_unmatched(c), *(f"{p.name}: {t}" for p in c.points for t in p.not_compared)]:
        parts.append(format_bullet_list(map(format_markdown_text, lines), "Not compared"))
    parts.append(format_bullet_list(map(format_markdown_text, (format_method(c), *c.notes))))
    return "\n\n".join(parts) + "\n"


def _render_verdict(c: Comparison) -> str:
    sign = _choose_sign(c)
    head = f"## {sign} {format_markdown_text(format_summary(c))}"
    lines = format_bullet_list(format_markdown_text(f.message) for f in (*c.fails, *c.unjudged))
    gate = f"\n\n{format_markdown_text(format_gate(c))}" if c.rules else ""
    return head + gate + (f"\n\n{lines}" if lines else "")


def _choose_sign(c: Comparison) -> str:
    """Return a tick if everything was decided and nothing is worse, else another sign."""
    rows = [row for point in c.points for row in point.rows]
    if c.fails or any(row.is_worse for row in rows):
        return "❌" if c.fails else "🔴"
    lacking = any(t.absent_in == "b" for point in c.points for t in point.not_compared)
    undecided = lacking or not rows or any(row.verdict == "UNDECIDED" for row in rows)
    return "❔" if undecided or c.findings else "✅"


def _render_differences(c: Comparison) -> str:
    sides = f"A: {_format_launches(c.a)} · B: {_format_launches(c.b)}"
    if not c.differences:
        return f"{sides}\n\nEnvironment and settings: the same."
    rows = [ci.format_markdown_row(map(format_markdown_text, (d.what, d.a, d.b))) for d in c.differences]
    return "\n".join([sides, "", "| Not the same | A | B |", "|---|---|---|", *rows])


def _format_launches(names: Sequence[str]) -> str:
    """Return the names of a side's launches; if there are many, the first ones."""
    return ", ".join(map(format_markdown_text, names[:MAX_NAMES])) + ("…" if len(names) > MAX_NAMES else "")


def _render_row(point: PointResult, row: Row) -> str:
    name = format_markdown_text(point.name) + (
        f"<br>B: {format_markdown_text(point.other_name)}" if point.other_name else ""
    )
    warnings = sorted({*point.warnings_a, *point.warnings_b})
    name += f"<br>*{format_markdown_text(', '.join(warnings))}*" if warnings else ""
    cells = (
        name,
        format_label(row),
        format_short_number(row.a, 4),
        format_short_number(row.b, 4),
        format_ratio(row),
        format_interval(row),
        f"{SIGNS[row.verdict]} {row.verdict}",
        format_markdown_text(row.reason),
    )
    return ci.format_markdown_row(cells)
