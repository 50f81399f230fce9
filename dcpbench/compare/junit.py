"""JUnit XML of a comparison, which GitLab, Jenkins and others show beside the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.compare.words import label, range_text, ratio_text
from dcpbench.show.ci import junit, junit_case, junit_result
from dcpbench.show.numbers import short_number

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from dcpbench.compare.model import Comparison, Finding, PointResult, Row

ROWS, POINTS = "metrics", "points"


def render(c: Comparison) -> str:
    """A case for each row and for each point that ran on one side only.

    Rows that a rule fails are failures, those that it cannot decide are skipped with what would decide them.
    """
    rows = [_row(point, row, c) for point in c.points for row in point.rows]
    rest = [_point(f) for f in c.fails if not f.metric]
    return junit("dcpbench compare", {ROWS: rows} | ({POINTS: rest} if rest else {}))


def _row(point: PointResult, row: Row, c: Comparison) -> Element:
    case = junit_case(point.name, row.metric)
    a, b = (short_number(value, 4) for value in (row.a, row.b))
    text = f"{label(row)}: {a} → {b}, ratio {ratio_text(row)}{range_text(row)}: {row.verdict}"
    failure = next((f for f in c.fails if f.point == point.name and f.metric == row.metric), None)
    if failure:
        junit_result(case, "failure", failure.message, text, of=failure.rule)
    elif row.gate == "undecided":
        junit_result(case, "skipped", f"undecided: {row.reason or text}")
    else:
        junit_result(case, "system-out", text=text)
    return case


def _point(failure: Finding) -> Element:
    case = junit_case(failure.point, failure.rule)
    junit_result(case, "failure", failure.message, failure.message, of=failure.rule)
    return case
