"""Leave a note once a process that a dry run's program started imports torch: FOLDER/PID.child, with its command."""

import contextlib
import importlib.abc
import json
import os
import sys
from pathlib import Path

SUFFIX = ".child"


class Watch(importlib.abc.MetaPathFinder):
    """Watch which modules are imported, without finding any; processes that are forked later inherit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: object) -> None:
        """Leave the note where torch is about to be imported."""
        if name == "torch":
            with contextlib.suppress(OSError):  # the note is not the program's business
                note = {"pid": os.getpid(), "command": sys.orig_argv}
                (self.folder / f"{os.getpid()}{SUFFIX}").write_text(json.dumps(note), encoding="utf-8")


def install(folder: str) -> None:
    """Watch this process's imports."""
    sys.meta_path.insert(0, Watch(Path(folder)))
