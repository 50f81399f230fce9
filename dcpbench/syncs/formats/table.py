"""The table for people: worst site first, why and how to fix it, totals, and what the trace cannot show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dcpbench.show.terminal import drawn
from dcpbench.show.text import counted, path_end
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.words import (
    BOUND_NOTE,
    copied,
    marks,
    microseconds,
    per_step,
    place,
    standing,
    subject,
    waited_share,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from dcpbench.syncs.model import Report, Site, TraceSummary

NARROW = 110
"""Columns below which a table would break its words; sites are then listed below each other."""
STYLES = {
    "finding": "red",
    "counted": "yellow",
    "known": "",
    "allowed": "green",
    "warm-up": "dim",
    "may block": "dim",
    "own": "dim",
}
STATUS = {"clean": "green", "findings": "red bold", "cannot answer": "yellow bold"}


def render(report: Report, *, root: Path, width: int, terminal: bool) -> str:
    """The report as lines of at most `width` columns.

    Args:
        report: Judged and cleaned.
        root: Repository that relative paths lie in; hyperlinks lead there.
        width: Columns.
        terminal: Whether to use colours and hyperlinks.
    """

    def draw(console: Console) -> None:
        _sites(console, report, root)
        _rules(console, report)
        _totals(console, report)
        _lists(console, report)
        _coverage(console, report)
        _verdict(console, report)

    return drawn(draw, max(width, 20), colour=terminal)


def _sites(console: Console, report: Report, root: Path) -> None:
    if not report.sites:
        console.print("No synchronisation was seen.")
    elif console.width < NARROW:
        for site in report.sites:
            _block(console, site, report, root)
    else:
        console.print(_table(report, root, console.width))


def _table(report: Report, root: Path, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("rule", max_width=20)
    table.add_column("function (file:line)", overflow="fold", ratio=1)
    table.add_column("op", overflow="fold", max_width=max(18, width // 5))
    for name in ("count", "per step"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("wait\ntotal", "\nmedian", "\np99", "bubble\nat most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("copy", overflow="fold", max_width=14)
    room = max(24, width // 3)
    for site in report.sites:
        style = STYLES[standing(site, report.verdict)]
        table.add_row(
            _kind(site, report, style),
            _where(site, root, room),
            Text(_op(site)),
            _count(site),
            per_step(site.count_per_step),
            microseconds(site.wait_us),
            microseconds(site.wait_median_us),
            microseconds(site.wait_p99_us),
            microseconds(site.bubble_us),
            Text(copied(site, "\n")),
        )
    return table


def _count(site: Site) -> str:
    """How often, and below it how often there was something to wait for."""
    return f"{site.count}\n{site.waited:,} waited" if waited_share(site) else str(site.count)


def _kind(site: Site, report: Report, style: str) -> Text:
    words = marks(site, report.verdict)
    lines = [f"{site.rule}", site.kind, *([f"[{', '.join(words)}]"] if words else [])]
    return Text("\n".join(lines), style=style)


def _where(site: Site, root: Path, room: int) -> Text:
    """The function, and below it the place as a link."""
    text = Text(subject(site), style="bold")
    if place(site):
        text.append("\n")
        text.append_text(_link(site, root, room))
    if site.called_from:
        text.append(f"\ncalled from {site.called_from}", style=Style(bold=False))
    return text


def _link(site: Site, root: Path, room: int) -> Text:
    path = root / site.file
    style = Style(bold=False, link=f"{path.as_uri()}#{site.line or 1}" if _exists(path) else None)
    return Text(path_end(place(site), room), style=style)


def _exists(path: Path) -> bool:
    """A link to nowhere helps nobody; the program may have run on another machine."""
    try:
        return path.is_absolute() and path.is_file()
    except (OSError, ValueError):
        return False


def _block(console: Console, site: Site, report: Report, root: Path) -> None:
    """A site on a narrow terminal."""
    words = marks(site, report.verdict)
    head = Text(f"{site.rule} {site.kind}", style=STYLES[standing(site, report.verdict)] + " bold")
    head.append(f" [{', '.join(words)}]" if words else "")
    console.print(head, overflow="fold")
    for line in _where(site, root, max(16, console.width - 4)).split("\n"):
        console.print(Text("  ").append_text(line), overflow="fold")
    steps = "" if site.count_per_step is None else f" ({per_step(site.count_per_step)} per step)"
    waits = (microseconds(t) for t in (site.wait_us, site.wait_median_us, site.wait_p99_us))
    facts = [
        f"op {_op(site)}" if _op(site) else "",
        f"{counted(site.count, 'time')}{steps}" + (f", {waited_share(site)}" if waited_share(site) else ""),
        "wait {}, median {}, p99 {}".format(*waits),
        f"bubble at most {microseconds(site.bubble_us)}",
        f"copy {copied(site)}" if copied(site) else "",
    ]
    for fact in facts:
        if fact:
            console.print(Text(f"  {fact}"), overflow="fold")


def _op(site: Site) -> str:
    """The operator without torch's own name space, or the blocking call."""
    return site.op.removeprefix("aten::") or site.call


