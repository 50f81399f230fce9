"""Waiting for processes for as long as they take: a busy machine is slow, and pytest ends what never comes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

LOOK_S = 0.05


def until(holds: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Return once something holds; it fails where the process that should bring it about has ended without it."""
    while not holds():
        ended = process is not None and process.poll() is not None
        assert not ended or holds(), "the process has ended, and it does not hold"
        time.sleep(LOOK_S)


def is_gone(pid: int) -> bool:
    """Return True if a process has ended, even if its exit code was not collected: not every container has a process
    that does.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
