"""Format a judged report as annotations of GitHub Actions, on the lines of a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.show.ci import MAX_ANNOTATIONS, format_annotation, format_annotation_lines
from dcpbench.syncs.site_text import (
    LEVELS,
    count_notes,
    format_advice,
    format_message,
    get_best_line,
    get_status,
    list_labels,
)

if TYPE_CHECKING:
    from dcpbench.syncs.sync_report import Report, Site


def render(report: Report) -> str:
    """Return at most ten annotations of each level, worst site first; the step summary has everything.

    Findings are errors; permissions that matched nothing and sites that add to an exceeded limit are warnings; sites
    that may stay and what the trace cannot show are notices.
    """
    return format_annotation_lines(*([*before, *sites, *behind] for before, sites, behind in _build_levels(report)))


def count_left_out(report: Report) -> int:
    """Return the number of sites, over all levels, for which `render` has no annotation left."""
    return sum(max(0, len(sites) - max(0, MAX_ANNOTATIONS - len(before))) for before, sites, _ in _build_levels(report))


def _build_levels(report: Report) -> list[tuple[list[str], list[str], list[str]]]:
    """Return the annotations of errors, warnings and notices: those before the sites, the sites,
    and those after them.
    """
    verdict = report.verdict
    sites = {
        level: [_format_site(level, site, report) for site in found] for level, found in _group_by_level(report).items()
    }
    errors = [format_annotation("error", f.message, "Hidden syncs") for f in verdict.findings_by_site.get("", ())]
    unknown = [format_annotation("error", reason, "The trace cannot answer") for reason in verdict.reasons]
    warnings = [format_annotation("warning", reason, "Not all is known") for reason in verdict.reasons]
    stale = [format_annotation("warning", text, "No longer needed") for text in verdict.stale]
    notices = [format_annotation("notice", note, "Not covered by this result") for note in count_notes(report)]
    return [
        ([*errors, *(unknown if verdict.status == "cannot answer" else [])], sites["error"], []),
        ([], sites["warning"], [*(warnings if verdict.status == "findings" else []), *stale]),
        ([], sites["notice"], notices),
    ]


def _group_by_level(report: Report) -> dict[str, list[Site]]:
    found: dict[str, list[Site]] = {"error": [], "warning": [], "notice": []}
    for site in report.sites:
        if not site.own:
            found[LEVELS.get(get_status(site, report.verdict), "notice")].append(site)
    return found


def _format_site(level: str, site: Site, report: Report) -> str:
    message = format_message(site, report.verdict)
    if site.allowed:
        message += f". Allowed: {site.allowed}"
    elif level != "notice":
        message += f". {format_advice(site)}"
    title = f"{site.rule} {site.kind}" + "".join(f", {word}" for word in list_labels(site, report.verdict))
    if not site.file or site.file.startswith(("/", "<")):
        return format_annotation(level, message, title)
    return format_annotation(level, message, title, file=site.file, line=get_best_line(site))
