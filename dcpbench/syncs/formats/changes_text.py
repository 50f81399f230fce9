"""Format a comparison of two reports: a table for terminals, Markdown for a pull request."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from dcpbench.show.ci import format_bullet_list, format_markdown_row
from dcpbench.show.terminal import render_to_text
from dcpbench.show.text import format_count, format_markdown_code, format_markdown_text, make_printable
from dcpbench.syncs.site_changes import ChangeKind
from dcpbench.syncs.site_text import NOTHING, format_microseconds, format_per_step

if TYPE_CHECKING:
    from rich.console import Console

    from dcpbench.syncs.site_changes import ReportChanges, SiteChange, SiteCost

STYLES = {ChangeKind.NEW: "red", ChangeKind.WORSE: "red", ChangeKind.BETTER: "green", ChangeKind.GONE: "green"}
SIGNS = {ChangeKind.NEW: "❌", ChangeKind.WORSE: "❌", ChangeKind.BETTER: "✅", ChangeKind.GONE: "✅"}
ARROW = " → "
MAX_TABLE_CHARS = 50_000  # of the Markdown table; a comment may have 65,536 characters
MEASURED_ONCE = (
    "Counts are exact. Times are those of one recording each; a site is worse or better by them only beyond --tolerance and "
    "--min-us."
)


def render_table(changes: ReportChanges, *, width: int, terminal: bool) -> str:
    """Render the changed sites and the summary as lines of at most `width` columns."""

    def draw(console: Console) -> None:
        if shown := _list_changed(changes):
            console.print(_build_table(shown, _get_unit(changes)))
            console.print(MEASURED_ONCE, style="dim")
        for reason in changes.reasons:
            console.print(make_printable(reason), style="yellow")
        console.print(format_summary(changes))

    return render_to_text(draw, max(width, 20), colour=terminal)


def _build_table(shown: list[SiteChange], unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("change")
    table.add_column("rule")
    table.add_column("function (file:line)", overflow="fold", ratio=1)
    for name in (f"count\nper {unit}", f"bubble\nper {unit}", f"wait\nper {unit}"):
        table.add_column(name, justify="right")
    for change in shown:
        site, style = change.latest, "" if change.allowed else STYLES.get(change.kind, "")
        where = "\n".join(map(make_printable, [site.name, *_list_places(change)]))
        cells = (f"{site.rule}\n{site.kind}", where, *_format_costs(change, "\n→ ", "\n"))
        table.add_row(Text("\n".join(map(make_printable, _list_kinds(change))), style=style), *map(Text, cells))
    return table


def render_markdown(changes: ReportChanges) -> str:
    """Render a heading with the verdict, the changed sites as a table, and why reports cannot be compared."""
    unit, shown, head = _get_unit(changes), _list_changed(changes), "✅ No new or worse synchronisation"
    if changes.reasons:
        head = "❔ The traces cannot be compared"
    elif changes.failing:
        head = f"❌ Hidden synchronisation: {format_count(len(changes.failing), 'new or worse site')}"
    titles = ("", "Change", "Rule", "Where", f"Count per {unit}", f"Bubble ≤ per {unit}", f"Wait per {unit}")
    heading = [titles, ("---", "---", "---", "---", "---:", "---:", "---:")]
    rows = [format_markdown_row(row) for row in (*heading, *map(_build_row, shown))]
    fitting = sum(chars <= MAX_TABLE_CHARS for chars in itertools.accumulate(map(len, rows)))
    table = "\n".join(rows[:fitting]) if shown else ""
    left = len(rows) - fitting
    more = f"{format_count(left, 'more site')} left out here; `--json` has them." if left else ""
    note = MEASURED_ONCE if shown else ""
    reasons = format_bullet_list(map(format_markdown_text, changes.reasons))
    parts = [f"## {head}", reasons, table, more, format_markdown_text(format_summary(changes)), note]
    return "\n\n".join(part for part in parts if part) + "\n"


def _build_row(change: SiteChange) -> tuple[str, ...]:
    site = change.latest
    where = "<br>".join(map(format_markdown_code, [site.name, *_list_places(change)]))
    sign = "✅" if change.allowed else SIGNS[change.kind]
    kinds = "<br>".join(map(format_markdown_text, _list_kinds(change)))
    return (sign, kinds, f"{format_markdown_text(site.rule)}<br>{site.kind}", where, *_format_costs(change))


def format_summary(changes: ReportChanges) -> str:
    """Return the numbers of sites by what happened to them, and the bubble of a step on both sides."""
    words = {kind: f"{changes.count(kind)} {'unchanged' if kind is ChangeKind.SAME else kind}" for kind in ChangeKind}
    parts = [words[kind] for kind in ChangeKind if changes.count(kind)]
    text = f"Sites: {', '.join(parts)}." if parts else "Neither side has a site that synchronises."
    allowed = sum(bool(change.allowed) for change in _list_changed(changes))
    if allowed:
        text += f" {allowed} of the changed ones {'is' if allowed == 1 else 'are'} allowed."
    bubbles = (changes.old_bubble_us, changes.new_bubble_us)
    if any(bubble is not None for bubble in bubbles):
        text += (
            f" Bubble per {_get_unit(changes)} of all sites, at most: {ARROW.join(map(format_microseconds, bubbles))}."
        )
    if changes.old_steps and changes.new_steps:
        text += f" Steps: {changes.old_steps:,}{ARROW}{changes.new_steps:,}."
    return text


def _list_changed(changes: ReportChanges) -> list[SiteChange]:
    return [change for change in changes.changes if change.kind is not ChangeKind.SAME]


def _get_unit(changes: ReportChanges) -> str:
    return "step" if changes.old_steps and changes.new_steps else "trace"


def _list_kinds(change: SiteChange) -> list[str]:
    """Return what happened to a site, such as `worse by count`, whether it moved, and why it is allowed."""
    by = f" by {change.reason}" if change.reason else ""
    allowed = [f"allowed: {change.allowed}"] if change.allowed else []
    return [f"{change.kind}{by}", *["moved"] * change.moved, *allowed]


def _list_places(change: SiteChange) -> list[str]:
    """Return the place of a site, and where it was if its file has another name."""
    places = [_format_place(change.latest)]
    if change.moved and change.old is not None:
        places.append(f"before: {_format_place(change.old)}")
    return [place for place in places if place]


def _format_place(site: SiteCost) -> str:
    return site.file if site.line is None or not site.file else f"{site.file}:{site.line}"


def _format_costs(change: SiteChange, between: str = ARROW, between_phases: str = ", ") -> list[str]:
    """Return count, bubble and wait as `old → new`, or as one value where both are the same."""
    sides = [side for side in (change.old, change.new) if side is not None]
    columns = (
        [_format_counts(side, between_phases) for side in sides],
        [format_microseconds(side.bubble_us) for side in sides],
        [format_microseconds(side.wait_us) for side in sides],
    )
    return [between.join(dict.fromkeys(column)) or NOTHING for column in columns]


def _format_counts(side: SiteCost, between_phases: str) -> str:
    if side.count_per_step is None:
        return f"{side.count:,} in all"
    text = format_per_step(side, between_phases)
    return f"{text} (+{side.outside:,} outside)" if side.outside else text
