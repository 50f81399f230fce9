"""Options that several commands share: their names, their titles in the help, and what they mean.

A class is a group of options that a command takes as one value; a command that has one of them otherwise, or not at
all, says so in a class of its own (command.py).
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands.command import group, panel

if TYPE_CHECKING:
    from dcpbench.launch.torchrun import Machines

LAYOUT = panel("Layouts (comma lists)", metavar="N,…")
LOAD = panel("Model and load")
HOW = panel("How it is computed")
MEASURE = panel("How it is measured")
OUTPUT = panel("Output")
MACHINES = panel("Machines")

Model = Annotated[
    str | None,
    LOAD(
        "--model",
        metavar="NAME,…",
        help="deepseek-v3, deepseek-r1, deepseek-v2, deepseek-v2-lite, kimi-k2, tiny, or a folder with a "
        "Hugging Face config.json. Default: the checkpoint's own config.json where one is given, else "
        "deepseek-v3; tiny on the CPU.",
    ),
]
Weights = Annotated[
    str | None,
    LOAD(
        "--weights",
        metavar="FOLDER",
        help="Folder of a checkpoint (safetensors), or synthetic: seeded random weights of full size. "
        "Default: synthetic.",
    ),
]
Repeats = Annotated[int | None, MEASURE("--repeats", metavar="N", help="Passes over the whole grid. Default: 1.")]
Baseline = Annotated[
    bool | None,
    MEASURE(
        "--baseline/--no-baseline",
        help="Also measure each dcp layout with dcp 1, and tp alone beside dp without dcp, under the same "
        "load. Default: yes.",
    ),
]
Resume = Annotated[
    bool,
    OUTPUT("--resume", help="Go on with the run in --output: measured points are skipped, failed ones tried again."),
]
Force = Annotated[bool, OUTPUT("--force", help="Start over in a folder that already holds records.")]
Json = Annotated[bool, OUTPUT("--json", help="Print the result as JSON on stdout.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or records.jsonl files.")]
AsRepeats = Annotated[
    bool,
    typer.Option(
        "--as-repeats",
        help="The runs are passes over the same grid: show them as one, and how well they agree, instead of "
        "side by side.",
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="NAME=MS,…",
        help="Objectives that the answer keeps to: ttft, itl, tpot, e2el in ms, such as ttft=2000,itl=60, "
        "held against p99 where there are samples enough. Default: those that the runs were measured "
        "with, else none.",
    ),
]


@group
class Layouts:
    """Over how many ranks, and as what."""

    tp: Annotated[
        str | None,
        LAYOUT(
            "--tp",
            help="GPUs that share one copy of the model; each is one torchrun job. Default: all GPUs of this "
            "machine; 8 on the CPU.",
        ),
    ] = None
    dp: Annotated[str | None, LAYOUT("--dp", help="Attention data parallel replicas inside tp. Default: 1.")] = None
    dcp: Annotated[
        str | None,
        LAYOUT(
            "--dcp",
            help="Ranks that share the KV cache of one request; divides tp / dp. Adds no GPUs. Default: tp / dp.",
        ),
    ] = None


@group
class How:
    """How a layer is computed."""

    backend: Annotated[
        str | None,
        HOW(
            "--backend",
            metavar="NAME,…",
            help="Attention kernel: triton, flashinfer, reference (on GPUs for verify alone), or auto: each point "
            "takes the fastest. Default: flashinfer where it is installed, else triton; reference on the CPU.",
        ),
    ] = None
    exchange: Annotated[
        str | None,
        HOW(
            "--exchange",
            metavar="NAME,…",
            help="How partial attention is merged over dcp ranks: ag_rs, a2a, symm (symmetric memory, inside one "
            "machine), or auto: each point takes the fastest. Default: ag_rs.",
        ),
    ] = None
    q_replicate: Annotated[
        bool | None,
        HOW(
            "--q-replicate/--no-q-replicate",
            help="Every dcp rank computes all heads' queries, from more weights, and none are gathered. Default: no.",
        ),
    ] = None
    project_first: Annotated[
        bool | None,
        HOW(
            "--project-first/--no-project-first",
            help="Project partial outputs to values, with more weights, before they are exchanged: fewer bytes. "
            "Default: no.",
        ),
    ] = None
    overlap: Annotated[
        bool | None,
        HOW(
            "--overlap/--no-overlap",
            help="Run attention in two halves of the batch, one's exchange beside the other's attention. Default: no.",
        ),
    ] = None
    all_reduce: Annotated[
        str | None,
        HOW(
            "--all-reduce",
            metavar="NAME,…",
            help="How the partial sums of tp are reduced: nccl, or symm through symmetric memory. Default: nccl.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        HOW(
            "--dtype",
            metavar="NAME",
            help="bf16, fp16 or fp32, for weights and KV cache; sweep on GPUs takes bf16 alone, fp16 and fp32 "
            "there are for verify. Default: bf16 on GPUs; fp32 on the CPU.",
        ),
    ] = None
    page_size: Annotated[
        int | None,
        HOW("--page-size", metavar="ROWS", help="KV rows in a page of one rank. Default: 64 on GPUs; 1 on the CPU."),
    ] = None
    interleave: Annotated[
        int | None,
        HOW(
            "--interleave",
            metavar="TOKENS",
            help="Neighbouring tokens that stay on one dcp rank; divides the page size. Default: 1.",
        ),
    ] = None


@group
class Run:
    """How a command runs, not what it measures."""

    timeout: Annotated[
        float,
        MEASURE(
            "--timeout",
            metavar="SECONDS",
            help="A point that shows no progress for this long is hung: stacks of all ranks are kept, its job is "
            "ended, and the other points go on. Starting, building and warming up may be silent for 300 s, "
            "however short this is.",
        ),
    ] = 300.0
    config: Annotated[
        Path | None,
        OUTPUT(
            "--config",
            metavar="FILE",
            help="TOML or YAML file with these options by name, such as `tp = [4, 8]`; what is typed here "
            "overrides it.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        OUTPUT(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for records, logs and report. Default: runs/DATE-TIME-…, printed at the start.",
        ),
    ] = None
    resume: Resume = False
    force: Force = False
    dry_run: Annotated[
        bool,
        OUTPUT(
            "--dry-run",
            help="Only print the points, with memory per GPU, and those that cannot run, each with its reason.",
        ),
    ] = False
    as_json: Json = False
    device: Annotated[
        str,
        MACHINES(
            "--device",
            metavar="NAME",
            help="auto, cuda or cpu. auto takes GPUs where there are any. On the CPU everything runs, but the "
            "timings say nothing about performance.",
        ),
    ] = "auto"

    @property
    def machines(self) -> "Machines":
        """This one alone."""
        from dcpbench.launch.torchrun import Machines

        return Machines()


@group
class RunOnMachines(Run):
    """The same, where several machines may take part."""

    nnodes: Annotated[
        int,
        MACHINES(
            "--nnodes",
            metavar="N",
            help="Machines; start the same command on each, with the same secret in DCPBENCH_SECRET. tp counts "
            "the GPUs of all of them.",
        ),
    ] = 1
    node_rank: Annotated[
        int, MACHINES("--node-rank", metavar="N", help="This machine's number; 0 keeps the records.")
    ] = 0
    rdzv_endpoint: Annotated[
        str,
        MACHINES(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Address of node 0 with a free port, the same on every machine. Node 0 listens at this address "
            "alone: one of a network that you trust.",
        ),
    ] = ""
    rdzv_id: Annotated[str, MACHINES("--rdzv-id", metavar="NAME", help="Name of the sweep, the same on all.")] = (
        "dcpbench"
    )

    @property
    def machines(self) -> "Machines":
        """Those of the run."""
        from dcpbench.launch.torchrun import Machines

        return Machines(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Machines)})
