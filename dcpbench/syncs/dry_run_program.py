"""Run a program in a process with a virtual GPU for `dcpbench syncs dry-run`, and judge its report. No torch here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dcpbench.errors import ExitCode, UsageError
from dcpbench.records.lines import UNREADABLE
from dcpbench.show.text import make_printable
from dcpbench.syncs.recorder.child import VARIABLE
from dcpbench.syncs.sync_report import Coverage, Report, TraceSummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.commands import GateOptions, OutputOptions

PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
LAUNCHERS = frozenset({"accelerate", "deepspeed", "mpirun", "srun"})
MAIN = "dcpbench.syncs.dry_run.main"
RECORDER = Path(__file__).parent / "recorder"
ANSWER = "answer.json"  # file of the first process's answer
EXAMPLE = "dcpbench syncs dry-run -- python script.py"


class Settings(msgspec.Struct, kw_only=True):
    """Define how each process of the program runs, and where it leaves its notes and its report."""

    folder: str = ""
    package: str = str(Path(__file__).parents[2])  # folder from which a child process imports dcpbench
    root: str = ""
    assume_device: bool = False
    step_range: str | None = None


class Job(msgspec.Struct, kw_only=True):
    """Define what the first process runs."""

    kind: Literal["script", "module", "code"]
    target: str  # path of the script, name of the module, or the code
    arguments: list[str] = []
    name: str = ""  # name of the program for messages
    settings: Settings = msgspec.field(default_factory=Settings)


class ProcessAnswer(msgspec.Struct, kw_only=True):
    """Hold the result of a process."""

    pid: int
    code: int  # the exit code, as far as it is known; 1 after an exception
    report: Report
    expected: dict[int, str] = {}  # child process -> event that it notes unless something keeps it from noting
    workers: list[int] = []  # workers of a multiprocessing.Pool


def run_without_gpu(
    command: Sequence[str],
    options: GateOptions,
    out: OutputOptions,
    *,
    assume_device: bool,
    baseline: Path | None = None,
    safe_path: bool = False,
) -> int:
    """Run the program and judge what would wait; return 0, 1 or 3 as `scan`, 3 also if the program fails, 130 after Ctrl-C.

    With `baseline` that file is written instead of a report. With `safe_path` dcpbench is not looked for in the working
    directory; what the program imports is.

    Raises UsageError for a command that is no Python program, or options that cannot work; nothing was started then.
    """
    from dcpbench.syncs import process_tree
    from dcpbench.syncs.commands import finish_report, prepare_baseline_gate, prepare_gate, write_baseline
    from dcpbench.syncs.run import mark_unmatched_steps, run_process

    python, flags, job = parse_command(command)
    gate = prepare_gate(options, out, "dry-run") if baseline is None else prepare_baseline_gate(options, out, baseline)
    with tempfile.TemporaryDirectory(prefix="dcpbench-syncs-") as folder:
        job.settings.folder, job.settings.root = folder, str(gate.root)
        job.settings.assume_device, job.settings.step_range = assume_device, gate.step_range
        file = Path(folder) / "job.json"
        file.write_bytes(msgspec.json.encode(job))
        command = [python, *flags, *["-P"] * safe_path, "-m", MAIN, str(file)]
        answer = _read_answer(job, run_process(command, build_environment(job.settings)))
        process_tree.wait_for_processes(Path(folder))
        answer.report = process_tree.join_reports(answer, Path(folder))
    if answer.code:
        sys.stderr.write(
            f"{make_printable(job.name)} ended with exit code {answer.code}; what it did before is known, the rest is not.\n"
        )
        answer.report.traces[0].coverage.complete = False
    elif gate.step_range is not None and not any(trace.steps for trace in answer.report.traces):
        mark_unmatched_steps(answer.report, gate)
    if baseline is None:
        verdict = finish_report(answer.report, gate, out)
    else:
        verdict = write_baseline(answer.report, gate, baseline, force=out.force, detector="dry-run")
    if answer.code in {-signal.SIGINT, ExitCode.INTERRUPTED}:
        return ExitCode.INTERRUPTED
    if answer.code:
        sys.stderr.write("The program failed: exit code 3.\n")
    return ExitCode.NO_ANSWER if answer.code else verdict


def parse_command(command: Sequence[str]) -> tuple[str, list[str], Job]:
    """Return (Python, its own flags, job) of a command line.

    A bare `python` is the interpreter that runs dcpbench. Raise UsageError for anything but Python.
    """
    if not command:
        raise UsageError(f"There is no program; write it after `--`: {EXAMPLE}")
    argv, name = list(command), make_printable(shlex.join(command))
    first = Path(argv[0]).name
    if first in LAUNCHERS:
        raise UsageError(f"{first} is no Python program of torch's; use torchrun, or give one rank's own: {EXAMPLE}")
    if first == "torchrun":
        return sys.executable, [], Job(kind="module", target="torch.distributed.run", arguments=argv[1:], name=name)
    if PYTHON.fullmatch(first):
        python = sys.executable if argv[0] == first else argv[0]
        if shutil.which(python) is None:
            raise UsageError(f"{make_printable(python)} is no program that can be started; write: {EXAMPLE}")
        argv = argv[1:]
    elif first.endswith(".py"):
        python = sys.executable
    else:
        raise UsageError(f"{make_printable(argv[0])} is no Python program; write: {_suggest_command(argv)}")
    flags: list[str] = []
    while argv and argv[0].startswith("-") and argv[0] not in {"-", "-m", "-c"}:
        taken = 2 if argv[0] in {"-W", "-X"} else 1
        flags += argv[:taken]
        argv = argv[taken:]
    return python, flags, _build_job(argv, name)


def _suggest_command(argv: Sequence[str]) -> str:
    """Return what to type for a command that is not Python: `python -m pytest tests` for `pytest tests`."""
    module = importlib.util.find_spec(argv[0]) if argv[0].isidentifier() else None
    folders = module.submodule_search_locations if module else None
    if any((Path(folder) / "__main__.py").is_file() for folder in folders or ()):
        return f"dcpbench syncs dry-run -- python -m {make_printable(shlex.join(argv))}"
    return EXAMPLE


def suggest_dry_run(command: Sequence[str]) -> str:
    """Return the command to use instead if there is no GPU for this one."""
    try:
        parse_command(command)
    except UsageError:
        return f"a dry run of one process needs none: {EXAMPLE}"
    return f"write `dcpbench syncs dry-run -- {make_printable(shlex.join(command))}` instead."


def _build_job(argv: list[str], name: str) -> Job:
    """Return the job from the arguments that follow Python's own flags."""
    if argv and argv[0] in {"-m", "-c"}:
        if len(argv) == 1:
            raise UsageError(f"{argv[0]} needs what to run: dcpbench syncs dry-run -- python -m package.module")
        return Job(kind="module" if argv[0] == "-m" else "code", target=argv[1], arguments=argv[2:], name=name)
    if not argv or argv[0] == "-":
        raise UsageError(f"There is no script for Python to run; write: {EXAMPLE}")
    if not Path(argv[0]).is_file():
        raise UsageError(f"{make_printable(argv[0])} is no file; give the path of a script: {EXAMPLE}")
    return Job(kind="script", target=argv[0], arguments=argv[1:], name=name)


def make_python_path() -> str:
    """Return PYTHONPATH with the recorder first; an empty entry would put the current folder on the program's path."""
    return os.pathsep.join(filter(None, (str(RECORDER), os.environ.get("PYTHONPATH"))))


def build_environment(settings: Settings) -> dict[str, str]:
    """Return the program's environment: ours, without GPUs, with Triton's interpreter, which must be on before kernels are
    defined, and with what child processes need to be followed.
    """
    notes = {"PYTHONPATH": make_python_path(), VARIABLE: json.dumps({**msgspec.to_builtins(settings), "first": True})}
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    return {**os.environ, **hidden, **notes, "TRITON_INTERPRET": "1"}


def _read_answer(job: Job, code: int) -> ProcessAnswer:
    """Return the process's answer; if it died without one, an empty report that states this."""
    try:
        return msgspec.json.decode(Path(job.settings.folder, ANSWER).read_bytes(), type=ProcessAnswer)
    except (OSError, *UNREADABLE):
        coverage = Coverage(detector="dry-run", complete=False, notes=["The process ended before it could report."])
        return ProcessAnswer(
            pid=0, code=code or 1, report=Report(traces=[TraceSummary(path=job.name, coverage=coverage)])
        )
