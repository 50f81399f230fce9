"""Define the command line of `dcpbench syncs …`. The commands themselves are in syncs/."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands.command import Group, make_panel, register_command

if TYPE_CHECKING:
    from dcpbench.syncs.commands import GateOptions

app = typer.Typer(
    name="syncs",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find hidden CUDA synchronisation: where the host waits for the GPU, and what it costs."
    "\n\nA trace names the function that waits; scan, serve and run list the lines of this function that can wait. dry-run reports the exact line."
    "\n\nStart with: dcpbench syncs scan trace.json.gz\n\nExit codes: 0 clean · 1 findings · 2 options or input that "
    "cannot be used · 3 the trace cannot answer (no GPU events, no runtime calls, no steps, a rank is missing, or it ends early); "
    "run and dry-run have further exit codes.",
)

READ = make_panel("Input")
RECORD = make_panel("Recording")
GATE = make_panel("Allowed synchronisation")
OUTPUT = make_panel("Output")

Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE",
        help="Kineto traces (.json, .json.gz) and exports of nsys (sqlite, jsonlines, parquetdir): files, folders, or globs in quotes, also of several ranks. A folder stands for the traces directly in it.",
    ),
]
FORCE = OUTPUT("Overwrite an existing file. Default: no.", default=False)


class Gate(Group):
    """Hold the options for the repository, the steps, and what is allowed."""

    root: Path | None = READ(
        "Root of the repository: paths are shown relative to it, and pyproject.toml and allow-sync comments are read "
        "there. Default: the folder with .git around this one.",
        metavar="FOLDER",
    )
    source: Path | None = READ(
        "Source of the program at the commit of the trace, to find the lines of a function that can wait. Default: --root, and the "
        "paths in the trace.",
        metavar="FOLDER",
    )
    step_range: str | None = READ(
        "Names of the ranges (record_function) that mark a step, such as '^decode_step'. Default: ProfilerStep#N, which prof.step() makes if profile() has schedule=; else the annotations of vLLM and SGLang; else numbered ranges, such as step 0, step 1, that cover most of the work.",
        metavar="REGEX",
    )
    baseline: Path | None = GATE(
        "Only sites that are not in FILE, or that occur more often per step than in FILE, are findings. Default: none.",
        metavar="FILE",
    )
    max_per_step: float | None = GATE(
        "Synchronisations per step of a rank, over all sites; more are a finding. Default: none.", metavar="N"
    )
    max_bubble_us: float | None = GATE(
        "Limit of the GPU idle time that removing the waits would save, summed over all sites and traces; more is a "
        "finding. Default: none.",
        metavar="MICROSECONDS",
    )
    allow: list[str] | None = GATE(
        "Site that may synchronise: 'module.function', 'function' or the name of a range; repeat for several. Default: none.",
        metavar="GLOB",
    )

    def make_options(self) -> "GateOptions":
        """Return these options as the commands in syncs/ take them."""
        from dcpbench.syncs.commands import GateOptions

        return GateOptions(**{**vars(self), "allow": self.allow or ()})


class GateWithoutTimes(Gate):
    """Hold the options of a gate for commands that measure no times."""

    max_bubble_us = None
    source = None


class BaselineGate(GateWithoutTimes):
    """Hold the options of a gate for writing a baseline, without limits."""

    baseline = None
    max_per_step = None


class Report(Group):
    """Hold the options for the format and file of the report."""

    form: str = OUTPUT(
        "table, json, sarif, junit, github (annotations, and the step summary) or markdown.",
        "--format",
        default="table",
        metavar="NAME",
    )
    output: Path | None = OUTPUT("Write to this file. Default: stdout.", "-o", "--output", metavar="FILE")
    force: bool = FORCE


class RecordingOptions(Group):
    """Hold the options for what is recorded of each process."""

    warmup: int = RECORD("Steps of each process that are not recorded.", default=0, metavar="STEPS")
    steps: int | None = RECORD(
        "Steps that are recorded after the warm-up; the program then continues unprofiled. Default: all steps, which makes large traces.",
        metavar="STEPS",
    )
    step: str = RECORD(
        "A call of this function is a step, such as engine.loop:Engine.step or __main__:train_step. Default: from one "
        "call of the outermost nn.Module to the next.",
        default="",
        metavar="MODULE:FUNCTION",
    )
    keep: Path | None = RECORD(
        "Keep the traces in this folder. Default: they are deleted after they have been read.",
        "--keep-traces",
        metavar="FOLDER",
    )


@register_command(app, rich_help_panel="Traces")
def scan(traces: Traces, gate: Gate, report: Report) -> int:
    r"""Find every place in traces of torch.profiler, or exports of nsys, where the host waits for the GPU.

    A site is a place in the code where the host waits. Without --baseline, --max-per-step and --max-bubble-us each site is a finding, unless it is allowed, belongs to the profiler, occurs only before or in the first step, or calls a function that does not always block. A call that found the GPU idle is also a finding: "0 of 1 waited" means that there was nothing to wait for this time.

    The table \[tool.dcpbench.syncs] of pyproject.toml can hold defaults of these options and a list of allowed sites; a comment `# dcpbench: allow-sync(reason)` allows its line or function.

    Exit codes: 0 clean · 1 findings · 2 options or input that cannot be used · 3 the trace cannot answer.

    For example:

      dcpbench syncs scan trace.json.gz

      dcpbench syncs scan 'runs/*.pt.trace.json.gz' --baseline syncs-baseline.json --format sarif -o syncs.sarif

      dcpbench syncs scan traces/ --max-per-step 2 --allow 'engine.sampler.*' --format github

      dcpbench syncs scan report1.sqlite --step-range '^step '
    """
    from dcpbench.syncs import commands

    return commands.run_scan(traces, gate.make_options(), commands.OutputOptions(**vars(report)))


@register_command(app, rich_help_panel="Traces")
def kernels(
    traces: Traces,
    step_range: Annotated[
        str | None,
        typer.Option("--step-range", metavar="REGEX", help="Ranges that mark a step, as for scan."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=0, help="Kernels that are listed for each kind of step.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print all kernels of all traces as JSON.")] = False,
) -> int:
    """Divide the GPU time of an engine's steps among parts of a layer, such as attention, experts and exchange, and among kernels.

    Steps of decode, prefill and mixed batches are separate where the annotations of vLLM and SGLang tell them apart. The
    part follows from the kernel's name; kernels whose names match no pattern are shown as unknown.

    For example:

      dcpbench syncs kernels traces/

      dcpbench syncs kernels traces/rank0.pt.trace.json.gz --json > steps.json
    """
    from dcpbench.syncs import kernel_output

    return kernel_output.run_kernels(traces, step_range, top, as_json=as_json)


class Served(Group):
    """Hold the options for the server and for its load while it is profiled."""

    url: str = READ(
        "Address of the server (vLLM or SGLang), which must be started with its profiler enabled.",
        default="",
        metavar="URL",
    )
    traces: Path | None = READ(
        "Folder on this machine into which the server writes its traces; it is created if it does not exist.",
        metavar="FOLDER",
    )
    num_requests: int = READ(
        "Number of requests that are sent while the server is profiled.", default=8, metavar="N", min=1
    )
    concurrency: int = READ("Requests in flight at the same time.", default=4, metavar="N", min=1)
    input_tokens: int = READ("Tokens of a prompt.", default=128, metavar="N", min=1)
    output_tokens: int = READ("Tokens of an answer.", default=16, metavar="N", min=1)
    endpoint: str = READ("completions or chat.", default="completions", metavar="NAME")
    api_key_env: str = READ("Environment variable with the API key.", default="OPENAI_API_KEY", metavar="NAME")
    header: list[str] | None = READ(
        "Header that is sent with every request; can be given several times.", metavar="'NAME: VALUE'"
    )
    extra_body: str | None = READ("JSON object whose fields are added to every request.", metavar="JSON")
    wait: float = READ("Time to wait for the server's traces.", default=120.0, metavar="SECONDS")


@register_command(app, rich_help_panel="Traces")
def serve(served: Served, gate: Gate, report: Report) -> int:
    """Find where a running server waits for the GPU: start its profiler, send it a small load, and scan the traces.

    Exit codes: those of scan, also 4 if the server cannot be profiled.

    For example:

      dcpbench syncs serve --url http://127.0.0.1:8000 --traces /tmp/traces --max-per-step 2
    """
    import asyncio

    from dcpbench.errors import UsageError
    from dcpbench.plan.option_parsers import check_known, check_seconds
    from dcpbench.servers.client import Target, load_api_key
    from dcpbench.servers.profile import profile_server
    from dcpbench.servers.prompt_format import ENDPOINTS
    from dcpbench.servers.request_options import parse_extra_body, parse_headers
    from dcpbench.show.terminal import ProgressLine
    from dcpbench.syncs import commands

    if not served.url:
        raise UsageError("--url is missing; write for example --url http://127.0.0.1:8000.")
    if served.traces is None:
        raise UsageError("--traces is missing: name the folder into which the server writes its traces.")
    check_known("endpoint", served.endpoint, ENDPOINTS)
    check_seconds("--wait", served.wait, 120)
    out = commands.OutputOptions(**vars(report))
    commands.prepare_gate(gate.make_options(), out)  # mistakes are reported before a server is profiled
    headers, extra_body = parse_headers(served.header or ()), parse_extra_body(served.extra_body)
    target = Target.from_url(served.url, key=load_api_key(served.api_key_env), headers=headers)
    with ProgressLine() as line:
        found = asyncio.run(
            profile_server(
                target,
                served.traces,
                requests=served.num_requests,
                concurrency=served.concurrency,
                input_tokens=served.input_tokens,
                output_tokens=served.output_tokens,
                endpoint=served.endpoint,
                extra_body=extra_body,
                wait_s=served.wait,
                tell=line,
            )
        )
    return commands.run_scan([str(path) for path in found], gate.make_options(), out, all_ranks=True)


class BaselineOptions(Group):
    """Hold the options for the file of a baseline."""

    output: Path | None = OUTPUT(
        "Default: the baseline that pyproject.toml names, else syncs-baseline.json.", "-o", "--output", metavar="FILE"
    )
    force: bool = FORCE


@register_command(app, rich_help_panel="Traces")
def baseline(traces: Traces, written: BaselineOptions, gate: BaselineGate) -> int:
    """Write the current sites and their number per step to a baseline file, so that later scans report only new or more frequent sites.

    Allowed sites and those of the first step only are left out. The file is sorted, to be committed.

    Exit codes: 0 written · 2 options or input that cannot be used · 3 the trace cannot answer, and nothing is written.

    For example: dcpbench syncs baseline trace.json.gz -o syncs-baseline.json
    """
    from dcpbench.syncs import commands

    return commands.create_baseline(traces, gate.make_options(), written.output, force=written.force)


class ComparisonOptions(Group):
    """Hold the options for the comparison of two sides and its output."""

    tolerance: float = GATE(
        "A site is worse or better if its bubble per step (without bubbles: its wait) differs by more than this percentage.",
        default=20.0,
        metavar="PERCENT",
    )
    min_us: float = GATE(
        "The same, in microseconds per step; both must be exceeded.", default=10.0, metavar="MICROSECONDS"
    )
    form: str = OUTPUT("table, markdown (for a pull request) or json.", "--format", default="table", metavar="NAME")
    as_json: bool = OUTPUT("The same as --format json.", "--json", default=False)
    output: Path | None = OUTPUT("Write to this file. Default: stdout.", "-o", "--output", metavar="FILE")
    force: bool = FORCE


@register_command(app, rich_help_panel="Traces")
def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Traces as for scan, or a report of --format json.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same, of the changed program.")],
    compared: ComparisonOptions,
    gate: BaselineGate,
) -> int:
    """Compare two recordings of a program: synchronisation that is new, gone, worse or better.

    Sites are matched across moved lines and renamed files. A site is worse if it synchronises more often per step; at equal
    counts, if its bubble per step is larger beyond --tolerance and --min-us. Allowed sites, and those of the first step only,
    never fail.

    Exit codes: 0 nothing is new or worse · 1 something is · 2 options or input that cannot be used · 3 a recording cannot answer (see scan), or
    only one marks steps.

    For example:

      dcpbench syncs diff main/traces branch/traces

      dcpbench syncs diff main.json branch.json --format markdown -o comment.md
    """
    from dcpbench.syncs import commands

    return commands.run_diff(old, new, gate.make_options(), **vars(compared))


@register_command(app, rich_help_panel="Programs", context_settings={"allow_interspersed_args": False})
def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- PROGRAM",
            show_default=False,
            help="The command of your program: python script.py …, or torchrun …; every rank and every "
            "child process is recorded.",
        ),
    ] = None,
    *,
    recorded: RecordingOptions,
    gate: Gate,
    report: Report,
) -> int:
    """Run a program, record every process of it, and find where the host waits for the GPU.

    The program is not changed: it keeps its input, output and exit code. Its output comes before the report; for scripts,
    write the report to a file with -o. A profiler that the program itself uses takes precedence.

    Exit codes: those of scan, also 3 without a GPU, 4 if the program failed, and 130 after Ctrl-C.

    For example:

      dcpbench syncs run --warmup 5 --steps 10 -- python serve.py --model tiny

      dcpbench syncs run --step engine.loop:Engine.step --steps 10 -- torchrun --nproc-per-node 8 serve.py
    """
    from dcpbench.syncs import commands
    from dcpbench.syncs import run as runs

    out = commands.OutputOptions(**vars(report))
    return runs.run_program(program or [], runs.Recording(**vars(recorded)), gate.make_options(), out)


class DryRunOptions(Group):
    """Hold the options that only a dry run has."""

    assume_device: bool = READ(
        "Treat tensors made without a device as the GPU's, for tests that name no device; those with device='cpu', pinned "
        "ones and those assigned to a name ending in _cpu stay on the host. Default: no.",
        default=False,
    )
    write_baseline: Path | None = GATE(
        "Write the sites of this dry run to FILE, for --baseline of later ones, instead of a report. Default: no.",
        metavar="FILE",
    )


@register_command(app, name="dry-run", rich_help_panel="Programs", context_settings={"allow_interspersed_args": False})
def dry_run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- PROGRAM",
            show_default=False,
            help="The command of your program: python script.py …, or python -m module …",
        ),
    ] = None,
    *,
    own: DryRunOptions,
    gate: GateWithoutTimes,
    report: Report,
) -> int:
    """Run a program without a GPU, and find where the host would wait for one.

    Tensors on `cuda` are stand-ins with real values in host memory, so the program takes the same branches as on a GPU; each operator that would wait is reported with its line. Times, kernels and waits inside libraries stay unknown. No GPU is used, even if the machine has one.

    The waits of torch's operators were measured on a GPU. Operators that were not measured are named, and the exit code is
    3, unless the baseline accepts them. A baseline of traces does not fit a dry run: write one with --write-baseline.

    Exit codes: those of scan, also 3 if the program fails or puts nothing on the GPU, and 130 after Ctrl-C.

    For example:

      dcpbench syncs dry-run -- python serve.py --model tiny

      dcpbench syncs dry-run --write-baseline dry-run-baseline.json -- python serve.py --model tiny

      dcpbench syncs dry-run --assume-device --format github -- python -m pytest tests/test_scheduler.py
    """
    from dcpbench.launch import version_check
    from dcpbench.syncs import commands, dry_run_program

    return dry_run_program.run_without_gpu(
        program or [],
        gate.make_options(),
        commands.OutputOptions(**vars(report)),
        assume_device=own.assume_device,
        baseline=own.write_baseline,
        safe_path=bool(version_check.get_environment()),
    )
