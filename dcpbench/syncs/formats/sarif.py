"""Format a report as SARIF 2.1.0, which code scanning of GitHub and GitLab, and editors, read."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from dcpbench import __version__
from dcpbench.syncs.rules import BY_ID, RULES
from dcpbench.syncs.site_text import (
    LEVELS,
    count_notes,
    format_advice,
    format_message,
    format_place,
    get_best_line,
    get_status,
    list_dotted_names,
)

if TYPE_CHECKING:
    from dcpbench.syncs.rules import Rule
    from dcpbench.syncs.sync_report import Report, Site

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
FINGERPRINT = "dcpbenchSyncs/v1"
PROPERTIES = (  # fields of a site that become properties of a result, in camel case
    "kind op call range direction place line_is count count_per_step wait_us bubble_upper_bound_us bytes explicit "
    "waited called_from cause warmup_only may_block stack traces"
)
Json = dict[str, Any]


def render(report: Report) -> str:
    """Return one run with the sites as results; the profiler's own are left out."""
    results = [_build_result(site, report) for site in report.sites if get_status(site, report.verdict) != "own"]
    driver = {
        "name": "dcpbench syncs",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [_build_rule(rule) for rule in RULES],
    }
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": "dcpbench-syncs/"},
        "invocations": [_build_invocation(report)],
        "originalUriBaseIds": {ROOT: {"description": {"text": "Root of the repository."}}},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"totals": _drop_unknown(syncs=report.totals.syncs, bubbleUs=report.totals.bubble_us)},
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _build_rule(rule: Rule) -> Json:
    """Return a rule with its help, as text and as Markdown."""
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.kind.split("-")),
        "shortDescription": {"text": encode_text(rule.title)},
        "fullDescription": {"text": encode_text(rule.why)},
        "help": {"text": encode_text(f"{rule.why} Fix: {rule.fix}"), "markdown": f"{rule.why}\n\n**Fix:** {rule.fix}"},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["performance", "cuda", "synchronization"], "kind": rule.kind},
    }


def _build_result(site: Site, report: Report) -> Json:
    status = get_status(site, report.verdict)
    text = f"{format_message(site, report.verdict)}. {format_advice(site)}"
    result: Json = {
        "ruleId": site.rule,
        "ruleIndex": RULES.index(BY_ID[site.rule]),
        "level": LEVELS.get(status, "note"),
        "message": {"text": encode_text(text)},
        "locations": [_build_location(site)],
        "partialFingerprints": {FINGERPRINT: site.fingerprint},
        "occurrenceCount": max(1, site.count),
        "properties": _build_properties(site),
    }
    if status == "allowed":
        result["suppressions"] = [{"kind": "external", "justification": encode_text(site.allowed)}]
    return result


def _build_location(site: Site) -> Json:
    """Return the location: the file of the site, or the trace if no file is known; a region only with a known line."""
    location: Json = {}
    artifact = _build_artifact(site.file or (site.example.trace if site.example else ""))
    if artifact:
        line = get_best_line(site)
        region = {"region": {"startLine": line}} if site.file and line is not None and line > 0 else {}
        location["physicalLocation"] = {"artifactLocation": artifact, **region}
    if site.function:
        names = {"name": site.function, "fullyQualifiedName": list_dotted_names(site)[0], "kind": "function"}
        location["logicalLocations"] = [names]
    return location


def _build_artifact(path: str) -> Json:
    """Return a relative path below the root of the repository, an absolute one unchanged, or nothing for no path."""
    path = path.replace("\\", "/")
    if not path:
        return {}
    if path.startswith("/"):
        return {"uri": "file://" + quote(path)}
    if re.match(r"[A-Za-z]:/", path):
        return {"uri": "file:///" + quote(path, safe="/:")}
    return {"uri": quote(path.removeprefix("./")), "uriBaseId": ROOT}


def _build_properties(site: Site) -> Json:
    values = {**msgspec.structs.asdict(site), "place": format_place(site), "bubble_upper_bound_us": site.bubble_us}
    return _drop_unknown(**{re.sub("_(.)", lambda m: m[1].upper(), name): values[name] for name in PROPERTIES.split()})


def _build_invocation(report: Report) -> Json:
    """Return the status of the analysis, and notifications of what it could not see."""
    verdict = report.verdict
    notifications = [
        ("error" if verdict.status == "cannot answer" else "warning", reason) for reason in verdict.reasons
    ]
    notifications += [("error", f.message) for f in verdict.findings_by_site.get("", ())]
    notifications += [("warning", text) for text in verdict.stale] + [("note", note) for note in count_notes(report)]
    return {
        "executionSuccessful": verdict.status != "cannot answer",
        "exitCode": verdict.exit_code,
        "toolExecutionNotifications": [
            {"level": level, "message": {"text": encode_text(text)}} for level, text in notifications
        ],
    }


def _drop_unknown(**values: object) -> Json:
    """Return the values without unknown ones, and without numbers that JSON cannot represent."""
    known = {k: v for k, v in values.items() if v is not None and v not in ("", [])}
    return {k: v for k, v in known.items() if not isinstance(v, float) or abs(v) < float("inf")}


def encode_text(text: str) -> str:
    """Escape text as a SARIF message, in which braces are placeholders and brackets are links."""
    text = text.replace("{", "{{").replace("}", "}}")
    return re.sub(r"([\[\]])", r"\\\1", text)
