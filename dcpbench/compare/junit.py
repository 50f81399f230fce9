"""JUnit XML of a comparison, which GitLab, Jenkins and others show beside the tests."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from dcpbench.compare.words import label, range_text, ratio_text
from dcpbench.show.numbers import short_number
from dcpbench.syncs.formats.junit import add_suite, document, new_case

if TYPE_CHECKING:
    from dcpbench.compare.model import Comparison, PointResult, Row

ROWS, POINTS = "metrics", "points"
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(c: Comparison) -> str:
    """A case for each row and for each point that ran on one side only.

    Rows that a rule fails are failures, those that it cannot decide are skipped with what would decide them.
    """
    root = ET.Element("testsuites", name="dcpbench compare")
    add_suite(root, ROWS, [_row(point, row, c) for point in c.points for row in point.rows])
    rest = [_plain(f.point, f.rule, f.message) for f in c.fails if not f.metric]
    if rest:
        add_suite(root, POINTS, rest)
    return document(root)


def _row(point: PointResult, row: Row, c: Comparison) -> ET.Element:
    found = new_case(_legal(point.name), row.metric)
    text = f"{label(row)}: {short_number(row.a, 4)} → {short_number(row.b, 4)}, ratio {ratio_text(row)}{range_text(row)}: {row.verdict}"
    failures = [f for f in c.fails if f.point == point.name and f.metric == row.metric]
    if failures:
        message = _legal(failures[0].message)
        ET.SubElement(found, "failure", message=message, type=_legal(failures[0].rule)).text = text
    elif row.gate == "undecided":
        ET.SubElement(found, "skipped", message=_legal(f"undecided: {row.reason or text}"))
    else:
        ET.SubElement(found, "system-out").text = text
    return found


def _plain(point: str, rule: str, message: str) -> ET.Element:
    found = new_case(_legal(point), rule)
    ET.SubElement(found, "failure", message=_legal(message), type=rule).text = _legal(message)
    return found


def _legal(text: str) -> str:
    """XML has no way to write most control characters."""
    return _ILLEGAL.sub("\ufffd", text)
