"""Run a program unchanged for `dcpbench syncs run`, and scan what torch's profiler recorded. No torch here.

The program's Python processes, including torchrun's ranks and other children, find recorder/ first on PYTHONPATH and
record themselves. They leave a trace each, and a note with the reason if there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import CapacityError, ExitCode, OutputError, UsageError
from dcpbench.records.lines import UNREADABLE
from dcpbench.show.text import format_count, make_printable
from dcpbench.syncs.dry_run_program import EXAMPLE, make_python_path, suggest_dry_run
from dcpbench.syncs.process_tree import list_unseen_programs
from dcpbench.syncs.recorder import child
from dcpbench.syncs.sync_report import Coverage, Report, TraceSummary, rename_traces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.syncs.commands import GateOptions, OutputOptions
    from dcpbench.syncs.gating.gate import Gate

VARIABLE = "DCPBENCH_SYNCS_RECORD"
CPU_VARIABLE = "DCPBENCH_SYNCS_RECORD_CPU"  # set by tests to record without a GPU, and so without any syncs
NOTHING_RECORDED = (
    "Nothing was recorded: no Python process of the program imported torch and then used CUDA or ended by itself, or it "
    "ignored PYTHONPATH (python -E and -I do, and programs that start others with a new environment)."
)
NOT_LOADED = (
    "it ignores or lacks our PYTHONPATH; let the program start it with its own environment, without -E, -I and -S"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """Define what is recorded of each process, as given on the command line."""

    warmup: int = 0  # number of steps before the recording
    steps: int | None = None  # number of recorded steps; None until the end
    step: str = ""  # `MODULE:FUNCTION`, one call of which is a step; empty for the calls of the outermost nn.Module
    keep: Path | None = None  # folder in which the traces are kept

    def check_values(self) -> None:
        """Raise UsageError for values that cannot work, OutputError for a folder that holds other traces."""
        if self.warmup < 0:
            raise UsageError(f"--warmup {self.warmup} is no number of steps; give one from 0.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps {self.steps} would record nothing; give a number from 1.")
        if self.step and not re.fullmatch(r"[\w.]+:[\w.]+", self.step):
            raise UsageError(
                f"--step {self.step!r} is not MODULE:FUNCTION; write engine.loop:Engine.step, for example."
            )
        if self.keep is not None and self.keep.exists() and not self.keep.is_dir():
            raise OutputError(f"{self.keep} is a file; give a folder with --keep-traces.")
        if self.keep is not None and self.keep.is_dir() and any(self.keep.glob("*.json")):
            raise OutputError(f"{self.keep} already holds traces; give another folder with --keep-traces, or empty it.")


class Note(msgspec.Struct):
    """Hold the note of a process, as recorder/recording.py writes it."""

    pid: int
    rank: str = ""
    role: str = ""  # name that multiprocessing gives to the process
    program: str = ""
    trace: str = ""
    cuda: bool = False
    cut: bool = False
    steps: int = 0
    step_found: bool = True  # False if the function of --step was not found
    problems: list[str] = []

    @property
    def name(self) -> str:
        """Return the name of the process for messages."""
        if self.rank:
            return f"rank {self.rank} (process {self.pid})"
        return f"process {self.pid} ({self.role or self.program})"


def run_program(command: Sequence[str], recording: Recording, options: GateOptions, out: OutputOptions) -> int:
    """Run the program and judge what it did; returns 0, 1 or 3 as `scan`, 4 where the program failed, 130 after Ctrl-C.

    Raises UsageError where the command or an option cannot work and CapacityError without a GPU, before it starts.
    """
    from dcpbench.syncs.commands import finish_report, prepare_gate

    gate = prepare_gate(options, out)
    recording.check_values()
    if not command:
        raise UsageError("There is no program; write it after `--`: dcpbench syncs run -- python script.py")
    if shutil.which(command[0]) is None:
        hint = f"python {shlex.quote(command[0])}" if command[0].endswith(".py") else "python script.py"
        raise UsageError(f"{command[0]} is no program that can be started; write `-- {hint}`.")
    if not has_gpu() and not os.environ.get(CPU_VARIABLE):
        raise CapacityError(f"There is no GPU here to wait for; {suggest_dry_run(command)}")
    with _open_folder(recording.keep) as folder:
        code = run_process(command, build_environment(folder, recording))
        report = _scan_folder(folder, recording, gate)
        if code:
            damage = f"{_format_ending(code)}, so the rest of its run is not known"
            add_incomplete_program(report, shlex.join(command), damage)
        verdict = finish_report(report, gate, out)
        if code:
            stopped = code in {-signal.SIGINT, ExitCode.INTERRUPTED}
            verdict = ExitCode.INTERRUPTED if stopped else ExitCode.FAILED
            sys.stderr.write(
                f"The recorded program {_format_ending(code)}, so this command ends with exit code {verdict:d}.\n"
            )
        if recording.keep is not None and any(folder.glob("*.json")):
            sys.stderr.write(f"Traces are in {make_printable(str(recording.keep))}\n")
    return verdict


def run_process(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the program to its end with stdin, stdout and stderr of our own; returns what `Popen.wait` does.

    Ctrl-C reaches the program from the terminal itself, and SIGTERM is passed on; both wait for its end.
    """
    child: subprocess.Popen[bytes] | None = None
    interrupted: list[int] = []

    def forward_signal(number: int, _frame: object) -> None:
        if child and child.poll() is None:
            child.send_signal(number)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, forward_signal)
    try:
        child = subprocess.Popen(command, env=env)
        code = child.wait()
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started ({error.strerror}); give a program after `--`.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # torchrun, for one, ends with 1 after Ctrl-C.
    return -signal.SIGINT if interrupted and code else code


