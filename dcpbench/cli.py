"""The command line: Typer only. Options are read here; commands.py acts on them. Nothing heavy is imported at the top.

Every DcpbenchError ends as `error: message` with its own exit code; what nobody foresaw keeps its traceback.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dcpbench import __version__, cli_bench, cli_syncs_checks
from dcpbench.errors import DcpbenchError

app = typer.Typer(
    name="dcpbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure how to serve long-context MLA models: tensor (tp), decode-context (dcp) and attention-data (dp) "
    "parallelism.\n\nStart with: dcpbench sweep --tp 8 --dcp 8\n\nExit codes: 0 all well · 1 wrong result · 2 options "
    "that cannot work · 3 not enough GPUs or memory · 4 a rank or some points failed · 5 a package is missing · "
    "130 interrupted.",
)
app.add_typer(cli_bench.app, rich_help_panel="Measure")
app.add_typer(cli_syncs_checks.app, rich_help_panel="Check")

LAYOUT = "Layouts (comma lists)"
LOAD = "Model and load"
HOW = "How it is computed"
MEASURE = "How it is measured"
OUTPUT = "Output"
MACHINES = "Machines"

Tp = Annotated[
    str | None,
    typer.Option("--tp", metavar="N,…", rich_help_panel=LAYOUT, help="GPUs that share one copy of the model; each is "
    "one torchrun job. Default: all GPUs of this machine; 8 on the CPU."),
]  # fmt: skip
Dp = Annotated[
    str | None,
    typer.Option("--dp", metavar="N,…", rich_help_panel=LAYOUT, help="Attention data parallel replicas inside tp. "
    "Default: 1."),
]  # fmt: skip
Dcp = Annotated[
    str | None,
    typer.Option("--dcp", metavar="N,…", rich_help_panel=LAYOUT, help="Ranks that share the KV cache of one request; "
    "divides tp / dp. Adds no GPUs. Default: tp / dp."),
]  # fmt: skip
Concurrency = Annotated[
    str | None,
    typer.Option("--concurrency", metavar="N,…", rich_help_panel=LOAD, help="Requests in flight over the whole layout. "
    "Default: 8,32,48 on GPUs; 2,8 on the CPU."),
]  # fmt: skip
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="TOKENS,…", rich_help_panel=LOAD, help="Tokens already in the KV cache of each "
    "request. Default: 4000 on GPUs; 100 on the CPU."),
]  # fmt: skip
Exchange = Annotated[
    str | None,
    typer.Option("--exchange", metavar="NAME,…", rich_help_panel=HOW, help="How partial attention is merged over dcp "
    "ranks: ag_rs or a2a. Default: ag_rs."),
]  # fmt: skip
Backend = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME,…", rich_help_panel=HOW, help="Attention kernel: triton, flashinfer, "
    "or reference (on GPUs for verify alone). Default: flashinfer where it is installed, else triton; reference on the "
    "CPU."),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", rich_help_panel=HOW, help="bf16, fp16 or fp32, for weights and KV cache; "
    "sweep on GPUs takes bf16 alone, fp16 and fp32 there are for verify. Default: bf16 on GPUs; fp32 on the CPU."),
]  # fmt: skip
PageSize = Annotated[
    int | None,
    typer.Option("--page-size", metavar="ROWS", rich_help_panel=HOW, help="KV rows in a page of one rank. Default: 64 "
    "on GPUs; 1 on the CPU."),
]  # fmt: skip
Interleave = Annotated[
    int | None,
    typer.Option("--interleave", metavar="TOKENS", rich_help_panel=HOW, help="Neighbouring tokens that stay on one dcp "
    "rank; divides the page size. Default: 1."),
]  # fmt: skip
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", rich_help_panel=MEASURE, help="A job that shows no progress for this "
    "long is hung: stacks of all ranks are kept, it is ended, and the other points go on."),
]  # fmt: skip
Device = Annotated[
    str,
    typer.Option("--device", metavar="NAME", rich_help_panel=MACHINES, help="auto, cuda or cpu. auto takes GPUs where "
    "there are any. On the CPU everything runs, but the timings say nothing about performance."),
]  # fmt: skip
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="DIR", rich_help_panel=OUTPUT, help="Folder for records, logs and report. "
    "Default: runs/DATE-TIME-…, printed at the start."),
]  # fmt: skip
Force = Annotated[
    bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Start over in a folder that already holds records.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Only print the points, with memory per GPU, and those that "
    "cannot run, each with its reason."),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the result as JSON on stdout.")]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME,…", rich_help_panel=LOAD, help="deepseek-v3, deepseek-r1, deepseek-v2, "
    "deepseek-v2-lite, kimi-k2, tiny, or a folder with a Hugging Face config.json. Default: the checkpoint's own "
    "config.json where one is given, else deepseek-v3; tiny on the CPU."),
]  # fmt: skip
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="FOLDER", rich_help_panel=LOAD, help="Folder of a checkpoint (safetensors), or "
    "synthetic: seeded random weights of full size. Default: synthetic."),
]  # fmt: skip
KvMemory = Annotated[
    str | None,
    typer.Option("--kv-memory", metavar="SIZE", rich_help_panel=HOW, help="KV pool per GPU, such as 100GiB or 40GB. "
    "Default: all that the weights leave, where all of them fit beside the largest point of the layout; else what that "
    "point needs."),
]  # fmt: skip
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", metavar="SECONDS", rich_help_panel=MEASURE, help="Time limit of one point's measurement; "
    "it stops earlier once the median is known within ±1 %, and is marked noisy otherwise. Default: 10."),
]  # fmt: skip
Repeats = Annotated[
    int | None,
    typer.Option("--repeats", metavar="N", rich_help_panel=MEASURE, help="Passes over the whole grid. Default: 1."),
]
Baseline = Annotated[
    bool | None,
    typer.Option("--baseline/--no-baseline", rich_help_panel=MEASURE, help="Also measure each dcp layout with dcp 1, "
    "and tp alone beside dp without dcp, under the same load. Default: yes."),
]  # fmt: skip
Profile = Annotated[
    bool | None,
    typer.Option("--profile/--no-profile", rich_help_panel=MEASURE, help="A separate profiled pass for the phase "
    "breakdown and host synchronisations; never touches the timings. Default: yes."),
]  # fmt: skip
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", rich_help_panel=OUTPUT, help="TOML or YAML file with these options by "
    "name, such as `tp = [4, 8]`; what is typed here overrides it."),
]  # fmt: skip
Resume = Annotated[
    bool,
    typer.Option("--resume", rich_help_panel=OUTPUT, help="Go on with the run in --output: measured points are "
    "skipped, failed ones tried again."),
]  # fmt: skip
Nnodes = Annotated[
    int,
    typer.Option("--nnodes", metavar="N", rich_help_panel=MACHINES, help="Machines; start the same command on each. "
    "tp counts the GPUs of all of them."),
]  # fmt: skip
NodeRank = Annotated[
    int,
    typer.Option("--node-rank", metavar="N", rich_help_panel=MACHINES, help="This machine's number; 0 keeps the "
    "records."),
]  # fmt: skip
RdzvEndpoint = Annotated[
    str,
    typer.Option("--rdzv-endpoint", metavar="HOST:PORT", rich_help_panel=MACHINES, help="Address of node 0 with a free "
    "port, the same on every machine."),
]  # fmt: skip
RdzvId = Annotated[
    str, typer.Option("--rdzv-id", metavar="NAME", rich_help_panel=MACHINES, help="Job name for torchrun.")
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or records.jsonl files.")]
VerifyTp = Annotated[
    str | None,
    typer.Option("--tp", metavar="N,…", rich_help_panel=LAYOUT, help="Ranks of a layout. Default: the largest --dp "
    "times the largest --dcp; without any of the three, the six layouts above."),
]  # fmt: skip
VerifyDp = Annotated[
    str | None,
    typer.Option("--dp", metavar="N,…", rich_help_panel=LAYOUT, help="Attention data parallel replicas inside tp. "
    "Default: every valid number."),
]  # fmt: skip
VerifyDcp = Annotated[
    str | None,
    typer.Option("--dcp", metavar="N,…", rich_help_panel=LAYOUT, help="Ranks that share the KV cache of one request; "
    "divides tp / dp. Default: every valid number."),
]  # fmt: skip
VerifyModel = Annotated[
    str | None, typer.Option("--model", metavar="NAME", rich_help_panel=LOAD, help="As in sweep. Default: as in sweep.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FOLDER", rich_help_panel=LOAD, help="Also compare logits and greedy tokens "
    "with transformers, for this Hugging Face checkpoint (config.json and safetensors)."),
]  # fmt: skip
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", rich_help_panel=LOAD, help="With --checkpoint: JSON lists of token ids. "
    "Default: seeded random prompts of uneven lengths."),
]  # fmt: skip
NewTokens = Annotated[
    int,
    typer.Option("--new-tokens", metavar="N", min=1, rich_help_panel=LOAD, help="With --checkpoint: greedy tokens "
    "compared."),
]  # fmt: skip
VerifyConcurrency = Annotated[
    str | None,
    typer.Option("--concurrency", metavar="N", rich_help_panel=LOAD, help="With --checkpoint: random prompts. "
    "Default: 4."),
]  # fmt: skip
VerifyContext = Annotated[
    str | None,
    typer.Option("--context", metavar="TOKENS", rich_help_panel=LOAD, help="Length of the longest request; the others "
    "are shorter, so that shards are uneven. Default: 37."),
]  # fmt: skip
AsRepeats = Annotated[
    bool,
    typer.Option("--as-repeats", help="The runs are passes over the same grid: show them as one, and how well they "
    "agree, instead of side by side."),
]  # fmt: skip


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dcpbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    del version


@app.command(rich_help_panel="Measure")
def sweep(
    tp: Tp = None,
    dp: Dp = None,
    dcp: Dcp = None,
    model: Model = None,
    concurrency: Concurrency = None,
    context: Context = None,
    weights: Weights = None,
    backend: Backend = None,
    exchange: Exchange = None,
    dtype: Dtype = None,
    page_size: PageSize = None,
    interleave: Interleave = None,
    kv_memory: KvMemory = None,
    seconds: Seconds = None,
    repeats: Repeats = None,
    baseline: Baseline = None,
    profile: Profile = None,
    timeout: Timeout = 300.0,
    config: Config = None,
    output: Output = None,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    device: Device = "auto",
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "dcpbench",
) -> None:
    """Measure decode over layouts and loads, then write a report.

    Every combination of the comma lists is a point; those that cannot run are listed with the reason. One torchrun job
    per tp runs them; a point that dies or hangs is recorded and the others go on.

    For example:

      dcpbench sweep --tp 8 --dcp 8

      dcpbench sweep --model kimi-k2 --tp 4 --dcp 2,4 --context 4000,32000 --concurrency 8,32,48

      dcpbench sweep --config sweep.toml --dry-run
    """
    from dcpbench import commands
    from dcpbench.torchrun import Machines

    given: dict[str, object] = {
        "model": model, "tp": tp, "dp": dp, "dcp": dcp, "concurrency": concurrency, "context": context,
        "exchange": exchange, "backend": backend, "dtype": dtype, "page_size": page_size, "interleave": interleave,
        "weights": weights, "kv_memory": kv_memory, "seconds": seconds, "repeats": repeats, "baseline": baseline,
        "profile": profile,
    }  # fmt: skip
    machines = Machines(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id)
    run = commands.Run(
        output=output, config=config, device=device, timeout=timeout, resume=resume, force=force, dry_run=dry_run,
        as_json=as_json, machines=machines,
    )  # fmt: skip
    raise typer.Exit(commands.sweep(given, run))


@app.command(rich_help_panel="Read results")
def report(
    runs: Runs,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: RUN/report of the first run.")
    ] = None,
    as_repeats: AsRepeats = False,
) -> None:
    """Write tables, plots and one self-contained HTML page from the records of one or several runs.

    Example: dcpbench report runs/monday runs/tuesday --as-repeats -o both
    """
    from dcpbench import commands

    raise typer.Exit(commands.report(runs, output, as_repeats=as_repeats))


@app.command(rich_help_panel="Read results")
def show(runs: Runs, as_repeats: AsRepeats = False) -> None:
    """Print the table of one or several runs.

    Example: dcpbench show runs/monday
    """
    from dcpbench import commands

    raise typer.Exit(commands.show(runs, as_repeats=as_repeats))


@app.command(rich_help_panel="Check")
def verify(
    tp: VerifyTp = None,
    dp: VerifyDp = None,
    dcp: VerifyDcp = None,
    model: VerifyModel = None,
    checkpoint: Checkpoint = None,
    prompts: Prompts = None,
    new_tokens: NewTokens = 8,
    concurrency: VerifyConcurrency = None,
    context: VerifyContext = None,
    backend: Backend = None,
    exchange: Exchange = None,
    dtype: Dtype = None,
    page_size: PageSize = None,
    interleave: Interleave = None,
    timeout: Timeout = 300.0,
    output: Output = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Check layouts, backends and exchanges against a slow fp64 reference on one rank.

    Without --tp, --dp and --dcp: tp1, tp2, tp2·dcp2, tp4·dcp2, tp4·dcp4 and tp4·dp2·dcp2, as far as there are GPUs.
    With --tp: every valid layout of that many ranks. Ends with 1 if any check is wrong, with 4 if none is but some
    points could not be checked.

    For example:

      dcpbench verify --tp 4 --backend reference,triton

      dcpbench verify --checkpoint ~/models/deepseek-v2-lite --tp 4 --dcp 4
    """
    from dcpbench import commands

    given: dict[str, object] = {
        "model": model, "tp": tp, "dp": dp, "dcp": dcp, "concurrency": concurrency, "context": context,
        "exchange": exchange, "backend": backend, "dtype": dtype, "page_size": page_size, "interleave": interleave,
    }  # fmt: skip
    run = commands.Run(output=output, device=device, timeout=timeout, force=force, dry_run=dry_run, as_json=as_json)
    raise typer.Exit(commands.verify(given, run, checkpoint=checkpoint, prompts=prompts, new_tokens=new_tokens))


@app.command(rich_help_panel="Check")
def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show what is installed and visible, and what is missing for what.

    Example: dcpbench env
    """
    from dcpbench import commands

    raise typer.Exit(commands.env(as_json=as_json))


def main(args: list[str] | None = None) -> None:
    """Entry point: run a command, turn our errors into one sentence and an exit code."""
    try:
        app(args=args, prog_name="dcpbench")
    except DcpbenchError as e:
        from dcpbench.syncs.words import plain  # names in a message come from others, and a terminal would obey them

        sys.stderr.write("\n".join(map(plain, f"error: {e}".split("\n"))) + "\n")
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
