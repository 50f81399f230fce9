"""Annotations of GitHub Actions for a comparison; everything else is in the step summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.words import CPU_NOTE, summary
from dcpbench.show.ci import annotation, annotation_lines

if TYPE_CHECKING:
    from dcpbench.compare.model import Comparison

TITLE = "dcpbench compare"


def render(c: Comparison) -> str:
    """Failures as errors, changes for the worse and undecided rules as warnings, the verdicts as a notice."""
    errors = [annotation("error", f.message, f"{TITLE}: {f.rule}") for f in c.fails]
    failed = {(f.point, f.metric) for f in c.fails}
    warnings = [
        annotation("warning", f"{p.name}: {row.title} {row.verdict}, ratio {row.ratio or 0:.4f}", row.verdict)
        for p in c.points
        for row in p.rows
        if row.worse and (p.name, row.metric) not in failed
    ]
    warnings += [
        annotation("warning", f.message, f"undecided: {f.rule}") for f in c.findings if f.status == "undecided"
    ]
    notices = [annotation("notice", text, TITLE) for text in (summary(c), *([CPU_NOTE] if c.cpu else []))]
    return annotation_lines(errors, warnings, notices)
