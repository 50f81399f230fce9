"""Format a report as JUnit XML, which GitLab, Jenkins and others show next to the tests."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dcpbench.show.ci import add_junit_result, format_junit, make_junit_case
from dcpbench.syncs.gating.gate import explain_no_answer
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.site_text import (
    format_message,
    format_sentence,
    get_best_line,
    get_site_name,
    get_status,
    list_dotted_names,
    list_trace_notes,
)

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from dcpbench.syncs.sync_report import Report, Site


def render(report: Report) -> str:
    """Return three suites: a case for each site, one for each limit that is exceeded, and one for each trace.

    A finding is a failure, an allowed site is skipped with its reason, and a trace that cannot answer is an error. The
    profiler's own sites are left out.
    """
    sites = [_build_case(s, report) for s in report.sites if get_status(s, report.verdict) != "own"]
    seen: Counter[str] = Counter()
    for case in sites:  # lines of one function may share everything but the line: a number makes their names unique
        name = case.get("name", "")
        seen[name] += 1
        if seen[name] > 1:
            case.set("name", f"{name} #{seen[name]}")
    limits = []
    for finding in report.verdict.findings_by_site.get("", ()):
        limits.append(make_junit_case("dcpbench.syncs.limits", finding.reason))
        add_junit_result(limits[-1], "failure", finding.message, finding.message, of=finding.reason)
    suites = {"hidden syncs": sites, "limits": limits, "traces": _build_trace_cases(report)}
    return format_junit("dcpbench syncs", {name: cases for name, cases in suites.items() if cases or name != "limits"})


def _build_case(site: Site, report: Report) -> Element:
    """Return a site's case; its name holds no numbers that change from run to run, as runners compare names."""
    dotted = list_dotted_names(site)[0] if site.file and site.function else PurePosixPath(site.file).stem
    parts = (site.rule, site.kind, site.op or site.call, site.direction, f"in {get_site_name(site)}", site.fingerprint)
    classname = dotted.rpartition(".")[0] or dotted or site.range or site.kind
    case = make_junit_case(classname, " ".join(p for p in parts if p), file=site.file, line=get_best_line(site))
    rule, status = BY_ID[site.rule], get_status(site, report.verdict)
    text = format_sentence(site) + "".join(f"\nat {frame}" for frame in site.stack)
    text += f"\nWhy: {rule.why}" + (f"\nCause: {site.cause}" if site.cause else "") + f"\nFix: {rule.fix}"
    if status == "finding":
        add_junit_result(case, "failure", format_message(site, report.verdict), text, of=f"{site.rule} {site.kind}")
    elif status == "allowed":
        add_junit_result(case, "skipped", f"allowed: {site.allowed}")
    else:
        add_junit_result(case, "system-out", text=f"{status}: {text}")
    return case


def _build_trace_cases(report: Report) -> list[Element]:
    """Return a case per trace, which passes or is an error if it cannot answer, and a case per reason that concerns no
    trace.
    """
    cases = []
    blamed = set()
    for trace in report.traces:
        case = make_junit_case("dcpbench.syncs.traces", trace.path)
        own = explain_no_answer(trace)
        reasons = [r for r in report.verdict.reasons if r == own or r.startswith(f"{trace.path} ")]
        blamed.update(reasons)
        if reasons:
            add_junit_result(case, "error", "; ".join(reasons), of="cannot answer")
        if found := list_trace_notes(trace):
            add_junit_result(case, "system-out", text="\n".join(found))
        cases.append(case)
    for reason in report.verdict.reasons:
        if reason not in blamed:
            case = make_junit_case("dcpbench.syncs.traces", "all traces")
            add_junit_result(case, "error", reason, of="cannot answer")
            cases.append(case)
    return cases
