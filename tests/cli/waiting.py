"""Wait for processes without a time limit, because busy machines are slow; pytest ends tests that hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

POLL_INTERVAL_S = 0.05


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until `holds()` is true. Fail if `process`, which makes it true, has exited."""
    while not holds():
        ended = process is not None and process.poll() is not None
        assert not ended or holds(), "the process has exited, and the condition is false"
        time.sleep(POLL_INTERVAL_S)


def is_gone(pid: int) -> bool:
    """Return True if a process has exited, even if its exit code was not collected, as without an init process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
