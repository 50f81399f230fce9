"""Render a comparison as Markdown: for a step summary, a comment on a change, or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.words import (
    gate_text,
    how,
    interval_text,
    label,
    not_matched,
    notes_above,
    ratio_text,
    summary,
)
from dcpbench.show import ci
from dcpbench.show.ci import bullets
from dcpbench.show.numbers import short_number
from dcpbench.show.text import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.compare.model import Comparison, PointResult, Row

MOST = 300
"""Maximum number of points in the table; JSON has them all."""
MOST_NAMES = 5
SIGNS = {"SLOWER": "🔴", "FASTER": "🟢", "MORE": "▲", "FEWER": "▼", "SAME": "=", "UNDECIDED": "?"}
HEAD = "| Point | Metric | A | B | B/A | Interval | Verdict | |\n|---|---|--:|--:|--:|:-:|---|---|"


def render(c: Comparison, *, picture: str = "") -> str:
    """Return the verdict, what differs, rows, points that could not be compared, and how it was judged."""
    parts = [_verdict(c)]
    parts += [f"> {markdown(note)}" for note in notes_above(c)]
    parts.append(_differences(c))
    if picture:
        parts.append(f"![Ratio of B to A with its interval, for every metric of every point]({picture})")
    parts.append("\n".join([HEAD, *(_row(p, row) for p in c.points[:MOST] for row in p.rows)]))
    if len(c.points) > MOST:
        parts.append(f"{len(c.points) - MOST} more points are left out here; `--json` has them.")
    if lines := not_matched(c):
        parts.append(bullets(map(markdown, lines), "Not compared"))
    parts.append(bullets(map(markdown, (how(c), *c.notes))))
    return "\n\n".join(parts) + "\n"


def _verdict(c: Comparison) -> str:
    sign = _sign(c)
    head = f"## {sign} {markdown(summary(c))}"
    lines = bullets(markdown(f.message) for f in (*c.fails, *c.unjudged))
    gate = f"\n\n{markdown(gate_text(c))}" if c.rules else ""
    return head + gate + (f"\n\n{lines}" if lines else "")


def _sign(c: Comparison) -> str:
    """Return a tick if everything was decided and nothing is worse, else another sign."""
    rows = [row for point in c.points for row in point.rows]
    if c.fails or any(row.worse for row in rows):
        return "❌" if c.fails else "🔴"
    undecided = not rows or any(row.verdict == "UNDECIDED" for row in rows)
    return "❔" if undecided or c.findings else "✅"


def _differences(c: Comparison) -> str:
    sides = f"A: {_launches(c.a)} · B: {_launches(c.b)}"
    if not c.differences:
        return f"{sides}\n\nEnvironment and settings: the same."
    rows = [ci.row(map(markdown, (d.what, d.a, d.b))) for d in c.differences]
    return "\n".join([sides, "", "| Not the same | A | B |", "|---|---|---|", *rows])


def _launches(names: Sequence[str]) -> str:
    """Return the names of a side's launches; if there are many, the first ones."""
    return ", ".join(map(markdown, names[:MOST_NAMES])) + ("…" if len(names) > MOST_NAMES else "")


def _row(point: PointResult, row: Row) -> str:
    name = markdown(point.name) + (f"<br>B: {markdown(point.other_name)}" if point.other_name else "")
    marks = sorted({*point.marks_a, *point.marks_b})
    name += f"<br>*{markdown(', '.join(marks))}*" if marks else ""
    cells = (
        name,
        label(row),
        short_number(row.a, 4),
        short_number(row.b, 4),
        ratio_text(row),
        interval_text(row),
        f"{SIGNS[row.verdict]} {row.verdict}",
        markdown(row.reason),
    )
    return ci.row(cells)
