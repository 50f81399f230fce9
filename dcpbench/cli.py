"""The command line: Typer only. Options are read here; commands.py acts on them. Nothing heavy is imported at the top.

Every DcpbenchError ends as `error: message` with its own exit code; what nobody foresaw keeps its traceback.
"""

import contextlib
import errno
import inspect
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from dcpbench import __version__
from dcpbench.commands import bench, compare, dashboard, exports, serve, syncs_checks, top
from dcpbench.commands import options as opt
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.show import streams

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
    "130 interrupted · 141 whoever read the output went away, as in `dcpbench show RUN | head -1`.",
)
app.add_typer(bench.app, rich_help_panel="Measure")
app.add_typer(syncs_checks.app, rich_help_panel="Check")
app.add_typer(dashboard.app, rich_help_panel="Read results")


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
    tp: opt.Tp = None,
    dp: opt.Dp = None,
    dcp: opt.Dcp = None,
    model: opt.Model = None,
    concurrency: opt.Concurrency = None,
    context: opt.Context = None,
    weights: opt.Weights = None,
    backend: opt.Backend = None,
    exchange: opt.Exchange = None,
    q_replicate: opt.QReplicate = None,
    project_first: opt.ProjectFirst = None,
    overlap: opt.Overlap = None,
    all_reduce: opt.AllReduce = None,
    dtype: opt.Dtype = None,
    page_size: opt.PageSize = None,
    interleave: opt.Interleave = None,
    kv_memory: opt.KvMemory = None,
    seconds: opt.Seconds = None,
    repeats: opt.Repeats = None,
    baseline: opt.Baseline = None,
    profile: opt.Profile = None,
    timeout: opt.Timeout = 300.0,
    config: opt.Config = None,
    output: opt.Output = None,
    resume: opt.Resume = False,
    force: opt.Force = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    nnodes: opt.Nnodes = 1,
    node_rank: opt.NodeRank = 0,
    rdzv_endpoint: opt.RdzvEndpoint = "",
    rdzv_id: opt.RdzvId = "dcpbench",
) -> None:
    """Measure decode over layouts and loads, then write a report.

    Every combination of the comma lists is a point; those that cannot run are listed with the reason. One torchrun job
    per tp runs them; a point that dies or hangs is recorded and the others go on.

    For example:

      dcpbench sweep --tp 8 --dcp 8

      dcpbench sweep --model kimi-k2 --tp 4 --dcp 2,4 --context 4000,32000 --concurrency 8,32,48

      dcpbench sweep --config sweep.toml --dry-run
    """
    from dcpbench.commands import actions, runs
    from dcpbench.launch.torchrun import Machines

    given: dict[str, object] = {
        "model": model,
        "tp": tp,
        "dp": dp,
        "dcp": dcp,
        "concurrency": concurrency,
        "context": context,
        "exchange": exchange,
        "backend": backend,
        "dtype": dtype,
        "page_size": page_size,
        "interleave": interleave,
        "q_replicate": q_replicate,
        "project_first": project_first,
        "overlap": overlap,
        "all_reduce": all_reduce,
        "weights": weights,
        "kv_memory": kv_memory,
        "seconds": seconds,
        "repeats": repeats,
        "baseline": baseline,
        "profile": profile,
    }
    machines = Machines(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id)
    run = runs.Run(
        output=output,
        config=config,
        device=device,
        timeout=timeout,
        resume=resume,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
        machines=machines,
    )
    raise typer.Exit(actions.sweep(given, run))


app.command(rich_help_panel="Measure")(serve.serve)
app.command(rich_help_panel="Measure")(compare.ab)
app.command(rich_help_panel="Read results")(compare.compare)


@app.command(rich_help_panel="Read results")
def report(
    runs: opt.Runs,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: RUN/report of the first run.")
    ] = None,
    as_repeats: opt.AsRepeats = False,
    slo: opt.ReportSlo = None,
) -> None:
    """Write the answer, tables, figures and one self-contained HTML page from the records of one or several runs.

    Example: dcpbench report runs/monday runs/tuesday --as-repeats --slo ttft=2000,itl=60 -o both
    """
    from dcpbench.commands import actions

    raise typer.Exit(actions.report(runs, output, as_repeats=as_repeats, slo=slo))


@app.command(rich_help_panel="Read results")
def show(
    runs: opt.Runs,
    as_repeats: opt.AsRepeats = False,
    slo: opt.ReportSlo = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows and findings as one JSON object, for scripts.")
    ] = False,
) -> None:
    """Print the table of one or several runs, in the width of the terminal.

    Example: dcpbench show runs/monday
    """
    from dcpbench.commands import actions

    raise typer.Exit(actions.show(runs, as_repeats=as_repeats, slo=slo, as_json=as_json))


app.command(rich_help_panel="Read results")(top.top)
app.command(rich_help_panel="Read results")(exports.export)
app.command("import", rich_help_panel="Read results")(exports.import_)


