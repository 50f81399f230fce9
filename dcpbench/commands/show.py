"""`dcpbench show`: the table of one or several runs in the terminal, or for a script."""

import sys
from typing import Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.show.terminal import console


def show(
    runs: opt.Runs,
    as_repeats: opt.AsRepeats = False,
    slo: opt.Slo = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows and findings as one JSON object, for scripts.")
    ] = False,
) -> int:
    """Print the table of one or several runs, in the width of the terminal.

    Example: dcpbench show runs/monday
    """
    from dcpbench.commands.runs import say_cut_short
    from dcpbench.reports import terminal_table
    from dcpbench.serving.load_words import parse_slo

    objectives = {} if slo is None else parse_slo(slo)
    if as_json:
        from dcpbench.reports import export, frames

        sys.stdout.write(export.dumps(frames.load(runs, as_repeats=as_repeats, slo=objectives)) + "\n")
        return 0
    table = terminal_table(runs, as_repeats=as_repeats, slo=objectives)
    say_cut_short(runs)
    console().print(table)
    return 0
