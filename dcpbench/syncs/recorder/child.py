"""Leave notes for a dry run on this Python process, which a program of the dry run has started, and follow it.

The file FOLDER/PID.child has a line of JSON for each event, with the command line of the process or of the program that
it starts, and with its parent process:

- began: Python started, and runs these files;
- forked: the process is a fork of one that runs these files;
- torch: torch is about to be imported;
- entered: the dry run is on in this process, which writes the file `report` at its end;
- failed: torch was imported, and the dry run could not begin for the reason `reason`;
- started, executed: the process is about to start, or to become, the program in `command`;
- ended, terminated: the process is about to end, by itself or by SIGTERM.
"""

import atexit
import contextlib
import importlib
import importlib.abc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_signal: Any = importlib.import_module("_signal")  # without the enumerations of signal, which take time
VARIABLE = "DCPBENCH_SYNCS_CHILDREN"
SUFFIX = ".child"
BEGAN, FORKED, TORCH, ENTERED, FAILED = "began", "forked", "torch", "entered", "failed"
STARTED, EXECUTED, ENDED, TERMINATED = "started", "executed", "ended", "terminated"
STARTS = {"os.exec": EXECUTED, **dict.fromkeys(("os.posix_spawn", "os.system", "subprocess.Popen"), STARTED)}
"""Audit event of Python -> event of the note. It has the program and its arguments, except for `os.system`, which has a
shell's command."""


class Watch(importlib.abc.MetaPathFinder):
    """Watch which modules are imported, without finding any; processes that are forked later inherit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: object) -> None:
        """Leave a note if torch is about to be imported."""
        if name == "torch":
            write_note(self.folder, TORCH, sys.orig_argv)

    def handle_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Leave a note if a program is about to be started."""
        if event in STARTS:
            with contextlib.suppress(Exception):  # whatever is wrong with the command is for the function to report
                write_note(self.folder, STARTS[event], _list_words(event, arguments))


def write_note(folder: Path, event: str, command: list[str], **facts: str) -> None:
    """Append a line to the notes of this process."""
    note = {"event": event, "command": command, "parent": os.getppid(), **facts}
    with contextlib.suppress(OSError):  # the notes are not the program's business
        file = os.open(folder / f"{os.getpid()}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, (json.dumps(note) + "\n").encode())
        finally:
            os.close(file)


def _list_words(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """Return the words of the command, the first of which is the program; a shell's are `sh -c COMMAND`."""
    if event == "os.system":
        return ["sh", "-c", os.fsdecode(arguments[0])]
    program, command = arguments[:2]
    argv = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    return [os.fsdecode(word) for word in (program or argv[0], *argv[1:])]


def is_program_start() -> bool:
    """Return True in a function for forks that subprocess.Popen calls, because it has a preexec_fn, before a program."""
    frame = sys._getframe(2)  # noqa: SLF001  (behind the function)
    return frame.f_globals.get("__name__") == "subprocess" and frame.f_code.co_name == "_execute_child"


def install(settings: dict[str, Any], run_after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Note that this process began, watch what it imports, forks and starts, and begin a dry run once it has torch.

    The first process of the program begins its dry run itself. Without a `package` there is none.
    """
    watch = Watch(Path(settings["folder"]))
    write_note(watch.folder, BEGAN, sys.orig_argv)
    sys.meta_path.insert(0, watch)
    sys.addaudithook(watch.handle_audit_event)

    def handle_fork() -> None:
        if not is_program_start():
            write_note(watch.folder, FORKED, sys.orig_argv)

    os.register_at_fork(after_in_child=handle_fork)
    if settings.pop("first", False):
        os.environ[VARIABLE] = json.dumps(settings)
    elif "package" in settings:
        _note_end(watch.folder)
        run_after_import("torch", lambda _: _begin_dry_run(settings))


def _note_end(folder: Path) -> None:
    """Leave a note when this process ends, also by os._exit, as children of multiprocessing do, or by SIGTERM."""
    leave = os._exit

    def write_note_and_exit(status: int) -> Any:  # noqa: ANN401  (never)
        write_note(folder, ENDED, sys.orig_argv)
        leave(status)

    def write_note_and_kill(number: int, _frame: object) -> None:
        write_note(folder, TERMINATED, sys.orig_argv)
        _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)

    os._exit = write_note_and_exit
    atexit.register(write_note, folder, ENDED, sys.orig_argv)
    if _signal.getsignal(_signal.SIGTERM) == _signal.SIG_DFL:
        _signal.signal(_signal.SIGTERM, write_note_and_kill)


def _begin_dry_run(settings: dict[str, Any]) -> None:
    """Begin a dry run in this process, or note why there is none; the program's own copy of dcpbench is not used."""
    try:
        sys.path.insert(0, settings["package"])
        try:
            followed = importlib.import_module("dcpbench.syncs.dry_run.process_report")
        finally:
            sys.path.remove(settings["package"])
        followed.follow_process(settings)
    except Exception as error:  # noqa: BLE001  (whatever fails here must not fail the program)
        write_note(Path(settings["folder"]), FAILED, sys.orig_argv, reason=f"{type(error).__name__}: {error}")
