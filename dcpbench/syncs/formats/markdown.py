"""Format a report as Markdown: for a step summary, a comment on a change, or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.show.ci import bullets, row
from dcpbench.show.text import counted, markdown, markdown_code
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.words import (
    BOUND_NOTE,
    NOTHING,
    bubble,
    copied,
    format_exception,
    format_trace,
    marks,
    microseconds,
    notes,
    place,
    standing,
    subject,
    times,
    waited_share,
)

if TYPE_CHECKING:
    from dcpbench.syncs.model import Report, Site

MAX_SITES = 500  # in the table: a step summary may have 1 MiB
HEAD = ("", "Rule", "Where", "Operator", "Count", "Per step", "Wait total", "median", "p99", "Bubble ≤", "Copy")
SIGNS = {"finding": "❌", "counted": "⚠️", "known": "•", "allowed": "✅", "warm-up": "🔥", "may block": "◌", "own": "⚙️"}
LEGEND = (
    "❌ finding · ⚠️ adds to an exceeded limit · • within the limits · ✅ allowed · 🔥 warm-up only · "
    "◌ may block · ⚙️ the profiler's own"
)


def render(report: Report) -> str:
    """Render verdict, findings, sites, fixes, totals and coverage."""
    allowed = [f"{markdown_code(subject(site))}: {markdown(site.allowed)}" for site in report.sites if site.allowed]
    parts = [
        _verdict(report),
        _sites(report),
        _rules(report),
        _totals(report),
        bullets((markdown(format_trace(trace)) for trace in report.traces), "Traces"),
        bullets(allowed, "Allowed"),
        bullets((markdown(t) for t in report.verdict.stale), "Of no use any more"),
        bullets(map(markdown, notes(report)), "What this cannot show"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(report: Report) -> str:
    verdict = report.verdict
    heads = {
        "clean": f"✅ No hidden synchronisation beyond what may pass{markdown(format_exception(report))}",
        "cannot answer": "❔ The trace cannot answer",
        "findings": f"❌ Hidden synchronisation: {counted(len(verdict.findings), 'finding')}",
    }
    overall = [markdown(f.message) for f in verdict.findings if not f.fingerprint]
    lines = bullets([*overall, *map(markdown, verdict.reasons)])
    return f"## {heads[verdict.status]}" + (f"\n\n{lines}" if lines else "")


def _sites(report: Report) -> str:
    if not report.sites:
        return "No site was seen."
    rows = [
        HEAD,
        ("---", "---", "---", "---", *["---:"] * 6, "---"),
        *(_row(s, report) for s in report.sites[:MAX_SITES]),
    ]
    lines = list(map(row, rows))
    if len(report.sites) > MAX_SITES:
        lines += ["", f"{len(report.sites) - MAX_SITES} more sites are left out here; `--format json` has them."]
    return "\n".join([*lines, "", f"{LEGEND}. {BOUND_NOTE}"])


def _row(site: Site, report: Report) -> tuple[str, ...]:
    where = markdown_code(subject(site)) + (f"<br>{markdown_code(place(site))}" if place(site) else "")
    where += f"<br>called from {markdown_code(site.called_from)}" if site.called_from else ""
    count = str(site.count) + (f"<br>{site.waited:,} waited" if waited_share(site) else "")
    words = marks(site, report.verdict)
    kind = f"{markdown(site.rule)}<br>{markdown(site.kind)}" + (f"<br>*{', '.join(words)}*" if words else "")
    return (
        SIGNS[standing(site, report.verdict)],
        kind,
        where,
        markdown_code(site.op or site.call) if site.op or site.call else NOTHING,
        count,
        *times(site),
        markdown(copied(site)) or NOTHING,
    )


def _rules(report: Report) -> str:
    ids = dict.fromkeys(site.rule for site in report.sites if not site.own and site.rule in BY_ID)
    causes = {i: dict.fromkeys(s.cause for s in report.sites if s.rule == i and s.cause) for i in ids}
    return "\n".join(
        f"- **{BY_ID[i].id} {BY_ID[i].kind}**: {BY_ID[i].why} *Fix:* {BY_ID[i].fix}"
        + "".join(f" *Cause:* {markdown(cause)}" for cause in causes[i])
        for i in ids
    )


def _totals(report: Report) -> str:
    t = report.totals
    cost = f" · wait {microseconds(t.wait_us)} · {bubble(t.bubble_us)}" if t.sites else ""
    return f"**{counted(t.syncs, 'synchronisation')}** at **{counted(t.sites, 'site')}**{cost}"
