"""The options of `sweep`, `verify`, `report` and `show`: their names, their groups in the help, and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

LAYOUT = "Layouts (comma lists)"
LOAD = "Model and load"
HOW = "How it is computed"
MEASURE = "How it is measured"
OUTPUT = "Output"
MACHINES = "Machines"

Tp = Annotated[
    str | None,
    typer.Option(
        "--tp",
        metavar="N,…",
        rich_help_panel=LAYOUT,
        help="GPUs that share one copy of the model; each is "
        "one torchrun job. Default: all GPUs of this machine; 8 on the CPU.",
    ),
]
Dp = Annotated[
    str | None,
    typer.Option(
        "--dp", metavar="N,…", rich_help_panel=LAYOUT, help="Attention data parallel replicas inside tp. Default: 1."
    ),
]
Dcp = Annotated[
    str | None,
    typer.Option(
        "--dcp",
        metavar="N,…",
        rich_help_panel=LAYOUT,
        help="Ranks that share the KV cache of one request; divides tp / dp. Adds no GPUs. Default: tp / dp.",
    ),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="N,…",
        rich_help_panel=LOAD,
        help="Requests in flight over the whole layout. Default: 8,32,48 on GPUs; 2,8 on the CPU.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="TOKENS,…",
        rich_help_panel=LOAD,
        help="Tokens already in the KV cache of each request. Default: 4000 on GPUs; 100 on the CPU.",
    ),
]
Exchange = Annotated[
    str | None,
    typer.Option(
        "--exchange",
        metavar="NAME,…",
        rich_help_panel=HOW,
        help="How partial attention is merged over dcp "
        "ranks: ag_rs, a2a, symm (symmetric memory, inside one machine), or auto: each point takes the fastest. "
        "Default: ag_rs.",
    ),
]
QReplicate = Annotated[
    bool | None,
    typer.Option(
        "--q-replicate/--no-q-replicate",
        rich_help_panel=HOW,
        help="Every dcp rank computes all heads' queries, from more weights, and none are gathered. Default: no.",
    ),
]
ProjectFirst = Annotated[
    bool | None,
    typer.Option(
        "--project-first/--no-project-first",
        rich_help_panel=HOW,
        help="Project partial outputs to values, "
        "with more weights, before they are exchanged: fewer bytes. Default: no.",
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        rich_help_panel=HOW,
        help="Run attention in two halves of the batch, one's exchange beside the other's attention. Default: no.",
    ),
]
AllReduce = Annotated[
    str | None,
    typer.Option(
        "--all-reduce",
        metavar="NAME,…",
        rich_help_panel=HOW,
        help="How the partial sums of tp are reduced: nccl, or symm through symmetric memory. Default: nccl.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME,…",
        rich_help_panel=HOW,
        help="Attention kernel: triton, flashinfer, "
        "reference (on GPUs for verify alone), or auto: each point takes the fastest. Default: flashinfer where it is "
        "installed, else triton; reference on the CPU.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        rich_help_panel=HOW,
        help="bf16, fp16 or fp32, for weights and KV cache; "
        "sweep on GPUs takes bf16 alone, fp16 and fp32 there are for verify. Default: bf16 on GPUs; fp32 on the CPU.",
    ),
]
PageSize = Annotated[
    int | None,
    typer.Option(
        "--page-size",
        metavar="ROWS",
        rich_help_panel=HOW,
        help="KV rows in a page of one rank. Default: 64 on GPUs; 1 on the CPU.",
    ),
]
Interleave = Annotated[
    int | None,
    typer.Option(
        "--interleave",
        metavar="TOKENS",
        rich_help_panel=HOW,
        help="Neighbouring tokens that stay on one dcp rank; divides the page size. Default: 1.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        rich_help_panel=MEASURE,
        help="A point that shows no progress for "
        "this long is hung: stacks of all ranks are kept, its job is ended, and the other points go on. Starting, building "
        "and warming up may be silent for 300 s, however short this is.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        rich_help_panel=MACHINES,
        help="auto, cuda or cpu. auto takes GPUs where "
        "there are any. On the CPU everything runs, but the timings say nothing about performance.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Folder for records, logs and report. Default: runs/DATE-TIME-…, printed at the start.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Start over in a folder that already holds records.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel=OUTPUT,
        help="Only print the points, with memory per GPU, and those that cannot run, each with its reason.",
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the result as JSON on stdout.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME,…",
        rich_help_panel=LOAD,
        help="deepseek-v3, deepseek-r1, deepseek-v2, "
        "deepseek-v2-lite, kimi-k2, tiny, or a folder with a Hugging Face config.json. Default: the checkpoint's own "
        "config.json where one is given, else deepseek-v3; tiny on the CPU.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FOLDER",
        rich_help_panel=LOAD,
        help="Folder of a checkpoint (safetensors), or "
        "synthetic: seeded random weights of full size. Default: synthetic.",
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        rich_help_panel=HOW,
        help="KV pool per GPU, such as 100GiB or 40GB. "
        "Default: all that the weights leave, where all of them fit beside the largest point of the layout; else what that "
        "point needs.",
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        metavar="SECONDS",
        rich_help_panel=MEASURE,
        help="Time limit of one point's measurement; "
        "it stops earlier once the median is known within ±1 %, and is marked noisy otherwise. Default: 10.",
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option("--repeats", metavar="N", rich_help_panel=MEASURE, help="Passes over the whole grid. Default: 1."),
]
Baseline = Annotated[
    bool | None,
    typer.Option(
        "--baseline/--no-baseline",
        rich_help_panel=MEASURE,
        help="Also measure each dcp layout with dcp 1, "
        "and tp alone beside dp without dcp, under the same load. Default: yes.",
    ),
]
Profile = Annotated[
    bool | None,
    typer.Option(
        "--profile/--no-profile",
        rich_help_panel=MEASURE,
        help="A separate profiled pass for the phase "
        "breakdown and host synchronisations; never touches the timings. Default: yes.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel=OUTPUT,
        help="TOML or YAML file with these options by name, such as `tp = [4, 8]`; what is typed here overrides it.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=OUTPUT,
        help="Go on with the run in --output: measured points are skipped, failed ones tried again.",
    ),
]
Nnodes = Annotated[
    int,
    typer.Option(
        "--nnodes",
        metavar="N",
        rich_help_panel=MACHINES,
        help="Machines; start the same command on each, "
        "with the same secret in DCPBENCH_SECRET. tp counts the GPUs of all of them.",
    ),
]
NodeRank = Annotated[
    int,
    typer.Option(
        "--node-rank", metavar="N", rich_help_panel=MACHINES, help="This machine's number; 0 keeps the records."
    ),
]
RdzvEndpoint = Annotated[
    str,
    typer.Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        rich_help_panel=MACHINES,
        help="Address of node 0 with a free "
        "port, the same on every machine. Node 0 listens at this address alone: one of a network that you trust.",
    ),
]
RdzvId = Annotated[
    str, typer.Option("--rdzv-id", metavar="NAME", rich_help_panel=MACHINES, help="Name of the sweep, the same on all.")
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or records.jsonl files.")]
VerifyTp = Annotated[
    str | None,
    typer.Option(
        "--tp",
        metavar="N,…",
        rich_help_panel=LAYOUT,
        help="Ranks of a layout. Default: the largest --dp "
        "times the largest --dcp; without any of the three, the six layouts above.",
    ),
]
VerifyDp = Annotated[
    str | None,
    typer.Option(
        "--dp",
        metavar="N,…",
        rich_help_panel=LAYOUT,
        help="Attention data parallel replicas inside tp. Default: every valid number.",
    ),
]
VerifyDcp = Annotated[
    str | None,
    typer.Option(
        "--dcp",
        metavar="N,…",
        rich_help_panel=LAYOUT,
        help="Ranks that share the KV cache of one request; divides tp / dp. Default: every valid number.",
    ),
]
VerifyModel = Annotated[
    str | None, typer.Option("--model", metavar="NAME", rich_help_panel=LOAD, help="As in sweep. Default: as in sweep.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        rich_help_panel=LOAD,
        help="Also compare logits and greedy tokens "
        "with transformers, for this Hugging Face checkpoint (config.json and safetensors).",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        rich_help_panel=LOAD,
        help="With --checkpoint: JSON lists of token ids. Default: seeded random prompts of uneven lengths.",
    ),
]
NewTokens = Annotated[
    int,
    typer.Option(
        "--new-tokens", metavar="N", min=1, rich_help_panel=LOAD, help="With --checkpoint: greedy tokens compared."
    ),
]
VerifyConcurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency", metavar="N", rich_help_panel=LOAD, help="With --checkpoint: random prompts. Default: 4."
    ),
]
VerifyContext = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        rich_help_panel=LOAD,
        help="Length of the longest request; the others are shorter, so that shards are uneven. Default: 37.",
    ),
]
AsRepeats = Annotated[
    bool,
    typer.Option(
        "--as-repeats",
        help="The runs are passes over the same grid: show them as one, and how well they "
        "agree, instead of side by side.",
    ),
]
ReportSlo = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="NAME=MS,…",
        help="Objectives that the answer keeps to: ttft, itl, tpot, e2el in ms, "
        "such as ttft=2000,itl=60, held against p99 where there are samples enough. Default: those that the runs were "
        "measured with, else none.",
    ),
]
