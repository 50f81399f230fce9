"""Implement `dcpbench top`: watch a run in progress from another terminal."""

from pathlib import Path
from typing import Annotated

import typer


def top(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run's folder. Default: the newest below runs/ that is running."),
    ] = None,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", help="Time between two updates. Default: 1.", show_default=False),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the progress once, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per update, each on a line.")] = False,
) -> int:
    """Watch a running sweep, serve, server or verify from another terminal.

    Shows points, rates, the time left, the current point, and clocks, power and temperature of this machine's GPUs. It
    only reads the run's files and does not disturb it. It waits if the run has not begun. Without a terminal it prints
    a line for each change. It ends when the run ends, with the run's exit code if the files determine it (docs/top.md),
    and with 130 on Ctrl-C.

    For example:

      dcpbench top

      dcpbench top runs/monday | tee monday.log

      dcpbench top runs/monday --once --json
    """
    from dcpbench.plan.option_parsers import check_seconds
    from dcpbench.top import watch

    check_seconds("--every", every, 1)
    return watch.top(run, every=every, once=once, as_json=as_json)
