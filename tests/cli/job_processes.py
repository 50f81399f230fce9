"""Find the processes of a job in /proc by a word in their environment, independent of the code under test."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "DCPBENCH_TEST_MARK"
AGENT, RANK, ACCOUNT, OTHER = "agent", "rank", "account", "other"
LISTENS = "0A"  # state of a socket in /proc/net/tcp
PATIENCE_S = 600.0  # maximum wait for an event before a test fails


def processes(mark: str) -> dict[int, list[str]]:
    """Return the command line of each living process with this mark in its environment, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _lives(folder, mark):
                found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
    return found


def still(mark: str, pids: Iterable[int]) -> set[int]:
    """Return those of these processes that are alive and have the mark, which is quicker than a search of all."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if _lives(Path(f"/proc/{pid}"), mark):
                found.add(pid)
    return found


def _lives(folder: Path, mark: str) -> bool:
    marked = f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
    return marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def role(words: list[str]) -> str:
    """Return the role of a process in a job."""
    if "torch.distributed.run" in words or "quick_torchrun" in words:
        return AGENT
    if any(w.endswith("subprocess_guard.py") for w in words):
        return ACCOUNT
    return RANK if any(Path(w).name.startswith("job-") for w in words) else OTHER


def of_role(mark: str, wanted: str) -> list[int]:
    """Return the ids of living processes with this role."""
    return sorted(pid for pid, words in processes(mark).items() if role(words) == wanted)


def opened(pid: int) -> set[str]:
    """Return the files that a process has open, except those that it closes meanwhile."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()))
    return found


def listening(mark: str) -> set[str]:
    """Return addresses at which living processes with this mark listen, as in /proc: `0100007F` is 127.0.0.1."""
    inodes = set().union(*(opened(pid) for pid in processes(mark)))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in inodes:
                found.add(words[1].partition(":")[0])
    return found


def wait_until(true: Callable[[], object], event: str) -> None:
    """Wait for an event that would be immediate on an idle machine."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s: {event}"
        time.sleep(0.05)
