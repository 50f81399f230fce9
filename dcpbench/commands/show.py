"""Implement `dcpbench show`: print the table of one or several runs in the terminal, or as JSON."""

import sys
from typing import Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.show.terminal import make_console


def show(
    runs: opt.Runs,
    answer: opt.JoinedReportOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows and findings as one JSON object, for scripts.")
    ] = False,
) -> int:
    """Print the results of one or several runs as a table.

    Example: dcpbench show runs/monday
    """
    from dcpbench.commands.point_runner import print_left_out
    from dcpbench.reports import render_terminal_table

    options = answer.of_runs
    if as_json:
        from dcpbench.reports import dataframes, points_export

        read = dataframes.load_frames(runs, **options)
        text = points_export.format_json(read)
        print_left_out(read.runs)
        sys.stdout.write(text + "\n")
        return 0
    table = render_terminal_table(runs, on_read=print_left_out, **options)
    make_console().print(table)
    return 0
