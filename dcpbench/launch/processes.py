"""Determine whether a run's processes are alive on this machine, by the process ids in its lock file.

The lock itself is not tried, because no run could start in the folder at that moment.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dcpbench.launch import subprocess_guard
from dcpbench.records.folder import LOCK_FILE

if TYPE_CHECKING:
    from pathlib import Path

COMMAND, WORKERS, NONE = "command", "workers", ""
SLACK_S = 3.0  # tolerance in s between a process's start and a file's time, which come from different clocks
MAX_LOCK_BYTES = 4096


def find_alive(folder: Path) -> tuple[str, float | None]:
    """Return the living processes of the run, COMMAND, only its WORKERS, or NONE, and the start of the command in Unix
    time.
    """
    began = [when for _, when in _read_processes(folder)]
    if began and began[0] is not None:
        return COMMAND, began[0]
    return (WORKERS, None) if any(b is not None for b in began) else (NONE, None)


def find_alive_pid(folder: Path) -> int | None:
    """Return a living process of the run, preferably the command; None if the lock file names none."""
    return next((pid for pid, when in _read_processes(folder) if when is not None), None)


def _read_processes(folder: Path) -> list[tuple[int, float | None]]:
    """Return the process ids in the lock file, each with its start time by _began; other words are skipped."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            words = file.read(MAX_LOCK_BYTES).split()
        written = (folder / LOCK_FILE).stat().st_mtime
    except OSError:
        return []
    pids = [int(w) for w in words if w.isdigit() and len(w) < 10]  # noqa: PLR2004 -- a process id has 32 bits
    return [(pid, _read_start_time(pid, written)) for pid in pids]


def _read_start_time(pid: int, written: float) -> float | None:
    """Return the Unix time at which the process started; None if it is gone, or its id was reused after the lock was
    written.
    """
    found = subprocess_guard.read_start_ticks(pid)
    if found is None:
        return None
    state, ticks = found
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # /proc/uptime may be a container's
    began = booted + ticks / os.sysconf("SC_CLK_TCK")
    gone = state in ("Z", "X") or began > written + SLACK_S
    return None if gone else began
