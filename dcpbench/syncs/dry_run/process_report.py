"""Write what a dry run finds in each process of a program, for process_tree.py, which joins these reports.

A forked child inherits the virtual GPU, and begins its own report. A Python process that was started otherwise begins a
dry run after it has imported torch (recorder/child.py). A report is written when the process ends, also by os._exit, as
multiprocessing's children do, before it becomes another program, and on SIGTERM.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.process
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from dcpbench.syncs.dry_run import dry_run
from dcpbench.syncs.dry_run_program import ProcessAnswer, Settings
from dcpbench.syncs.recorder.child import ENTERED, TERMINATED, is_program_start, write_note

if TYPE_CHECKING:
    from types import FrameType

    from dcpbench.syncs.dry_run import DryRun

_WORKERS = {("multiprocessing.pool", "worker"), ("torch.utils.data._utils.worker", "_worker_loop")}  # await tasks


def follow_process(settings: dict[str, Any]) -> None:
    """Begin a dry run in this process, which lasts until the process ends."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("torch was imported by another thread than the main one")
    given = msgspec.convert(settings, Settings)
    stack = contextlib.ExitStack()
    run = stack.enter_context(dry_run(assume_device=given.assume_device))
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    report = ProcessReport(run, given, command)
    report.begin()
    _keep_exit_code(report)

    @atexit.register
    def finish() -> None:
        failed = getattr(sys, "last_value", None) is not None
        report.finish(report.code or int(failed))
        stack.close()


def _keep_exit_code(report: ProcessReport) -> None:
    """Keep the exit code of a spawned child of multiprocessing, which ends by sys.exit."""
    leave = sys.exit

    @functools.wraps(leave)
    def exit_process(code: Any = None, /) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "multiprocessing.spawn":
            report.code = code if isinstance(code, int) else int(code is not None)
        leave(code)

    sys.exit = exit_process


class ProcessReport:
    """Hold where this process writes its report; a forked child continues with a separate report."""

    def __init__(self, run: DryRun, settings: Settings, name: str) -> None:
        self.code = 0  # exit code, as far as it is known
        self._run = run
        run.follows = True
        self._settings = settings
        self._name = name
        self._pid = 0
        self._finishing = self._terminated = False
        self._file = Path()
        os.register_at_fork(after_in_child=self._handle_fork)
        self._apply_patches()

    def begin(self, file: str = "") -> None:
        """Note that the dry run is on in this process, which writes a report to this file of the folder."""
        self._pid = os.getpid()
        folder = Path(self._settings.folder)
        self._file = folder / (file or f"{self._pid}-{time.monotonic_ns()}.report")
        write_note(folder, ENTERED, sys.orig_argv, report=self._file.name)
        if not file and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGTERM)
            if handler == signal.SIG_DFL or getattr(handler, "__module__", "") == "_dcpbench_child":
                signal.signal(signal.SIGTERM, self._handle_sigterm)

    def write(self, code: int, *, complete: bool = True) -> None:
        """Write the report."""
        settings = self._settings
        report = self._run.report(program=self._describe(), step_range=settings.step_range, root=Path(settings.root))
        report.traces[0].coverage.complete = complete and not code
        report.traces[0].rank, report.traces[0].world_size = _get_rank()
        started = self._run.children
        answer = ProcessAnswer(
            pid=self._pid, code=code, report=report, expected=started.expected, workers=started.workers
        )
        part = self._file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(answer))
        part.replace(self._file)

    def finish(self, code: int) -> None:
        """Write the report at the end of the process; a SIGTERM in between ends it afterwards."""
        self._finishing = os.getpid() == self._pid
        self.try_to_write(code)
        if self._terminated:
            _end_by_signal(signal.SIGTERM)

    def try_to_write(self, code: int, *, complete: bool = True) -> None:
        """Write the report; without one this process counts as missing, so that an error must not fail the program."""
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                self.write(code, complete=complete)

    def _describe(self) -> str:
        """Return the name of the process: that of multiprocessing with its function, a rank, or the command."""
        process = multiprocessing.process.current_process()
        if process.name != "MainProcess":
            target = getattr(process, "_target", None)
            return f"{process.name} ({getattr(target, '__name__', '') or type(process).__name__})"
        rank, _ = _get_rank()
        return self._name if rank is None else f"rank {rank} ({self._name})"

    def _handle_fork(self) -> None:
        """Begin the report of a forked child; one that only becomes another program has none."""
        if is_program_start():
            return
        self._finishing = self._terminated = False
        self._run.forget()
        self._name = f"{self._name.removesuffix(', forked')}, forked"
        self.code = 0
        # Threads of OpenMP do not survive a fork, and the operators of a real GPU would not have used them.
        torch.set_num_threads(1)
        self.begin()

    def _apply_patches(self) -> None:
        leave = os._exit

        @functools.wraps(leave)
        def write_and_exit(status: int) -> Any:
            self.finish(status)
            leave(status)

        os._exit = write_and_exit
        for name in ("execv", "execve"):
            setattr(os, name, self._write_before(getattr(os, name)))

    def _write_before(self, function: Any) -> Any:
        @functools.wraps(function)
        def write_and_call(*args: Any, **kwargs: Any) -> Any:
            self.try_to_write(0)
            return function(*args, **kwargs)

        return write_and_call

    def _handle_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Write the report, and end as without this handler.

        Pools end their workers so, which wait for their next task then; any other work was cut off.
        """
        if self._finishing:
            self._terminated = True
            return
        calls = _list_calls(frame)
        if ("multiprocessing.process", "run") not in calls[:-1]:
            write_note(Path(self._settings.folder), TERMINATED, sys.orig_argv)
        self.try_to_write(0, complete=_waits_for_task(calls))
        _end_by_signal(number)


def _end_by_signal(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _get_rank() -> tuple[int | None, int | None]:
    """Return rank and world size that torchrun gave to this process."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not rank.isdecimal() or not size.isdecimal():
        return None, None
    return int(rank), int(size)


def _list_calls(frame: FrameType | None) -> list[tuple[str, str]]:
    """Return module and name of the functions that run, outermost first."""
    calls = []
    while frame is not None:
        calls.append((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        frame = frame.f_back
    return calls[::-1]


def _waits_for_task(calls: list[tuple[str, str]]) -> bool:
    """Return True if a worker of a multiprocessing.Pool or of a DataLoader is between two tasks."""
    inner = next((calls[n + 1 :] for n, call in enumerate(calls) if call in _WORKERS), None)
    if not inner:  # no worker, or one that calls nothing
        return inner is not None
    package, _, module = inner[0][0].partition(".")
    return package == "multiprocessing" and module != "pool"  # a queue, or what the worker does around its tasks