def build_environment(folder: Path, recording: Recording) -> dict[str, str]:
    """Return the program's environment: that of this process, with the recorder first on PYTHONPATH
    and its settings.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = make_python_path()
    settings = {
        "folder": str(folder.resolve()),
        "warmup": recording.warmup,
        "steps": recording.steps,
        "step": recording.step,
        "cpu": bool(env.get(CPU_VARIABLE)),
    }
    notes = json.dumps({"folder": settings["folder"]})
    # Some versions of torch's profiler print to stderr when they start and stop.
    return {"KINETO_LOG_LEVEL": "99"} | env | {VARIABLE: json.dumps(settings), child.VARIABLE: notes}


def has_gpu() -> bool:
    """Return True if there is a GPU of NVIDIA or AMD; CUDA is not used for this, because it would cost seconds."""
    if Path("/dev/kfd").exists():
        return True
    import pynvml

    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return False


def read_notes(folder: Path) -> list[Note]:
    """Return the notes of the processes, by rank and process; incomplete notes are left out."""
    notes = []
    for path in folder.glob("*.note"):
        with contextlib.suppress(OSError, *UNREADABLE):
            notes.append(msgspec.json.decode(path.read_bytes(), type=Note))
    return sorted(notes, key=lambda n: (n.rank.zfill(6) if n.rank else "", n.pid))


def explain_notes(notes: Sequence[Note], recording: Recording) -> list[str]:
    """Return sentences on what was not recorded as requested, except for traces that `add_notes` calls incomplete."""
    if not notes:
        return [NOTHING_RECORDED]
    lines = [f"{note.name}: {problem}." for note in notes if note.trace and not note.cut for problem in note.problems]
    recorded = [note for note in notes if note.trace]
    if not recorded and not any(note.cuda for note in notes):
        lines.append(f"No process of the program used CUDA. A dry run finds what would wait without a GPU: {EXAMPLE}")
    if recorded and not any(note.steps for note in recorded):
        lines.append(f"No steps were seen: {_explain_no_steps(recorded, recording)}")
    return lines


def _explain_no_steps(notes: Sequence[Note], recording: Recording) -> str:
    """Return why no process has begun a step, and the option to use."""
    if not recording.step:
        return "no nn.Module was called; name the function of a step with --step MODULE:FUNCTION."
    if any(note.step_found for note in notes):
        return f"{recording.step} was never called; name a function that is, or leave --step out."
    return (
        f"{recording.step} was never found; check the name, define it before CUDA is first used or move it into a "
        "module that is imported, and name that one, or leave --step, --steps and --warmup out."
    )


def _explain_no_trace(note: Note, recording: Recording) -> str:
    """Return a clause on why a process that used CUDA left no trace, and what to do."""
    if note.problems:
        return "; ".join(note.problems)
    if not note.steps:
        none = f"--warmup {recording.warmup} leaves none: " if recording.warmup else ""
        return f"it ended after 0 steps; {none}{_explain_no_steps([note], recording)}".removesuffix(".")
    if note.steps <= recording.warmup:
        return f"it ended after {format_count(note.steps, 'step')}, and --warmup {recording.warmup} leaves none; give fewer"
    return "it ended before its trace was written; record fewer steps with --steps"


@contextlib.contextmanager
def _open_folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder for the processes: the one that is kept, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dcpbench-syncs-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{keep} cannot be made ({error.strerror}); give another folder with --keep-traces."
        ) from error
    _remove_notes(keep)
    try:
        yield keep
    finally:
        _remove_notes(keep)


def _remove_notes(folder: Path) -> None:
    for left in (path for ending in (".note", ".part", child.SUFFIX) for path in folder.glob(f"*{ending}")):
        left.unlink(missing_ok=True)


def _scan_folder(folder: Path, recording: Recording, gate: Gate) -> Report:
    """Return the report on the traces, completed from the notes."""
    from dcpbench.syncs.commands import locate_calls

    notes = read_notes(folder)
    for sentence in explain_notes(notes, recording):
        sys.stderr.write(f"- {make_printable(sentence)}\n")
    report = scan_recordings(folder, gate) if any(folder.glob("*.json")) else Report()
    locate_calls(report, gate)
    add_notes(report, notes, recording)
    for command in list_unseen_programs(folder):
        add_incomplete_program(report, command, f"did not load the recorder: {NOT_LOADED}")
    if recording.keep is None:
        remove_folder_names(report, folder)
    return report


def scan_recordings(folder: Path, gate: Gate) -> Report:
    """Return the report on the traces; without a range that matches --step-range they are incomplete, and not lost."""
    from dcpbench.show.terminal import ProgressLine
    from dcpbench.syncs.files import expand_names
    from dcpbench.syncs.scan import scan_traces

    paths = expand_names([str(folder)])
    with ProgressLine() as progress:
        try:
            return scan_traces(paths, root=gate.root, step_range=gate.step_range, progress=progress)
        except UsageError:
            report = scan_traces(paths, root=gate.root, progress=progress)
    mark_unmatched_steps(report, gate)
    return report


def mark_unmatched_steps(report: Report, gate: Gate) -> None:
    """Make the report incomplete, as --step-range matches no range of the program."""
    for trace in (trace for trace in report.traces if not trace.front_end):
        trace.coverage.complete = False
        advice = "name one that is there, or leave it out"
        trace.coverage.damage.append(f"has no range that matches --step-range {gate.step_range!r}: {advice}")


def add_notes(report: Report, notes: Sequence[Note], recording: Recording) -> None:
    """Add what is missing to the report, so that it is not `clean` if a rank was not recorded."""
    traces = {Path(trace.path).name: trace for trace in report.traces}
    for note in notes:
        trace = traces.get(note.trace)
        if trace is not None:
            trace.coverage.complete = trace.coverage.complete and not note.cut
            if note.cut:
                trace.coverage.damage = [*trace.coverage.damage, f"is cut short: {'; '.join(note.problems)}"]
            else:
                trace.coverage.notes = [*trace.coverage.notes, *(f"{problem}." for problem in note.problems)]
        elif note.cuda:
            why = f"has left no trace: {_explain_no_trace(note, recording)}"
            coverage = Coverage(detector="scan", complete=False, damage=[why])
            rank = int(note.rank) if note.rank.isdecimal() else None
            report.traces.append(TraceSummary(path=note.name, rank=rank, coverage=coverage))


def add_incomplete_program(report: Report, command: str, damage: str) -> None:
    """Add a program of which no or not all calls were recorded, so that the report is not `clean`."""
    coverage = Coverage(detector="scan", complete=False, damage=[damage])
    report.traces.append(TraceSummary(path=command, coverage=coverage))


def remove_folder_names(report: Report, folder: Path) -> None:
    """Give traces in a temporary folder their names instead of their paths."""
    paths = [Path(trace.path) for trace in report.traces]
    rename_traces(report, {str(path): path.name for path in paths if path.parent == folder})


def _format_ending(code: int) -> str:
    """Return how a process ended: with an exit code, or by a signal if the code is negative."""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
