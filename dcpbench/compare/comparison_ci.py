"""Write a comparison for CI: annotations of GitHub Actions, and JUnit XML, which other systems show with the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.comparison_text import format_change, format_summary, list_notes
from dcpbench.show import ci

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from dcpbench.compare.comparison import Comparison, PointResult, Row

TITLE = "dcpbench compare"


def format_github(c: Comparison) -> str:
    """Return failures and unjudged rules as errors, changes for the worse and undecided rules as warnings, verdicts as a notice."""
    errors = [ci.format_annotation("error", f.message, f"{TITLE}: {f.rule}") for f in c.fails]
    errors += [ci.format_annotation("error", f.message, f"not judged: {f.rule}") for f in c.unjudged]
    failed = {(f.point, f.metric) for f in c.fails}
    warnings = [
        ci.format_annotation("warning", f"{p.name}: {row.title} {row.verdict}: {format_change(row)}", row.verdict)
        for p in c.points
        for row in p.rows
        if row.is_worse and (p.name, row.metric) not in failed
    ]
    undecided = [f for f in c.findings if f.status == "undecided"]
    warnings += [ci.format_annotation("warning", f.message, f"undecided: {f.rule}") for f in undecided]
    notices = [ci.format_annotation("notice", text, TITLE) for text in (format_summary(c), *list_notes(c))]
    return ci.format_annotation_lines(errors, warnings, notices)


def format_junit(c: Comparison) -> str:
    """Return a case for each row and for each point that ran on one side only.

    Rows that a rule fails are failures, rows that it could not judge are errors, and rows that it cannot decide are skipped
    with what would decide them. A rule without any row is a separate error.
    """
    suites = {"metrics": [_make_case(point, row, c) for point in c.points for row in point.rows]}
    for finding in (*c.fails, *c.unjudged):
        if not finding.metric:
            case = ci.make_junit_case(finding.point, finding.rule)
            kind = "failure" if finding.status == "fails" else "error"
            ci.add_junit_result(case, kind, finding.message, finding.message, of=finding.rule)
            suites.setdefault("points", []).append(case)
    return ci.format_junit(TITLE, suites)


def _make_case(point: PointResult, row: Row, c: Comparison) -> Element:
    case = ci.make_junit_case(point.name, row.metric)
    text = f"{row.title}: {format_change(row)}: {row.verdict}"
    failure = next((f for f in c.fails if f.point == point.name and f.metric == row.metric), None)
    if failure:
        ci.add_junit_result(case, "failure", failure.message, text, of=failure.rule)
    elif row.gate == "unjudged":
        ci.add_junit_result(case, "error", f"not judged: {row.reason}", text)
    elif row.gate == "undecided":
        ci.add_junit_result(case, "skipped", f"undecided: {row.reason or text}")
    else:
        ci.add_junit_result(case, "system-out", text=text)
    return case
