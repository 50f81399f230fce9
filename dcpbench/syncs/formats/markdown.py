"""Format a report as Markdown: for a step summary, a comment on a change, or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.show.ci import format_bullet_list, format_markdown_row
from dcpbench.show.text import format_count, format_markdown_code, format_markdown_text
from dcpbench.syncs.site_text import (
    BOUND_NOTE,
    NOTHING,
    count_notes,
    format_bubble,
    format_call_lines,
    format_copy,
    format_exception,
    format_microseconds,
    format_place,
    format_times,
    format_trace,
    format_waited_share,
    get_outer_op,
    get_site_name,
    get_status,
    is_timed,
    list_labels,
    list_rules,
)

if TYPE_CHECKING:
    from dcpbench.syncs.sync_report import Report, Site

MAX_SITES = 500  # in the table: a step summary may have 1 MiB
HEAD = ("", "Rule", "Where", "Operator", "Count", "Per step", "Wait total", "median", "p99", "Bubble ≤", "Copy")
SIGNS = {"finding": "❌", "counted": "⚠️", "known": "•", "allowed": "✅", "warm-up": "🔥", "may block": "◌", "own": "⚙️"}
LEGEND = (
    "❌ finding · ⚠️ adds to an exceeded limit · • within the limits · ✅ allowed · 🔥 warm-up only · "
    "◌ may block · ⚙️ the profiler's own"
)


def render(report: Report) -> str:
    """Render verdict, findings, sites, fixes, totals and coverage."""
    allowed = [
        f"{format_markdown_code(get_site_name(site))}: {format_markdown_text(site.allowed)}"
        for site in report.sites
        if site.allowed
    ]
    parts = [
        _render_verdict(report),
        _render_sites(report),
        _render_rules(report),
        _render_totals(report),
        format_bullet_list((format_markdown_text(format_trace(trace)) for trace in report.traces), "Traces"),
        format_bullet_list(allowed, "Allowed"),
        format_bullet_list((format_markdown_text(t) for t in report.verdict.stale), "No longer needed"),
        format_bullet_list(map(format_markdown_text, count_notes(report)), "Not covered by this result"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _render_verdict(report: Report) -> str:
    verdict = report.verdict
    heads = {
        "clean": f"✅ No hidden synchronisation beyond what may pass{format_markdown_text(format_exception(report))}",
        "cannot answer": "❔ The trace cannot answer",
        "findings": f"❌ Hidden synchronisation: {format_count(len(verdict.findings), 'finding')}",
    }
    overall = [format_markdown_text(f.message) for f in verdict.findings_by_site.get("", ())]
    lines = format_bullet_list([*overall, *map(format_markdown_text, verdict.reasons)])
    return f"## {heads[verdict.status]}" + (f"\n\n{lines}" if lines else "")


def _render_sites(report: Report) -> str:
    if not report.sites:
        return "No site was seen."
    rows = [
        HEAD,
        ("---", "---", "---", "---", *["---:"] * 6, "---"),
        *(_build_row(s, report) for s in report.sites[:MAX_SITES]),
    ]
    lines = list(map(format_markdown_row, rows))
    if len(report.sites) > MAX_SITES:
        lines += ["", f"{len(report.sites) - MAX_SITES} more sites are left out here; `--format json` has them."]
    return "\n".join([*lines, "", f"{LEGEND}. {BOUND_NOTE}"])


def _build_row(site: Site, report: Report) -> tuple[str, ...]:
    where = format_markdown_code(get_site_name(site)) + (
        f"<br>{format_markdown_code(format_place(site))}" if format_place(site) else ""
    )
    where += "".join(f"<br>{format_markdown_code(line)}" for line in format_call_lines(site))
    where += f"<br>called from {format_markdown_code(site.called_from)}" if site.called_from else ""
    count = str(site.count) + (f"<br>{site.waited:,} waited" if format_waited_share(site) else "")
    op = format_markdown_code(site.op or site.call) if site.op or site.call else NOTHING
    op += f"<br>by {format_markdown_code(get_outer_op(site))}" if get_outer_op(site) else ""
    labels = list_labels(site, report.verdict)
    kind = f"{format_markdown_text(site.rule)}<br>{format_markdown_text(site.kind)}" + (
        f"<br>*{', '.join(labels)}*" if labels else ""
    )
    return (
        SIGNS[get_status(site, report.verdict)],
        kind,
        where,
        op,
        count,
        *format_times(site),
        format_markdown_text(format_copy(site)) or NOTHING,
    )


def _render_rules(report: Report) -> str:
    return "\n".join(
        f"- **{rule.id} {rule.kind}**: {rule.why} *Fix:* {rule.fix}"
        + "".join(f" *Cause:* {format_markdown_text(cause)}" for cause in causes)
        for rule, causes in list_rules(report)
    )


def _render_totals(report: Report) -> str:
    t = report.totals
    cost = f" · wait {format_microseconds(t.wait_us)} · {format_bubble(t.bubble_us)}" if is_timed(t) else ""
    return f"**{format_count(t.syncs, 'synchronisation')}** at **{format_count(t.sites, 'site')}**{cost}"
