"""`python -m tools.syncs corpus`, `speed` and `processes`: options alone. What the commands do lies in checks.py and processes.py."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dcpbench.errors import DcpbenchError
from tools.syncs import checks, processes

app = typer.Typer(
    name="python -m tools.syncs",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Whether the detectors of `dcpbench syncs` can be believed, and what scanning costs.",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON. Default: no.")]


@app.command()
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
        typer.Option(
            "--keep",
            metavar="FOLDER",
            help="Leave the record and the traces there. Default: they are removed.",
        ),
    ] = None,
    vllm_check: Annotated[
        list[str] | None,
        typer.Option(
            "--vllm-check",
            metavar="VERSION=FILE",
            help="Also run the check of this release of vLLM; FILE is its vllm/utils/gpu_sync_debug.py. Repeatable. "
            "Default: none.",
        ),
    ] = None,
    programs: Annotated[
        bool, typer.Option("--programs", help="Print what each detector finds in each program. Default: no.")
    ] = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there. Default: stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there. Default: no.")] = False,
) -> None:
    """Run small programs with a known number of synchronisations, and print each detector's precision and recall.

    With a GPU: the clock, behind 20 ms of queued work, which decides what is true; the live detector; torch's own
    set_sync_debug_mode; scan, with and without Python stacks and cuda_sync events; vLLM's VLLM_GPU_SYNC_CHECK, if
    --vllm-check names its file. Everywhere: the dry run.

    Exit codes: 0 as documented · 1 a detector is worse than that, or the clock disagrees · 2 options that cannot be
    used.

    For example: python -m tools.syncs corpus --keep corpus-here
    """
    shown = checks.Shown(as_json=as_json, programs=programs, output=output, force=force)
    raise typer.Exit(checks.corpus(records or [], keep=keep, vllm_checks=vllm_check or [], shown=shown))


@app.command()
def speed(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", show_default=False, help="A real trace, or an SQLite export of nsys, which is repeated."
        ),
    ],
    size: Annotated[
        str,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="Size of the trace that is made of it, such as 140MB or 1GB.",
        ),
    ] = "140MB",
    hta: Annotated[
        Path | None,
        typer.Option(
            "--hta",
            metavar="PYTHON",
            help="A Python in whose environment "
            "HolisticTraceAnalysis is installed; its loader is then timed in turns with scan. Default: none.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option("--runs", metavar="N", help="Runs of each; the fastest counts.")] = 3,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Leave the trace that is made there. Default: it is removed.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time scan and measure its memory on a trace of any size, made by repeating a real one.

    Exit codes: 0 timed · 2 options or input that cannot be used.

    For example: python -m tools.syncs speed trace.json.gz --size 1GB --hta ~/hta/bin/python
    """
    raise typer.Exit(checks.speed(trace, size, hta=hta, runs=runs, keep=keep, as_json=as_json))


@app.command("processes")
def check_processes(
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="small|vllm", help="Engine: the small one of tools.syncs.engine_core, or vLLM."
        ),
    ] = "small",
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="METHOD", help="How its core is started: fork, spawn or forkserver (not vllm)."
        ),
    ] = "fork",
) -> None:
    """Check on a GPU that `dcpbench syncs run` finds a wait in the child process of an engine.

    Exit codes: 0 found, and nothing else · 1 not found.

    For example: python -m tools.syncs processes --engine vllm --method spawn
    """
    check = processes.check_vllm if engine == "vllm" else processes.check_small_engine
    wrong = check(method)
    typer.echo("\n".join(wrong) or "The wait was found.")
    raise typer.Exit(bool(wrong))


def main(args: list[str] | None = None) -> None:
    """Run a command; our errors end it with a sentence and an exit code."""
    try:
        app(args=args)
    except DcpbenchError as e:
        sys.stderr.write(f"error: {e}\n")
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
