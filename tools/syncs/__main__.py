"""Define the options of `python -m tools.syncs corpus`, `speed` and `processes`; checks.py and processes.py run them."""

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
    help="Check the accuracy of the detectors of `dcpbench syncs`, and the cost of scanning.",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON. Default: no.")]


@app.command("corpus")
def run_corpus(
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RECORD]",
            show_default=False,
            help="Records of earlier runs (corpus.json), to print their table again. Default: run the corpus on this machine.",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FOLDER",
            help="Folder that keeps the record and the traces. Default: they are removed.",
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
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file. Default: no.")] = False,
) -> None:
    """Run small programs with a known number of synchronisations, and print each detector's precision and recall.

    With a GPU these are: the live detector; torch's set_sync_debug_mode; scan, with and without Python stacks and
    cuda_sync events; vLLM's VLLM_GPU_SYNC_CHECK, if --vllm-check names its file. A clock behind 20 ms of queued work
    checks the known numbers. The dry run needs no GPU.

    Exit codes: 0 as documented · 1 a detector is worse than documented, or the clock disagrees · 2 invalid options.

    For example: python -m tools.syncs corpus --keep corpus-here
    """
    output_options = checks.OutputOptions(as_json=as_json, programs=programs, output=output, force=force)
    raise typer.Exit(
        checks.run_corpus(records or [], keep=keep, vllm_checks=vllm_check or [], output_options=output_options)
    )


@app.command("speed")
def measure_speed(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", show_default=False, help="A trace or an SQLite export of nsys, which is repeated."
        ),
    ],
    size: Annotated[
        str,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="Size of the repeated trace, such as 140MB or 1GB.",
        ),
    ] = "140MB",
    hta: Annotated[
        Path | None,
        typer.Option(
            "--hta",
            metavar="PYTHON",
            help="A Python with HolisticTraceAnalysis; its loader is timed in turns with scan. Default: none.",
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", help="Runs of each program; the fastest one is reported.")
    ] = 3,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="File that keeps the repeated trace. Default: it is removed.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the time and memory of scan on a trace of any size, made by repeating a real one.

    Exit codes: 0 measured · 2 invalid options or input.

    For example: python -m tools.syncs speed trace.json.gz --size 1GB --hta ~/hta/bin/python
    """
    raise typer.Exit(checks.measure_speed(trace, size, hta=hta, runs=runs, keep=keep, as_json=as_json))


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

    Exit codes: 0 only that wait was found · 1 it was not found, or others were.

    For example: python -m tools.syncs processes --engine vllm --method spawn
    """
    check = processes.check_vllm if engine == "vllm" else processes.check_small_engine
    problems = check(method)
    typer.echo("\n".join(problems) or "The wait was found.")
    raise typer.Exit(bool(problems))


def main(args: list[str] | None = None) -> None:
    """Run a command; print errors of dcpbench, and exit with their code."""
    try:
        app(args=args)
    except DcpbenchError as e:
        sys.stderr.write(f"error: {e}\n")
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
