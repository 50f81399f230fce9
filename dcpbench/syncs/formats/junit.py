"""JUnit XML, which GitLab, Jenkins and others show beside the tests."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dcpbench.syncs.gating.gate import blind
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.words import modules, sentence, standing, subject, told

if TYPE_CHECKING:
    from dcpbench.syncs.model import Report, Site

SITES, LIMITS, TRACES = "hidden syncs", "limits", "traces"


def render(report: Report) -> str:
    """Three suites: a case for each site, one for each limit that is exceeded, and one for each trace.

    A finding is a failure, an allowed site is skipped with its reason, and a trace that cannot answer is an error.
    The profiler's own sites are left out.
    """
    root = ET.Element("testsuites", name="dcpbench syncs")
    sites = [s for s in report.sites if standing(s, report.verdict) != "own"]
    add_suite(root, SITES, _numbered([_site(site, report) for site in sites]))
    overall = [f for f in report.verdict.findings if not f.fingerprint]
    if overall:
        add_suite(root, LIMITS, [_failed("dcpbench.syncs.limits", f.reason, f.message, f.message) for f in overall])
    add_suite(root, TRACES, _traces(report))
    return document(root)


def document(root: ET.Element) -> str:
    """The file of all suites below `root`, whose numbers are summed up."""
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def add_suite(root: ET.Element, name: str, cases: list[ET.Element]) -> None:
    """Add a suite of these cases, with its numbers."""
    counts = {tag: sum(case.find(tag) is not None for case in cases) for tag in ("failure", "error", "skipped")}
    suite = ET.SubElement(root, "testsuite", name=name, tests=str(len(cases)), failures=str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    suite.extend(cases)


def _numbered(cases: list[ET.Element]) -> list[ET.Element]:
    """Lines of one function may share everything but the line: their names are told apart by a number."""
    seen: dict[str, int] = {}
    for case in cases:
        name = case.get("name", "")
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            case.set("name", f"{name} #{seen[name]}")
    return cases


def _site(site: Site, report: Report) -> ET.Element:
    """A site's case. Its name holds no numbers that change from run to run, as runners compare names."""
    dotted = modules(site)[0] if site.file and site.function else PurePosixPath(site.file).stem
    parts = (site.rule, site.kind, site.op or site.call, site.direction, f"in {subject(site)}", site.fingerprint)
    case = new_case(dotted.rpartition(".")[0] or dotted or site.range or site.kind, " ".join(p for p in parts if p))
    if site.file:
        case.set("file", site.file)
    if site.line is not None:
        case.set("line", str(site.line))
    rule, stands = BY_ID.get(site.rule), standing(site, report.verdict)
    text = sentence(site) + "".join(f"\nat {frame}" for frame in site.stack)
    if rule:
        text += f"\nWhy: {rule.why}" + (f"\nCause: {site.cause}" if site.cause else "") + f"\nFix: {rule.fix}"
    if stands == "finding":
        ET.SubElement(case, "failure", message=told(site, report.verdict), type=f"{site.rule} {site.kind}").text = text
    elif stands == "allowed":
        ET.SubElement(case, "skipped", message=f"allowed: {site.allowed}")
    else:
        ET.SubElement(case, "system-out").text = f"{stands}: {text}"
    return case


def _traces(report: Report) -> list[ET.Element]:
    """Each trace passes, or is an error where it cannot answer; so do reasons that no trace is to blame for."""
    cases = []
    blamed = set()
    for trace in report.traces:
        case = new_case("dcpbench.syncs.traces", trace.path)
        reasons = [r for r in report.verdict.reasons if r == blind(trace) or r.startswith(f"{trace.path} ")]
        blamed.update(reasons)
        if reasons:
            ET.SubElement(case, "error", message="; ".join(reasons), type="cannot answer")
        if trace.coverage.notes:
            ET.SubElement(case, "system-out").text = "\n".join(trace.coverage.notes)
        cases.append(case)
    for reason in report.verdict.reasons:
        if reason not in blamed:
            case = new_case("dcpbench.syncs.traces", "all traces")
            ET.SubElement(case, "error", message=reason, type="cannot answer")
            cases.append(case)
    return cases


def _failed(classname: str, name: str, message: str, text: str) -> ET.Element:
    case = new_case(classname, name)
    ET.SubElement(case, "failure", message=message, type=name).text = text
    return case


def new_case(classname: str, name: str) -> ET.Element:
    """One test, which passes unless it is given a failure or an error."""
    return ET.Element("testcase", classname=classname, name=name, time="0")
