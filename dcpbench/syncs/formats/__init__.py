"""Format a judged report for its readers: one module per format, all from the same cleaned report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.syncs.formats import github, junit, markdown, sarif
from dcpbench.syncs.site_text import make_report_printable
from dcpbench.syncs.sync_report import encode_json

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.syncs.sync_report import Report

PLAIN = {
    "json": encode_json,
    "sarif": sarif.render,
    "junit": junit.render,
    "github": github.render,
    "markdown": markdown.render,
}
FORMATS = ("table", *PLAIN)
PLAIN_WIDTH = 140  # columns of a table in a file or a pipe


def check_format(name: str) -> None:
    """Raise UsageError for an unknown format."""
    if name not in FORMATS:
        raise UsageError(f"There is no format {name!r}; give one of {', '.join(FORMATS)}.")


def render_report(report: Report, form: str, *, root: Path, width: int = PLAIN_WIDTH, terminal: bool = False) -> str:
    """Return a judged report as text that ends with a line feed; empty if the format has no content.

    Args:
        report: Judged, with a verdict that defines the findings.
        form: One of FORMATS; any other raises UsageError.
        root: Repository for relative paths of sites.
        width: Columns of the table; the other formats have none.
        terminal: True if the table may hold colours and hyperlinks.
    """
    check_format(form)
    report = make_report_printable(report)
    if form in PLAIN:
        return PLAIN[form](report)
    from dcpbench.syncs.formats import table

    return table.render(report, root=root, width=width, terminal=terminal)
