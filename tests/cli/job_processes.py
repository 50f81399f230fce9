"""Find the processes of a job in /proc by a word in their environment, independent of the code under test."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK_VARIABLE = "DCPBENCH_TEST_MARK"
AGENT, RANK, ACCOUNT, OTHER = "agent", "rank", "account", "other"
LISTENS = "0A"  # state of a socket in /proc/net/tcp
MAX_WAIT_S = 600.0  # maximum wait for an event before a test fails


def find_processes(mark: str) -> dict[int, list[str]]:
    """Return the command line of each living process with this mark in its environment, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _is_alive(folder, mark):
                found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
    return found


def find_alive(mark: str, pids: Iterable[int]) -> set[int]:
    """Return which of these processes are alive and have the mark, without searching all processes."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if _is_alive(Path(f"/proc/{pid}"), mark):
                found.add(pid)
    return found


def _is_alive(folder: Path, mark: str) -> bool:
    marked = f"{MARK_VARIABLE}={mark}\0".encode() in (folder / "environ").read_bytes()
    return marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def get_role(words: list[str]) -> str:
    """Return the role of a process in a job."""
    if "torch.distributed.run" in words or "quick_torchrun" in words:
        return AGENT
    if any(w.endswith("subprocess_guard.py") for w in words):
        return ACCOUNT
    return RANK if any(Path(w).name.startswith("job-") for w in words) else OTHER


def find_by_role(mark: str, wanted: str) -> list[int]:
    """Return the ids of living processes with this role."""
    return sorted(pid for pid, words in find_processes(mark).items() if get_role(words) == wanted)


def list_open_files(pid: int) -> set[str]:
    """Return the open files of a process. Files that it closes during the call may be missing."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()))
    return found


def list_listening_addresses(mark: str) -> set[str]:
    """Return addresses at which living processes with this mark listen, as in /proc: `0100007F` is 127.0.0.1."""
    inodes = set().union(*(list_open_files(pid) for pid in find_processes(mark)))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in inodes:
                found.add(words[1].partition(":")[0])
    return found


def wait_until(true: Callable[[], object], event: str) -> None:
    """Wait until a condition is true. Fail after MAX_WAIT_S with the name of the event."""
    end = time.monotonic() + MAX_WAIT_S
    while not true():
        assert time.monotonic() < end, f"waited {MAX_WAIT_S:g} s: {event}"
        time.sleep(0.05)
