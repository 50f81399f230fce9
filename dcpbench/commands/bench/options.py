"""Options that benches share, for the commands beside this file."""

from pathlib import Path
from typing import Annotated

import typer

WHAT = "What is run (comma lists)"
MEASURE = "How it is measured"
OUTPUT = "Output"

Heads = Annotated[
    str | None,
    typer.Option(
        "--heads",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Query heads of a DCP group. Default: 128 on a GPU; 8 on the CPU.",
    ),
]
Requests = Annotated[
    str | None,
    typer.Option(
        "--requests",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Requests of a decode step. Default: 1,8,32,"
        "128 on a GPU, 512 for merge and collectives, too; a few on the CPU.",
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(
        "--layers",
        metavar="N",
        rich_help_panel=WHAT,
        help="Calls of a pass. Default: as many sets of "
        "tensors as keep the L2 cache cold, or 16 where inputs were just written in an engine, too; 2 on the CPU.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        rich_help_panel=WHAT,
        help="Processes, one for each GPU. Default: all visible GPUs; 2 on the CPU.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        metavar="SECONDS",
        rich_help_panel=MEASURE,
        help="Time limit of each of a case's up to "
        "three timings; one stops earlier once its median is known within ±1 %, and is marked noisy otherwise.",
    ),
]
Backlog = Annotated[
    float,
    typer.Option(
        "--backlog",
        metavar="MICROSECONDS",
        rich_help_panel=MEASURE,
        help="GPU work queued before each call whose host time is taken: what a call that waits has to wait for.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        rich_help_panel=MEASURE,
        help="A bench of which nothing is heard for "
        "this long is hung, and ended; until its first case 300 s are allowed, however short this is.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        rich_help_panel=MEASURE,
        help="auto, cuda or cpu. auto takes the GPU "
        "where there is one. On the CPU results are checked and synchronisations counted by the dry run; nothing is "
        "timed.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Folder for the raw record "
        "(bench-NAME.json, every sample in it), a picture (bench-NAME.png) and the log. On the CPU, where nothing is "
        "timed, only benches that count synchronisations have a picture. Default: only print.",
    ),
]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Write over what is in -o.")]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the record as JSON on stdout, without samples.")
]
