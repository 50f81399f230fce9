"""Leave notes for a dry run on this Python process, which a program of the dry run has started.

The file FOLDER/PID.child has a line of JSON for each event, `{"event": EVENT, "command": [WORD, ...]}`:

- began: Python started, and runs these files;
- forked: the process is a fork of one that runs these files;
- torch: torch is about to be imported;
- started: the process is about to start, or to become, the program in `command`.
"""

import contextlib
import importlib.abc
import json
import os
import sys
from pathlib import Path
from typing import Any

SUFFIX = ".child"
BEGAN, FORKED, TORCH, STARTED = "began", "forked", "torch", "started"
STARTS = frozenset({"os.exec", "os.posix_spawn", "os.system", "subprocess.Popen"})
"""Audit events of Python, with the program and its arguments, except for `os.system`, which has a shell's command."""


class Watch(importlib.abc.MetaPathFinder):
    """Watch which modules are imported, without finding any; processes that are forked later inherit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: object) -> None:
        """Leave a note if torch is about to be imported."""
        if name == "torch":
            self.leave_note(TORCH, sys.orig_argv)

    def handle_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Leave a note if a program is about to be started."""
        if event in STARTS:
            with contextlib.suppress(Exception):  # whatever is wrong with the command is for the function to report
                self.leave_note(STARTED, _list_words(event, arguments))

    def leave_note(self, event: str, command: list[str]) -> None:
        """Append a line to the notes of this process."""
        with contextlib.suppress(OSError):  # the notes are not the program's business
            file = os.open(self.folder / f"{os.getpid()}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, (json.dumps({"event": event, "command": command}) + "\n").encode())
            finally:
                os.close(file)


def _list_words(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """Return the words of the command, the first of which is the program; a shell's are `sh -c COMMAND`."""
    if event == "os.system":
        return ["sh", "-c", os.fsdecode(arguments[0])]
    program, command = arguments[:2]
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    return [os.fsdecode(word) for word in (program or words[0], *words[1:])]


def install(folder: str) -> None:
    """Note that this process began, and watch what it imports, forks and starts."""
    watch = Watch(Path(folder))
    watch.leave_note(BEGAN, sys.orig_argv)
    sys.meta_path.insert(0, watch)
    os.register_at_fork(after_in_child=lambda: watch.leave_note(FORKED, sys.orig_argv))
    sys.addaudithook(watch.handle_audit_event)
