"""`dcpbench syncs corpus` and `speed`: options alone. Nothing heavy is imported at the top."""

from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands.command import command
from dcpbench.commands.syncs import OUTPUT, READ, Force, Output, app

__all__ = ["app"]

PANEL = "Whether it can be believed"
AsJson = Annotated[bool, OUTPUT("--json", help="Print the result as JSON. Default: no.")]


@command(app, rich_help_panel=PANEL)
def corpus(
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RECORD]",
            show_default=False,
            help="Records of earlier runs (corpus.json), to print their table again. Default: run the corpus here.",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        OUTPUT(
            "--keep",
            metavar="FOLDER",
            help="Leave the record and the traces there. Default: they are removed.",
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
    force: Force = False,
) -> int:
    """Run small programs with a known number of synchronisations, and print each detector's precision and recall.

    With a GPU: the clock, behind 20 ms of queued work, which decides what is true; the live detector; torch's own
    set_sync_debug_mode; scan, with and without Python stacks and cuda_sync events. Everywhere: the dry run.

    Exit codes: 0 as documented · 1 a detector is worse than that, or the clock disagrees · 2 options that cannot be
    used.

    For example: dcpbench syncs corpus --keep corpus-here
    """
    from dcpbench.syncs import checks

    return checks.corpus(records or [], keep=keep, as_json=as_json, output=output, force=force)


@command(app, rich_help_panel=PANEL)
def speed(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", show_default=False, help="A real trace, which is repeated.")
    ],
    size: Annotated[
        str,
        READ(
            "--size",
            metavar="SIZE",
            help="Size of the trace that is made of it, such as 140MB or 1GB.",
        ),
    ] = "140MB",
    hta: Annotated[
        Path | None,
        READ(
            "--hta",
            metavar="PYTHON",
            help="A Python in whose environment "
            "HolisticTraceAnalysis is installed; its loader is then timed in turns with scan. Default: none.",
        ),
    ] = None,
    runs: Annotated[int, READ("--runs", metavar="N", help="Runs of each; the fastest counts.")] = 3,
    keep: Annotated[
        Path | None,
        OUTPUT(
            "--keep",
            metavar="FILE",
            help="Leave the trace that is made there. Default: it is removed.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Time scan and measure its memory on a trace of any size, made by repeating a real one.

    Exit codes: 0 timed · 2 options or input that cannot be used.

    For example: dcpbench syncs speed trace.json.gz --size 1GB --hta ~/hta/bin/python
    """
    from dcpbench.syncs import checks

    return checks.speed(trace, size, hta=hta, runs=runs, keep=keep, as_json=as_json)
