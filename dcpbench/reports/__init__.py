"""Reports from record files alone: HTML, Markdown, CSV, figures and the terminal's table.

Nothing heavy is imported before a report is asked for, so that the command line stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["cut_short", "terminal_table", "write_report"]


def write_report(
    folders: list[Path], out: Path, *, as_repeats: bool = False, slo: dict[str, float] | None = None
) -> list[Path]:
    """Write report.html, report.md, points.csv and figures/ about one or several runs into `out`; paths, page first.

    With `as_repeats` the runs are passes over the same grid and shown as one, with how well they agree. Files of an
    earlier report are written over. `slo` are objectives in ms (`{"ttft": 2000, "itl": 60}`) that the answer keeps to,
    instead of those that the runs were measured with. Raises RecordsError for a folder without records, UsageError for
    no folder and OutputError where `out` cannot be written.
    """
    from dcpbench.errors import OutputError
    from dcpbench.reports import export, frames, markdown, plots, sections
    from dcpbench.reports.page.render import render

    read = frames.load(folders, as_repeats=as_repeats, slo=slo)
    title = "dcpbench: " + ", ".join(run.name for run in read.runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures = plots.draw_all(read, out / "figures")
        told = sections.report(read, pictures)
        page, text, table = out / "report.html", out / "report.md", out / "points.csv"
        page.write_text(render(title, told, read), encoding="utf-8")
        text.write_text(markdown.render(title, told, out), encoding="utf-8")
        export.write_csv(read, table)
    except OSError as e:
        raise OutputError(f"cannot write the report into {out}: {e}; give another folder with -o.") from e
    return [page, text, table, *(path for p in pictures for path in (p.png, p.svg, p.pdf) if path)]


def cut_short(folder: Path) -> bool:
    """Whether the last line of a run's record file was cut short, by a crash or because it is being written."""
    from dcpbench import records

    return records.cut_short(folder)


def terminal_table(
    folders: list[Path], *, as_repeats: bool = False, slo: dict[str, float] | None = None
) -> RenderableType:
    """What `rich` prints about one or several runs; see `write_report` for options and errors."""
    from dcpbench.reports import frames, terminal

    return terminal.render(frames.load(folders, as_repeats=as_repeats, slo=slo))
