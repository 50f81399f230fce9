"""Write results for CI systems: JUnit XML, annotations and the step summary of GitHub, and its Markdown."""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.show.text import make_printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_ANNOTATIONS = 10  # annotations of one level that GitHub shows for a step; it drops the others without a word
SUMMARY = "GITHUB_STEP_SUMMARY"  # environment variable with the file of the step summary, if there is one
SUMMARY_BYTES = 1_000_000  # GitHub drops a summary of more than 1 MiB as a whole
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def make_junit_case(classname: str, name: str, *, file: str = "", line: int | None = None) -> ET.Element:
    """Return a test case, which passes unless it is given another result."""
    case = ET.Element("testcase", classname=_encode_xml(classname), name=_encode_xml(name), time="0")
    if file:
        case.set("file", _encode_xml(file))
    if line is not None:
        case.set("line", str(line))
    return case


def add_junit_result(case: ET.Element, kind: str, message: str = "", text: str = "", *, of: str = "") -> None:
    """Add the result of a test case: `failure`, `error` or `skipped` with a message and optionally a type.

    The kind `system-out` is the output of a passed test.
    """
    attributes = {"message": message, "type": of}
    result = ET.SubElement(case, kind, {name: _encode_xml(value) for name, value in attributes.items() if value})
    result.text = _encode_xml(text)


def format_junit(name: str, suites: Mapping[str, Sequence[ET.Element]]) -> str:
    """Return a JUnit XML file: the cases of each suite, with the number of each result per suite and in total."""
    root = ET.Element("testsuites", name=name)
    for title, cases in suites.items():
        suite = ET.SubElement(root, "testsuite", name=title, tests=str(len(cases)))
        for many, one in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(many, str(sum(case.find(one) is not None for case in cases)))
        suite.extend(cases)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _encode_xml(text: str) -> str:
    """Return text with each character that XML cannot represent, such as most control characters, replaced by U+FFFD."""
    return _NOT_XML.sub("\ufffd", text)


def format_annotation(level: str, message: str, title: str, *, file: str = "", line: int | None = None) -> str:
    """Return a workflow command of GitHub Actions, which marks a line of a change.

    `level` is `error`, `warning` or `notice`. Characters that would end the message, a property or their list are
    escaped.
    """
    properties = {"file": file, "line": str(line) if line and line > 0 else "", "title": title}
    escaped = {
        name: _encode_annotation(value).replace(":", "%3A").replace(",", "%2C")
        for name, value in properties.items()
        if value
    }
    listed = ",".join(f"{name}={value}" for name, value in escaped.items())
    return f"::{level} {listed}::{_encode_annotation(message)}"


def format_annotation_lines(*levels: Iterable[str]) -> str:
    """Return the annotations, a line each, with as many of each level as GitHub shows."""
    return "".join(f"{line}\n" for level in levels for line in list(level)[:MAX_ANNOTATIONS])


def _encode_annotation(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def append_step_summary(text: str) -> None:
    """Append Markdown to the step summary, if there is one; a failed write is a warning, not an error."""
    path = os.environ.get(SUMMARY)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as f:
            f.write(text.encode()[:SUMMARY_BYTES].decode(errors="ignore"))
    except OSError as e:
        sys.stderr.write(f"warning: {SUMMARY}={make_printable(path)} cannot be written ({e.strerror}).\n")


def format_markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def format_bullet_list(lines: Iterable[str], title: str = "") -> str:
    """Return a list under a heading; empty without lines."""
    text = "\n".join(f"- {line}" for line in lines)
    return f"### {title}\n\n{text}" if text and title else text
