"""Workflow commands of GitHub Actions: annotations on the lines of a change."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.show.text import printable
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.words import advice, marks, standing, told

if TYPE_CHECKING:
    from dcpbench.syncs.model import Report, Site

MOST = 10
"""Annotations of one level that GitHub shows for a step; it drops the others without a word."""
SUMMARY = "GITHUB_STEP_SUMMARY"
"""Names the file of the step summary, where there is one."""
SUMMARY_BYTES = 1_000_000
"""GitHub drops a summary of more than 1 MiB as a whole."""
LEVELS = {
    "finding": "error",
    "counted": "warning",
    "known": "notice",
    "allowed": "notice",
    "warm-up": "notice",
    "may block": "notice",
}


def render(report: Report) -> str:
    """At most ten commands of each level, worst site first; the step summary has everything.

    Findings are errors; permissions that matched nothing and sites that add to an exceeded limit are warnings; sites
    that may stay and what the trace cannot show are notices.
    """
    lines: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    verdict = report.verdict
    lines["error"] += [
        command("error", f.message, {"title": "Hidden syncs"}) for f in verdict.findings if not f.fingerprint
    ]
    if verdict.status == "cannot answer":
        lines["error"] += [command("error", reason, {"title": "The trace cannot answer"}) for reason in verdict.reasons]
    for site in report.sites:
        level = LEVELS.get(standing(site, verdict))
        if level:
            lines[level].append(_annotation(level, site, report))
    if verdict.status == "findings":
        lines["warning"] += [command("warning", reason, {"title": "Not all is known"}) for reason in verdict.reasons]
    lines["warning"] += [command("warning", text, {"title": "Of no use any more"}) for text in verdict.stale]
    notes = dict.fromkeys(note for trace in report.traces for note in trace.coverage.notes)
    lines["notice"] += [command("notice", note, {"title": "What this cannot show"}) for note in notes]
    return "".join(f"{line}\n" for level in lines.values() for line in level[:MOST])


def left_out(report: Report) -> int:
    """Annotations that `render` has no room for, over all levels."""
    count = dict.fromkeys(("error", "warning", "notice"), 0)
    verdict = report.verdict
    for site in report.sites:
        level = LEVELS.get(standing(site, verdict))
        if level:
            count[level] += 1
    return sum(max(0, n - MOST) for n in count.values())


def _annotation(level: str, site: Site, report: Report) -> str:
    rule = BY_ID.get(site.rule)
    message = told(site, report.verdict)
    if site.allowed:
        message += f". Allowed: {site.allowed}"
    elif rule and level != "notice":
        message += f". {advice(site, rule.fix)}"
    title = f"{site.rule} {site.kind}" + "".join(f", {word}" for word in marks(site, report.verdict))
    properties = {"title": title}
    if site.file and not site.file.startswith(("/", "<")):
        properties["file"] = site.file
        if site.line is not None and site.line > 0:
            properties["line"] = str(site.line)
    return command(level, message, properties)


def command(level: str, message: str, properties: dict[str, str]) -> str:
    """One workflow command; what would end its message, a property or the list of them is escaped."""
    order = [name for name in ("file", "line", "title") if name in properties]
    listed = ",".join(f"{name}={_property(properties[name])}" for name in order)
    return f"::{level} {listed}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def step_summary(text: str) -> None:
    """Append Markdown to the step summary, if there is one; that it cannot be written is a warning, no failure."""
    path = os.environ.get(SUMMARY)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as f:
            f.write(text.encode()[:SUMMARY_BYTES].decode(errors="ignore"))
    except OSError as e:
        sys.stderr.write(f"warning: {SUMMARY}={printable(path)} cannot be written ({e.strerror}).\n")
