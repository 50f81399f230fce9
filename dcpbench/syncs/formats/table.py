"""Format a report as a table for terminals: worst site first, why and how to fix it, totals, and what the trace cannot show."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING

from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dcpbench.show.terminal import render_to_text
from dcpbench.show.text import fit_text, format_count, get_path_end
from dcpbench.syncs.site_text import (
    BOUND_NOTE,
    count_notes,
    format_bubble,
    format_call_lines,
    format_copy,
    format_exception,
    format_microseconds,
    format_place,
    format_times,
    format_trace,
    format_waited_share,
    get_best_line,
    get_outer_op,
    get_site_name,
    get_status,
    is_timed,
    list_labels,
    list_rules,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console, RenderableType

    from dcpbench.syncs.sync_report import Report, Site

NARROW = 110  # columns below which a table would break its words; sites are then listed below each other
STYLES = {"finding": "red", "counted": "yellow", "known": "", "allowed": "green"}  # by status; others are dim
STATUS = {"clean": "green", "findings": "red bold", "cannot answer": "yellow bold"}


def render(report: Report, *, root: Path, width: int, terminal: bool) -> str:
    """Render the report as lines of at most `width` columns.

    Args:
        report: Judged and cleaned.
        root: Repository that relative paths lie in; hyperlinks lead there.
        width: Columns.
        terminal: Whether to use colours and hyperlinks.
    """

    def draw(console: Console) -> None:
        sites = _render_sites(report, root, console.width)
        for part in chain(
            sites,
            _render_rules(report),
            _render_totals(report),
            _render_lists(report),
            _render_coverage(report),
            _render_verdict(report),
        ):
            console.print(part)

    return render_to_text(draw, max(width, 20), colour=terminal)


def _render_sites(report: Report, root: Path, width: int) -> Iterator[RenderableType]:
    if not report.sites:
        yield from () if report.verdict.reasons else ("No synchronisation was seen.",)
    elif width >= NARROW:
        yield _build_table(report, root, width)
    else:
        for site in report.sites:
            yield from _render_block(site, report, root, width - 4)


def _build_table(report: Report, root: Path, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("rule", max_width=20)
    table.add_column("function (file:line)", overflow="fold", ratio=1)
    table.add_column("op", overflow="fold", max_width=width // 5)
    for name in ("count", "per step", "wait\ntotal", "\nmedian", "\np99", "bubble\nat most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("copy", overflow="fold", max_width=14)
    for site in report.sites:
        labels = list_labels(site, report.verdict)
        kind = [site.rule, site.kind, *([f"[{', '.join(labels)}]"] if labels else [])]
        table.add_row(
            Text("\n".join(kind), style=_get_style(site, report)),
            _format_where(site, root, width // 3),
            Text(_format_op(site, "\n")),
            f"{site.count}\n{site.waited:,} waited" if format_waited_share(site) else str(site.count),
            *format_times(site, "\n"),
            Text(format_copy(site, "\n")),
        )
    return table


def _get_style(site: Site, report: Report) -> str:
    return STYLES.get(get_status(site, report.verdict), "dim")


def _format_where(site: Site, root: Path, width: int) -> Text:
    """Format the function and, below it, the place as a link."""
    text = Text(get_site_name(site), style="bold")
    if format_place(site):
        text.append("\n")
        text.append_text(_format_link(site, root, width))
    for line in format_call_lines(site):
        text.append(f"\n{fit_text(line, width)}", style=Style(bold=False, dim=True))
    if site.called_from:
        text.append(f"\ncalled from {site.called_from}", style=Style(bold=False))
    return text


def _format_link(site: Site, root: Path, width: int) -> Text:
    path, link = root / site.file, None
    with contextlib.suppress(OSError, ValueError):
        if path.is_absolute() and path.is_file():  # the program may have run on another machine
            link = f"{path.as_uri()}#{get_best_line(site) or 1}"
    return Text(get_path_end(format_place(site), width), style=Style(bold=False, link=link))


def _render_block(site: Site, report: Report, root: Path, width: int) -> Iterator[Text]:
    """Format a site for a narrow terminal."""
    labels = list_labels(site, report.verdict)
    head = Text(f"{site.rule} {site.kind}", style=_get_style(site, report) + " bold")
    yield head.append(f" [{', '.join(labels)}]" if labels else "")
    for line in _format_where(site, root, width).split("\n"):
        yield Text("  ").append_text(line)
    each, total, median, p99, _ = format_times(site)
    steps = "" if site.count_per_step is None else f" ({each} per step)"
    facts = (
        f"op {_format_op(site)}" if _format_op(site) else "",
        f"{format_count(site.count, 'time')}{steps}"
        + (f", {format_waited_share(site)}" if format_waited_share(site) else ""),
        f"wait {total}, median {median}, p99 {p99}" if is_timed(site) else "",
        format_bubble(site.bubble_us) if is_timed(site) else "",
        f"copy {format_copy(site)}" if format_copy(site) else "",
    )
    yield from (Text(f"  {fact}") for fact in facts if fact)


def _format_op(site: Site, between: str = " ") -> str:
    """Format the operator, without torch's namespace, and the one that called it; or the blocking call."""
    outer = get_outer_op(site).removeprefix("aten::")
    return (site.op.removeprefix("aten::") or site.call) + (f"{between}by {outer}" if outer else "")


