"""A comparison as Markdown: for a step summary, a comment on a change, or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.words import CPU_NOTE, gate_text, how, interval_text, label, not_matched, ratio_text, summary
from dcpbench.show.numbers import short_number
from dcpbench.show.text import markdown

if TYPE_CHECKING:
    from dcpbench.compare.model import Comparison, PointResult, Row

MOST = 300
"""Points in the table; JSON has them all."""
SIGNS = {"SLOWER": "🔴", "FASTER": "🟢", "MORE": "▲", "FEWER": "▼", "SAME": "=", "UNDECIDED": "?"}
HEAD = "| Point | Metric | A | B | B/A | Interval | Verdict | |\n|---|---|--:|--:|--:|:-:|---|---|"


def render(c: Comparison, *, picture: str = "") -> str:
    """Verdict first, then what differs, rows, points that could not be compared, and how it was judged."""
    parts = [_verdict(c)]
    if c.cpu:
        parts.append(f"> {CPU_NOTE}")
    parts.append(_differences(c))
    if picture:
        parts.append(f"![Ratio of B to A with its interval, for every metric of every point]({picture})")
    parts.append("\n".join([HEAD, *(_row(p, row) for p in c.points[:MOST] for row in p.rows)]))
    if len(c.points) > MOST:
        parts.append(f"{len(c.points) - MOST} more points are left out here; `--json` has them.")
    if lines := not_matched(c):
        parts.append("### Not compared\n\n" + "\n".join(f"- {markdown(line)}" for line in lines))
    parts.append("\n".join(f"- {markdown(line)}" for line in (how(c), *c.notes)))
    return "\n\n".join(parts) + "\n"


def _verdict(c: Comparison) -> str:
    sign = "❌" if c.fails else "🔴" if any(r.worse for p in c.points for r in p.rows) else "✅"
    head = f"## {sign} {markdown(summary(c))}"
    lines = [f"- {markdown(f.message)}" for f in c.fails]
    gate = f"\n\n{markdown(gate_text(c))}" if c.rules else ""
    return head + gate + ("\n\n" + "\n".join(lines) if lines else "")


def _differences(c: Comparison) -> str:
    sides = (
        "A: "
        + ", ".join(markdown(n) for n in c.a[:5])
        + ("…" if len(c.a) > 5 else "")  # noqa: PLR2004 -- as many as are shown
        + " · B: "
        + ", ".join(markdown(n) for n in c.b[:5])
        + ("…" if len(c.b) > 5 else "")  # noqa: PLR2004
    )
    if not c.differences:
        return f"{sides}\n\nEnvironment and settings: the same."
    rows = [f"| {markdown(d.what)} | {markdown(d.a)} | {markdown(d.b)} |" for d in c.differences]
    return "\n".join([sides, "", "| Not the same | A | B |", "|---|---|---|", *rows])


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
    return "| " + " | ".join(cells) + " |"
