"""Whether a run's processes are alive on this machine, by the process ids in its lock file.

The lock itself is not tried: for that moment no run could start in the folder.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dcpbench.folders import LOCK_FILE

if TYPE_CHECKING:
    from pathlib import Path

COMMAND, WORKERS, NONE = "command", "workers", ""
SLACK_S = 3.0
"""How far the times of a process and of a file may be apart, which have different clocks."""
MOST_BYTES = 4096


def alive(folder: Path) -> tuple[str, float | None]:
    """Who of the run is alive, COMMAND, only its WORKERS, or NONE; and when the command began, in Unix time."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            words = file.read(MOST_BYTES).split()
        written = (folder / LOCK_FILE).stat().st_mtime
    except OSError:
        return NONE, None
    pids = [int(w) for w in words if w.isdigit() and len(w) < 10]  # noqa: PLR2004 -- a process id has 32 bits
    began = [_began(pid, written) for pid in pids]
    if began and began[0] is not None:
        return COMMAND, began[0]
    return (WORKERS, None) if any(b is not None for b in began) else (NONE, None)


def _began(pid: int, written: float) -> float | None:
    """When the process began, in Unix time; None where it is gone, or another has its id since the lock was written."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 -- no path of a user
            fields = file.read().rpartition(b")")[2].split()
        state, ticks = fields[0], int(fields[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # /proc/uptime may be a container's
        began = booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    gone = state in (b"Z", b"X") or began > written + SLACK_S
    return None if gone else began
