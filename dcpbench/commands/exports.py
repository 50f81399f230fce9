"""`dcpbench export` and `import`: their options. Nothing heavy at the top."""

from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands import options as opt

LAYOUT = "What the engine ran on, where its file does not say"

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="vllm or sglang (files of their serving benchmarks), inferencex, gha "
        "(github-action-benchmark), bmf (Bencher), hud (PyTorch's benchmark database), prometheus (textfile collector), "
        "csv or parquet.",
    ),
]
ExportTo = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="PATH",
        help="The file, or a folder where a format writes several. Default: RUN/exports of the first run.",
    ),
]
ForceExport = Annotated[bool, typer.Option("--force", help="Replace files that are already there.")]
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE|FOLDER",
        help="Result files: JSON or JSON lines, with or without details; or folders of them, such "
        "as the tree of a `vllm bench sweep`.",
    ),
]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="ENGINE",
        help="vllm: of `vllm bench serve --save-result`, with --save-detailed if "
        "possible; sglang: of `sglang.bench_serving`, with --output-details if possible.",
    ),
]
ImportTo = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="DIR", help="Run folder to make. Default: runs/DATE-TIME-import-ENGINE."),
]
ForceImport = Annotated[bool, typer.Option("--force", help="Start over in a folder that already holds records.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", rich_help_panel=LAYOUT, help="Name of the model. Default: as the file says."
    ),
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="N",
        rich_help_panel=LAYOUT,
        help="GPUs that shared one copy of the model: of vLLM "
        "tensor-parallel-size × data-parallel-size, of SGLang tp-size. Default: unknown, and nothing is said per GPU.",
    ),
]
Dp = Annotated[
    int | None,
    typer.Option(
        "--dp",
        metavar="N",
        rich_help_panel=LAYOUT,
        help="With --tp: attention data parallel replicas inside tp. Default: 1.",
    ),
]
Dcp = Annotated[
    int | None,
    typer.Option(
        "--dcp",
        metavar="N",
        rich_help_panel=LAYOUT,
        help="With --tp: ranks that shared the KV cache of one request. Default: 1.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        rich_help_panel=LAYOUT,
        help="With --tp: hardware, such as 'NVIDIA H200'. Default: unknown.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        rich_help_panel=LAYOUT,
        help="Of weights and KV cache, such as bf16 or fp8. Default: unknown.",
    ),
]


def export(runs: opt.Runs, to: To, output: ExportTo = None, force: ForceExport = False) -> None:
    """Write the points of runs in another tool's format.

    Functional runs on a CPU and replays never go to inferencex and hud, whose readers compare with others, and are
    marked everywhere else. What a format has no place for is left out with a sentence.

    For example:

      dcpbench export runs/monday --to vllm -o vllm-results

      dcpbench export runs/monday --to gha -o bench

      dcpbench export runs/monday --to prometheus -o /var/lib/node_exporter/dcpbench.prom --force
    """
    from dcpbench import exports
    from dcpbench.show.terminal import say

    done = exports.export(runs, to, output, force=force)
    if done.note:
        say(done.note)
    for path in done.paths:
        typer.echo(f"Wrote {path}")


def import_(
    files: Files,
    source: From,
    output: ImportTo = None,
    force: ForceImport = False,
    model: ModelName = None,
    tp: Tp = None,
    dp: Dp = None,
    dcp: Dcp = None,
    gpu: Gpu = None,
    dtype: Dtype = None,
) -> None:
    """Make a run of another engine's benchmark results, to show them beside ours.

    With times of each request our definitions are computed from these; without them the tool's own summary is taken,
    and marked. What a file does not say stays unknown, and what of it is not read is named. Of a sweep, settings of the
    server are variants of a point and its runs are repeats.

    For example:

      dcpbench import results/*.json --from vllm --tp 8 --dcp 8 --gpu 'NVIDIA H200' -o runs/vllm

      dcpbench import results/20261121_101112 --from vllm -o runs/vllm-sweep

      dcpbench report runs/monday runs/vllm -o both
    """
    from dcpbench import imports
    from dcpbench.show.terminal import say

    told = imports.Told(model=model, tp=tp, dp=dp, dcp=dcp, gpu=gpu, dtype=dtype)
    done = imports.import_files(files, source, output, told, force=force)
    for sentence in done.notes:
        say(sentence)
    typer.echo(f"Wrote {done.path}")
