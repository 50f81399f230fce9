"""Annotations of GitHub Actions for a comparison; everything else is in the step summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.words import CPU_NOTE, summary
from dcpbench.syncs.formats.github import MOST, command

if TYPE_CHECKING:
    from dcpbench.compare.model import Comparison


def render(c: Comparison) -> str:
    """Failures as errors, changes for the worse and undecided rules as warnings, the verdicts as a notice."""
    errors = [command("error", f.message, {"title": f"dcpbench compare: {f.rule}"}) for f in c.fails]
    failed = {(f.point, f.metric) for f in c.fails}
    warnings = [
        command("warning", f"{p.name}: {row.title} {row.verdict}, ratio {row.ratio or 0:.4f}", {"title": row.verdict})
        for p in c.points
        for row in p.rows
        if row.worse and (p.name, row.metric) not in failed
    ]
    warnings += [
        command("warning", f.message, {"title": f"undecided: {f.rule}"}) for f in c.findings if f.status == "undecided"
    ]
    notices = [command("notice", summary(c), {"title": "dcpbench compare"})]
    if c.cpu:
        notices.append(command("notice", CPU_NOTE, {"title": "dcpbench compare"}))
    return "".join(f"{line}\n" for level in (errors, warnings, notices) for line in level[:MOST])
