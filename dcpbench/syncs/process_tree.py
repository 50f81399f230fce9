"""Join the reports of all processes of a dry run, and name the processes that may use a GPU and left no report.

Python processes leave notes (recorder/child.py), unless they run without the environment or the start-up files of the
program. A process is followed if its notes show that the dry run was on in it and its report is there. It is harmless if
it has ended without importing torch and without starting a program that may use a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.records.lines import UNREADABLE
from dcpbench.syncs.dry_run_program import ANSWER, ProcessAnswer
from dcpbench.syncs.programs import is_python, may_use_gpu
from dcpbench.syncs.recorder.child import (
    BEGAN,
    ENDED,
    ENTERED,
    EXECUTED,
    FAILED,
    FORKED,
    STARTED,
    SUFFIX,
    TERMINATED,
    TORCH,
)
from dcpbench.syncs.sites import merge_sites
from dcpbench.syncs.sync_report import ChildProcess, Report, build_report, rename_traces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

GRACE_S = 10.0  # time that processes get to end after the first process of the program has ended
DESCENDANT = "a child's child"
NOT_SEEN = "the dry run was not on in it"
KILLED = "it ended without its report: it was killed, or crashed"
RUNNING = "it still runs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """Hold the notes of a Python process."""

    pid: int
    lines: tuple[dict[str, Any], ...]

    @property
    def events(self) -> frozenset[str]:
        """Return the events that happened."""
        return frozenset(line["event"] for line in self.lines)

    @property
    def command(self) -> str:
        """Return the command line of the process."""
        own = [line["command"] for line in self.lines if line["event"] not in {STARTED, EXECUTED}]
        return shlex.join(own[-1]) if own else ""

    def list_started(self) -> list[list[str]]:
        """Return the commands that may use a GPU and of which the notes are the only source.

        Where the dry run is on, it tracks the programs that the process starts, though not what the process becomes.
        """
        found, tracked = [], False
        for line in self.lines:
            tracked |= line["event"] == ENTERED
            if line["event"] == EXECUTED:
                tracked = False
            elif line["event"] != STARTED or tracked:
                continue
            argv = line["command"]
            if may_use_gpu(argv) and (not Path(argv[0]).is_absolute() or Path(argv[0]).exists()):
                found.append(argv)
        return found

    def explain_state(self, folder: Path, *, is_worker: bool = False) -> str:
        """Return why the process is not followed; empty if it is, or if it is harmless.

        A worker of a pool may be terminated outside of its tasks.
        """
        programs: list[list[dict[str, Any]]] = [[]]
        for line in self.lines:
            programs += [[]] * (line["event"] == BEGAN)
            programs[-1] = [*programs[-1], line]
        reasons = (_explain_program(lines, folder, is_worker=is_worker) for lines in programs if lines)
        return RUNNING if is_running(self.pid) else next(filter(None, reasons), "")


def _explain_program(lines: Sequence[dict[str, Any]], folder: Path, *, is_worker: bool) -> str:
    """Return why one Python program that was run in a process is not followed; empty if it is, or if it is harmless."""
    facts = {line["event"]: line for line in lines}
    if FAILED in facts:
        return str(facts[FAILED]["reason"])
    if is_worker and TERMINATED in facts:
        return ""
    if ENTERED in facts:
        return "" if (folder / facts[ENTERED]["report"]).is_file() else KILLED
    if not facts.keys() & {ENDED, EXECUTED}:
        return KILLED
    return NOT_SEEN if TORCH in facts else ""


def wait_for_processes(folder: Path) -> None:
    """Wait until the Python processes of the program have ended, or until they have had time to."""
    end = time.monotonic() + GRACE_S
    while any(map(is_running, read_notes(folder))) and time.monotonic() < end:
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return True if a process runs; False for one that has ended, though its parent may not have noticed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # there is no such file on macOS
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    return True


def read_notes(folder: Path) -> dict[int, Notes]:
    """Return process -> notes; lines that were cut off are left out."""
    found = {}
    for path in folder.glob(f"*{SUFFIX}"):
        lines = []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text))
        pid = int(path.name.removesuffix(SUFFIX))
        found[pid] = Notes(pid=pid, lines=tuple(lines))
    return found


def join_reports(first: ProcessAnswer, folder: Path) -> Report:
    """Return one report over all processes, the first of the program first."""
    notes = read_notes(folder)
    answers = [first, *_read_answers(folder)]
    known: set[int] = set()
    workers = {pid for answer in answers for pid in answer.workers}
    for answer in answers:
        coverage = answer.report.traces[0].coverage
        coverage.complete |= answer.pid in workers and TERMINATED in notes[answer.pid].events
        coverage.children, pids = _resolve_children(answer, notes, folder)
        known |= pids
    known |= {note.pid for note in notes.values() for line in note.lines if line.get("report") == ANSWER}
    answers[0].report.traces[0].coverage.children += _list_descendants(notes, known, folder)
    return _merge([answer.report for answer in answers])


def _read_answers(folder: Path) -> list[ProcessAnswer]:
    answers = []
    for path in sorted(folder.glob("*.report")):
        with contextlib.suppress(OSError, *UNREADABLE):
            answers.append(msgspec.json.decode(path.read_bytes(), type=ProcessAnswer))
    return sorted(answers, key=lambda a: (a.report.traces[0].rank or 0, a.report.traces[0].path))


def _resolve_children(
    answer: ProcessAnswer, notes: dict[int, Notes], folder: Path
) -> tuple[list[ChildProcess], set[int]]:
    """Return the child processes that were not followed, and the numbers of all of them."""
    left, pids = [], set()
    for child in answer.report.traces[0].coverage.children:
        pid = child.pid or 0
        pids.add(pid)
        if not child.may_use_gpu:
            left.append(child)
        elif pid in answer.workers and answer.expected.get(pid) == ENTERED and _ended_at_once(pid, notes):
            left.append(msgspec.structs.replace(child, may_use_gpu=False))
        elif pid not in notes or answer.expected.get(pid, "") not in notes[pid].events:
            left.append(msgspec.structs.replace(child, reason=NOT_SEEN))
        elif reason := notes[pid].explain_state(folder, is_worker=pid in answer.workers):
            left.append(msgspec.structs.replace(child, reason=reason))
        elif ENTERED not in notes[pid].events:
            left.append(msgspec.structs.replace(child, may_use_gpu=False))
    return left, pids


def _ended_at_once(pid: int, notes: Mapping[int, Notes]) -> bool:
    """Return True if a forked worker was ended before its first task, as a pool does that has no more tasks."""
    return not (pid in notes and notes[pid].events - {FORKED, TERMINATED}) and not is_running(pid)


def _list_descendants(notes: dict[int, Notes], known: set[int], folder: Path) -> list[ChildProcess]:
    """Return the processes that only notes name, and that were not followed."""
    found = []
    for pid, note in notes.items():
        if pid not in known and (reason := note.explain_state(folder)):
            found.append(ChildProcess(pid=pid, command=note.command, start_method=DESCENDANT, reason=reason))
        unseen = _drop_begun(note.list_started(), pid, notes.values())
        found += [ChildProcess(command=shlex.join(argv), start_method=DESCENDANT, reason=NOT_SEEN) for argv in unseen]
    return found


def list_unseen_programs(folder: Path) -> list[str]:
    """Return the command lines of Python programs that Python processes started and that left no notes."""
    notes = read_notes(folder)
    unseen = [w for pid, note in notes.items() for w in _drop_begun(note.list_started(), pid, notes.values())]
    return [shlex.join(argv) for argv in unseen if is_python(argv[0])]


def _drop_begun(started: Sequence[list[str]], pid: int, notes: Iterable[Notes]) -> list[list[str]]:
    """Return the commands of a process without the Python programs that have left notes of their own."""
    begun = [
        line["command"]
        for note in notes
        for line in note.lines
        if line["event"] == BEGAN and pid in (note.pid, line["parent"])
    ]
    left = []
    for argv in started:
        found = next((command for command in begun if _is_command_of(command, argv)), None)
        if found is not None and is_python(argv[0]):
            begun.remove(found)
        else:
            left.append(argv)
    return left


def _is_command_of(command: Sequence[str], argv: Sequence[str]) -> bool:
    """Return True if Python's own command line can be that of a command: `python3 /bin/torchrun x.py` of `torchrun x.py`."""
    if command[1:] == argv[1:]:
        return True
    script = command[-len(argv)] if len(command) > len(argv) else ""
    return command[len(command) - len(argv) + 1 :] == argv[1:] and Path(script).name == Path(argv[0]).name


def _merge(reports: Sequence[Report]) -> Report:
    """Return one report; children that put nothing on the virtual GPU and started nothing are left out."""
    active = [reports[0], *filter(_has_content, reports[1:])]
    names: Counter[str] = Counter()
    for report in active:
        (trace,) = report.traces
        names[trace.path] += 1
        if names[trace.path] > 1:
            rename_traces(report, {trace.path: f"{trace.path} #{names[trace.path]}"})
    traces = [report.traces[0] for report in active]
    if any(trace.coverage.ops for trace in traces):
        for trace in traces:
            trace.front_end = not trace.coverage.ops and trace.coverage.complete
    return build_report(traces, merge_sites([report.sites for report in active], by_line=True))


def _has_content(report: Report) -> bool:
    coverage = report.traces[0].coverage
    return bool(coverage.ops or report.sites or coverage.children or not coverage.complete)