def _render_rules(report: Report) -> Iterator[RenderableType]:
    """Yield each kind that occurs: why it waits, the usual fix, and the cause if the trace shows one."""
    for rule, causes in list_rules(report):
        yield Text.assemble((f"{rule.id} {rule.kind}", "bold"), f"  {rule.why}")
        yield Text.assemble(("  fix: ", "bold"), rule.fix)
        yield from (Text.assemble(("  cause: ", "bold"), cause) for cause in causes)
    yield ""


def _render_totals(report: Report) -> Iterator[str]:
    t = report.totals
    cost = f", wait {format_microseconds(t.wait_us)}, {format_bubble(t.bubble_us)}" if is_timed(t) else ""
    yield f"Total: {format_count(t.syncs, 'synchronisation')} at {format_count(t.sites, 'site')}{cost}."
    if t.bubble_us is not None:
        yield BOUND_NOTE


def _render_lists(report: Report) -> Iterator[Text]:
    """Yield what is allowed and why, and which permissions are of no use."""
    yield from (Text(f"allowed: {get_site_name(site)}: {site.allowed}") for site in report.sites if site.allowed)
    yield from (Text(f"of no use: {text}", style="yellow") for text in report.verdict.stale)


def _render_coverage(report: Report) -> Iterator[RenderableType]:
    """Yield what was seen, always: a detector that saw nothing must not look like a program that does nothing."""
    yield ""
    yield from (Text(format_trace(trace)) for trace in report.traces)
    found = count_notes(report)
    if found:
        yield Text("Not covered by this result:", style="bold")
    for note, count in found.items():
        some = f" ({count} of {len(report.traces)} traces)" if count < len(report.traces) else ""
        yield Text(f"  - {note}{some}")


def _render_verdict(report: Report) -> Iterator[RenderableType]:
    """Yield the verdict; it comes last, where readers look for it."""
    verdict = report.verdict
    yield ""
    yield from (Text(f"- {finding.message}", style=STYLES["finding"]) for finding in verdict.findings)
    yield from (Text(f"- {reason}", style=STYLES["counted"]) for reason in verdict.reasons)
    yield Text(format_summary(report), style=STATUS[verdict.status])


def format_summary(report: Report) -> str:
    """Format the verdict in one line."""
    verdict = report.verdict
    if verdict.status == "findings":
        return f"{format_count(len(verdict.findings), 'finding')}: exit code {verdict.exit_code}."
    if verdict.status == "cannot answer":
        seen = "" if report.sites else " No synchronisation was seen in what was recorded."
        return f"This cannot be answered: exit code {verdict.exit_code}.{seen}"
    return f"Clean{format_exception(report)}: no findings, exit code {verdict.exit_code}."