def _rules(console: Console, report: Report) -> None:
    """Each kind that occurs: why it waits, the usual way out, and the cause where the trace shows one."""
    for rule_id in dict.fromkeys(site.rule for site in report.sites if not site.own):
        rule = BY_ID.get(rule_id)
        if rule:
            console.print(Text.assemble((f"{rule.id} {rule.kind}", "bold"), f"  {rule.why}"))
            console.print(Text.assemble(("  fix: ", "bold"), rule.fix))
        for cause in dict.fromkeys(site.cause for site in report.sites if site.rule == rule_id and site.cause):
            console.print(Text.assemble(("  cause: ", "bold"), cause))
    console.print()


def _totals(console: Console, report: Report) -> None:
    t = report.totals
    console.print(
        f"Total: {counted(t.syncs, 'synchronisation')} at {counted(t.sites, 'site')}, wait {microseconds(t.wait_us)}, "
        f"bubble at most {microseconds(t.bubble_us)}."
    )
    if t.bubble_us is not None:
        console.print(BOUND_NOTE)


def _lists(console: Console, report: Report) -> None:
    """What is allowed and why, and which permissions are of no use."""
    for site in report.sites:
        if site.allowed:
            console.print(Text(f"allowed: {subject(site)}: {site.allowed}"))
    for text in report.verdict.stale:
        console.print(Text(f"of no use: {text}", style="yellow"))


def _coverage(console: Console, report: Report) -> None:
    """Always printed: a detector that saw nothing must not look like a program that does nothing."""
    console.print()
    for trace in report.traces:
        console.print(Text(_trace(trace)))
    notes: dict[str, int] = {}
    for trace in report.traces:
        for note in trace.coverage.notes:
            notes[note] = notes.get(note, 0) + 1
    if notes:
        console.print(Text("What this cannot show:", style="bold"))
    for note, times in notes.items():
        some = f" ({times} of {len(report.traces)} traces)" if times < len(report.traces) else ""
        console.print(Text(f"  - {note}{some}"))


def _trace(trace: TraceSummary) -> str:
    """A trace, and what was seen in it."""
    seen = trace.coverage
    facts = [] if trace.rank is None else [f"rank {trace.rank}"]
    if seen.detector == "scan":
        facts += [
            f"{trace.steps} steps ({seen.steps_from})" if trace.steps else "no steps",
            f"{seen.gpu_events:,} GPU events",
            f"{seen.runtime_events:,} runtime calls",
            f"{seen.driver_events:,} driver calls",
            f"{seen.sync_events:,} cuda_sync events",
            f"stacks: {seen.stacks}",
        ]
    else:
        facts += [seen.detector, *([f"{trace.steps} steps"] if trace.steps else [])]
    if trace.gpu_idle_us is not None:
        facts.append(f"GPU idle {microseconds(trace.gpu_idle_us)} of {microseconds(trace.span_us)}")
    if not seen.complete:
        facts.append("INCOMPLETE")
    return f"Seen in {trace.path}: {', '.join(facts)}"


def _verdict(console: Console, report: Report) -> None:
    """Last, as it is what one looks for."""
    verdict = report.verdict
    console.print()
    for finding in verdict.findings:
        console.print(Text(f"- {finding.message}", style=STYLES["finding"]))
    for reason in verdict.reasons:
        console.print(Text(f"- {reason}", style=STYLES["counted"]))
    console.print(Text(summary(report), style=STATUS[verdict.status]))


def summary(report: Report) -> str:
    """The verdict in one line."""
    verdict = report.verdict
    if verdict.status == "findings":
        return f"{counted(len(verdict.findings), 'finding')}: exit code {verdict.exit_code}."
    if verdict.status == "cannot answer":
        return f"This cannot be answered: exit code {verdict.exit_code}."
    return f"Clean, nothing beyond what may pass: exit code {verdict.exit_code}."