@app.command(rich_help_panel="Check")
def verify(
    tp: opt.VerifyTp = None,
    dp: opt.VerifyDp = None,
    dcp: opt.VerifyDcp = None,
    model: opt.VerifyModel = None,
    checkpoint: opt.Checkpoint = None,
    prompts: opt.Prompts = None,
    new_tokens: opt.NewTokens = 8,
    concurrency: opt.VerifyConcurrency = None,
    context: opt.VerifyContext = None,
    backend: opt.Backend = None,
    exchange: opt.Exchange = None,
    q_replicate: opt.QReplicate = None,
    project_first: opt.ProjectFirst = None,
    overlap: opt.Overlap = None,
    all_reduce: opt.AllReduce = None,
    dtype: opt.Dtype = None,
    page_size: opt.PageSize = None,
    interleave: opt.Interleave = None,
    timeout: opt.Timeout = 300.0,
    output: opt.Output = None,
    force: opt.Force = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
) -> None:
    """Check layouts, backends and exchanges against a slow fp64 reference on one rank.

    Without --tp, --dp and --dcp: tp1, tp2, tp2·dcp2, tp4·dcp2, tp4·dcp4 and tp4·dp2·dcp2, as far as there are GPUs.
    With --tp: every valid layout of that many ranks. Ends with 1 if any check is wrong, with 4 if none is but some
    points could not be checked.

    For example:

      dcpbench verify --tp 4 --backend reference,triton

      dcpbench verify --tp 4 --dcp 4 --exchange ag_rs,a2a,symm --q-replicate

      dcpbench verify --checkpoint ~/models/deepseek-v2-lite --tp 4 --dcp 4
    """
    from dcpbench.commands import actions, runs

    given: dict[str, object] = {
        "model": model,
        "tp": tp,
        "dp": dp,
        "dcp": dcp,
        "concurrency": concurrency,
        "context": context,
        "exchange": exchange,
        "backend": backend,
        "dtype": dtype,
        "page_size": page_size,
        "interleave": interleave,
        "q_replicate": q_replicate,
        "project_first": project_first,
        "overlap": overlap,
        "all_reduce": all_reduce,
    }
    run = runs.Run(output=output, device=device, timeout=timeout, force=force, dry_run=dry_run, as_json=as_json)
    raise typer.Exit(actions.verify(given, run, checkpoint=checkpoint, prompts=prompts, new_tokens=new_tokens))


@app.command(rich_help_panel="Check")
def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show what is installed and visible, and what is missing for what.

    Example: dcpbench env
    """
    from dcpbench.commands import actions

    raise typer.Exit(actions.env(as_json=as_json))


class _Command(TyperCommand):
    """A command that takes each option once: of two, the parser would drop the first without a word."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # as Click's own
        """As Click's. Raises UsageError for an option with a value that is given twice."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(order).items():
            if times > 1 and "…" in (getattr(option, "metavar", None) or ""):
                name = max(option.opts, key=len)
                values = [value for typed in option.opts for value in _values(typed, args)]
                raise UsageError(f"{name} is given {times} times; write one list: {name} {','.join(values)}")
            once = option.param_type_name == "option" and not option.multiple
            if times > 1 and once and not getattr(option, "is_flag", False):
                raise UsageError(f"{max(option.opts, key=len)} is given {times} times; give it once.")
        return super().parse_args(ctx, args)


def _values(option: str, args: list[str]) -> list[str]:
    """What is typed for an option, as `--tp 2` or `--tp=2`."""
    pairs = zip(args, [*args[1:], ""], strict=True)
    return [
        after if word == option else word[len(option) + 1 :]
        for word, after in pairs
        if word == option or word.startswith(f"{option}=")
    ]


def _prepare(group: typer.Typer) -> None:
    """Make all commands ours, and take the line breaks of docstrings out of the paragraphs of their help texts.

    Typer would keep these at any width.
    """
    for command in group.registered_commands:
        command.cls = _Command
        paragraphs = inspect.cleandoc(command.help or getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)
    for part in group.registered_groups:
        if part.typer_instance is not None:
            _prepare(part.typer_instance)


_prepare(app)


def main(args: list[str] | None = None) -> None:
    """Entry point: run a command, turn our errors into one sentence and an exit code."""
    streams.settle()
    try:
        try:
            app(args=args, prog_name="dcpbench")
        finally:
            sys.stdout.flush()
    except DcpbenchError as e:
        from dcpbench.show.text import printable  # names in a message come from others, and a terminal would obey them

        _end("\n".join(map(printable, f"error: {e}".split("\n"))), e.exit_code)
    except BrokenPipeError:
        _end("", streams.CLOSED)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # for which Click and Rich end with 1, and that is a verdict
            _end("", streams.CLOSED)
        raise
    except OSError as e:
        if e.errno != errno.ENOSPC or e.filename is not None:
            raise
        _end("error: what the command prints, or a file, could not be written: no space left; make room.", 2)


def _end(said: str, code: int) -> None:
    with contextlib.suppress(OSError):  # nobody may read that either
        sys.stderr.write(f"{said}\n" if said else "")
    streams.forget_output()
    sys.exit(code)


if __name__ == "__main__":
    main()
