"""Implement `dcpbench report`: write the report of one or several runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.show.terminal import ProgressLine

if TYPE_CHECKING:
    from dcpbench.records.runs import Run


def report(
    runs: opt.Runs,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: RUN/report of the first run.")
    ] = None,
    *,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Write each figure also as PDF, in addition to PNG and SVG.")
    ] = False,
    answer: opt.JoinedReportOptions,
) -> int:
    """Write a report of one or several runs: which layout to take, tables, figures and one self-contained HTML page.

    Example: dcpbench report runs/monday runs/tuesday --as-repeats --slo ttft=2000,itl=60 -o runs/report
    """
    from dcpbench.commands.point_runner import format_no_report, print_if_unjudged, print_left_out, print_paths
    from dcpbench.launch.stopping import print_when_stopped
    from dcpbench.reports import write_report

    out = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report"
    options = answer.of_runs
    read: list[Run] = []
    with print_when_stopped(format_no_report(runs)), ProgressLine() as line:
        paths = write_report(runs, out, pdf=pdf, watch=line, on_read=read.extend, **options)
    print_left_out(read)
    if answer.slo is not None:
        print_if_unjudged(runs, answer.slo)
    print_paths(paths, sys.stdout)
    return 0
