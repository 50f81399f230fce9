"""Make reports from record files alone: HTML, Markdown, CSV, figures and the terminal's table.

Nothing heavy is imported before a report is requested, so that the command line stays quick.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dcpbench.records.garbage_collection import stop_garbage_collector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import RenderableType

    from dcpbench.records.runs import Run

__all__ = ["render_terminal_table", "write_report"]

PAGE, TEXT, TABLE, FIGURES = "report.html", "report.md", "points.csv", "figures"
PICTURES = (".png", ".svg", ".pdf")


@stop_garbage_collector()
def write_report(
    folders: list[Path],
    out: Path,
    *,
    as_repeats: bool = False,
    slo: dict[str, float] | None = None,
    page_only: bool = False,
    pdf: bool = False,
    plotly: str = "",
    watch: Callable[[str], None] = lambda _: None,
    on_read: Callable[[list[Run]], None] = lambda _: None,
) -> list[Path]:
    """Write report.html, report.md, points.csv and figures/ for one or several runs into `out`; return the paths, page first.

    `page_only` limits this to points.csv and the page, with charts drawn only by its script. `pdf` writes figures as PDF,
    too. The page is self-contained, unless `plotly` names a file that it shares with other pages, by its address from the
    page. `watch` is called with the work in progress, `on_read` with the runs once they have been read.

    The folder is complete at any time: it has all of an earlier report, or all of this one (whole_files.py).

    With `as_repeats` the runs are passes over the same grid and shown as one, with how well they agree. `slo` are
    objectives in ms (`{"ttft": 2000, "itl": 60}`) for the answer, instead of those that the runs were measured with.
    Raise RecordsError for a folder without records, UsageError for no folder, and OutputError or DiskError if `out`
    cannot be written.
    """
    from dcpbench.records.disks import convert_output_errors
    from dcpbench.reports import dataframes, overview, plots, points_export, report_markdown, sections
    from dcpbench.reports.page.render import render_page
    from dcpbench.show.whole_files import write_folder

    watch("reading records")
    read = dataframes.load_frames(folders, as_repeats=as_repeats, slo=slo)
    on_read(read.runs)
    title = overview.format_title(read)
    again = shlex.join(["dcpbench", "report", *map(str, folders)])
    with (
        convert_output_errors(out, f"type `{again} -o ELSEWHERE`", "The records are safe."),
        write_folder(out, last=[TABLE, TEXT, PAGE], ours=_is_ours) as new,
    ):
        pictures = plots.draw_all(read, new / FIGURES, drawn=not page_only, pdf=pdf, watch=watch)
        watch("writing the page")
        parts = sections.build_sections(read, pictures)
        (new / PAGE).write_text(
            render_page(title, parts, read, pictures=not page_only, plotly=plotly), encoding="utf-8"
        )
        points_export.write_csv(read, new / TABLE)
        if page_only:
            return [out / PAGE, out / TABLE]
        (new / TEXT).write_text(report_markdown.render(title, parts, new), encoding="utf-8")
        drawn = [str(path.relative_to(new)) for p in pictures for path in (p.png, p.svg, p.pdf) if path]
    return [out / name for name in (PAGE, TEXT, TABLE, *drawn)]


def _is_ours(path: Path) -> bool:
    """Return True if a report may remove this entry of its output folder, which is one that a report wrote."""
    if path.name == FIGURES and path.is_dir():
        return all(picture.suffix in PICTURES and picture.is_file() for picture in path.iterdir())
    return path.name in (PAGE, TEXT, TABLE) and path.is_file()


def render_terminal_table(
    folders: list[Path],
    *,
    as_repeats: bool = False,
    slo: dict[str, float] | None = None,
    on_read: Callable[[list[Run]], None] = lambda _: None,
) -> RenderableType:
    """Return what `rich` prints about one or several runs; see `write_report` for options and errors."""
    from dcpbench.reports import dataframes, terminal_tables

    read = dataframes.load_frames(folders, as_repeats=as_repeats, slo=slo)
    on_read(read.runs)
    return terminal_tables.render(read)
