"""Implement `dcpbench import`: make runs from the results of another engine's benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands.command import Group, make_panel
from dcpbench.errors import ExitCode
from dcpbench.show.terminal import print_stderr

LAYOUT = make_panel("Facts that the result files lack")


class Engine(Group):
    """Hold the options for facts that result files do not contain."""

    model: str | None = LAYOUT("Name of the model. Default: that of the file.", metavar="NAME")
    tp: int | None = LAYOUT(
        "GPUs that shared one copy of the model: of vLLM tensor-parallel-size × data-parallel-size, of SGLang tp-size. "
        "Default: from the file or its name, else unknown, with no figures per GPU.",
        metavar="N",
    )
    dp: int | None = LAYOUT(
        "With --tp: attention data parallel replicas inside tp. Default: from the file or its name, else 1.",
        metavar="N",
    )
    dcp: int | None = LAYOUT(
        "With --tp: ranks that share the KV cache of one request. Default: from the file or its name, else 1.",
        metavar="N",
    )
    pp: int | None = LAYOUT(
        "With --tp: pipeline stages, each on its own tp GPUs. Default: from the file or its name, else 1.",
        metavar="N",
    )
    pcp: int | None = LAYOUT(
        "With --tp: vLLM's prefill-context-parallel ranks, each on its own tp GPUs. Default: from the file or its "
        "name, else 1.",
        metavar="N",
    )
    gpu: str | None = LAYOUT("Hardware, such as 'NVIDIA H200'. Default: from the file, else unknown.", metavar="NAME")
    dtype: str | None = LAYOUT(
        "Precision of weights, such as bf16 or fp8. Default: from the file, else unknown.", metavar="NAME"
    )
    input_len: int | None = LAYOUT(
        "Requested prompt tokens. Default: from the file or its name, else their average.",
        metavar="N",
    )
    output_len: int | None = LAYOUT(
        "Requested output tokens. Default: from the file or its name, else their average.", metavar="N"
    )


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER",
            help="Result files: JSON or JSON lines, with or without details; or folders of them, such as the tree "
            "of a `vllm bench sweep`.",
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="ENGINE",
            help="vllm: of `vllm bench serve --save-result`, with --save-detailed if possible; sglang: of "
            "`sglang.bench_serving`, with --output-details if possible; inferencex: rows of InferenceX; guidellm: its JSON report; "
            "aiperf: its artifact folder; vllm-forward: decode steps of `vllm bench forward --output-json`; sglang-one-batch: the "
            "result file of `sglang.bench_one_batch`.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="Run folder to make. Default: runs/DATE-TIME-import-ENGINE."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start over in a folder that already holds records.")] = False,
    *,
    engine: Engine,
) -> int:
    """Convert the results of another benchmark tool to a run, to show them with those of dcpbench.

    If a file has the times of each request, metrics are computed from them with our definitions; else the tool's own
    summary is used and marked. Missing facts stay unknown, and fields that are not read are listed. In a sweep, server
    settings become variants of a point, and runs become repeats.

    An unreadable result in a folder is reported and left out; the others are imported, and the exit code is 4.

    For example:

      dcpbench import results/*.json --from vllm --tp 8 --dcp 8 --gpu 'NVIDIA H200' -o runs/vllm

      dcpbench import results/20261121_101112 --from vllm -o runs/vllm-sweep

      dcpbench import results/1k1k --from vllm --tp 8 --gpu H200 --input-len 1024 --output-len 1024

      dcpbench import agg_*.json --from inferencex -o runs/inferencex

      dcpbench import benchmarks.json --from guidellm --tp 8 --gpu H200 -o runs/guidellm

      dcpbench report runs/monday runs/vllm -o runs/report
    """
    from dcpbench import imports

    done = imports.import_files(files, source, output, imports.Overrides(**vars(engine)), force=force)
    for sentence in done.notes:
        print_stderr(sentence)
    typer.echo(f"Wrote {done.path}")
    return ExitCode.FAILED if done.errors else 0
