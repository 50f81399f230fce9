"""Implement `dcpbench export`: write runs in another tool's format."""

from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.show.terminal import print_stderr


def export(
    runs: opt.Runs,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="vllm or sglang (files of their serving benchmarks), inferencex, gha (github-action-benchmark), "
            "bmf (Bencher), hud (PyTorch's benchmark database), prometheus (textfile collector), csv or "
            "parquet.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="File, or folder if the format has several files. Default: RUN/exports of the first run.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are already there.")] = False,
) -> int:
    """Write the points of runs in another tool's format.

    Functional runs on a CPU and replays are not exported to inferencex and hud, where results of different systems are
    compared, and are marked in all other formats. What a format cannot hold is left out, with a message.

    For example:

      dcpbench export runs/monday --to vllm -o vllm-results

      dcpbench export runs/monday --to gha -o bench

      dcpbench export runs/monday --to prometheus -o /var/lib/node_exporter/dcpbench.prom --force
    """
    from dcpbench import exports
    from dcpbench.commands.point_runner import print_left_out

    done = exports.export_runs(runs, to, output, force=force)
    print_left_out(done.runs)
    if done.note:
        print_stderr(done.note)
    for path in done.paths:
        typer.echo(f"Wrote {path}")
    return 0
