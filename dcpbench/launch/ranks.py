"""Observe the ranks of a job on this machine: their messages, exits and stacks. No torch.

FOLDER/rank-R.pid, LOGS/rank-R.log, LOGS/rank-R.exit    see subprocess_guard.py
FOLDER/error-R.json, stacks-R.txt                       see jobs.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dcpbench.launch import subprocess_guard, version_check
from dcpbench.launch.jobs import SECRET, Exit, Failure, read_files
from dcpbench.records.lines import Tail

if TYPE_CHECKING:
    from collections.abc import Sequence

LOG_LINES = 20
STACKS_WAIT_S = 2.0


class Ranks:
    """Observe ranks through their files, regardless of which process started them."""

    def __init__(self, folder: Path, logs: Path, events: Path, ranks: range) -> None:
        """Observe `ranks`; `events` is the file to which rank 0 appends a line of JSON for each event."""
        self.folder, self.logs, self.ranks = folder, logs, ranks
        self.other_logs: list[Path] = []  # logs of other processes than ranks
        self.event_tail = Tail(events)

    def read_failures(self) -> list[Failure]:
        """Return the exceptions recorded by ranks of this machine, by rank."""
        return read_files(self.list_files("error-{}.json"), Failure)

    def read_exits(self) -> list[Exit]:
        """Return the exits of the ranks of this machine that have ended, in order of time."""
        found = read_files([self.logs / f"rank-{rank}.exit" for rank in self.ranks], Exit)
        return sorted(found, key=lambda e: e.at)

    def read_last_lines(self, first: Sequence[int] = ()) -> tuple[str, list[str]]:
        """Return (log, its last lines) of the first of these ranks with any output, else of one that failed, else of
        any.
        """
        ranks = [*first, *(f.rank for f in self.read_failures()), *self.ranks]
        for path in [self.logs / f"rank-{rank}.log" for rank in ranks] + self.other_logs:
            if lines := read_text(path).strip().splitlines():
                return path.name, lines[-LOG_LINES:]
        return "", []

    def collect_stacks(self) -> dict[str, str]:
        """Return the Python stacks of every rank of this machine; they write them on SIGUSR1, to their file or into
        their logs.
        """
        self.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_WAIT_S)
        return {p.stem.partition("-")[2]: read_text(p) for p in self.list_files("stacks-{}.txt")}

    def send_signal(self, number: int) -> None:
        """Send a signal to every rank of this machine that is alive."""
        for pid in self.find_pids().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def find_pids(self) -> dict[int, int]:
        """Return the ids of the living ranks of this machine, by rank, excluding processes that have reused an id."""
        words = {rank: read_text(self.folder / f"rank-{rank}.pid").split() for rank in self.ranks}
        recorded = {r: (int(w[0]), w[1]) for r, w in words.items() if len(w) == 2 and w[0].isdecimal()}  # noqa: PLR2004 -- id and ticks
        return {
            r: pid
            for r, (pid, ticks) in recorded.items()
            if str((subprocess_guard.read_start_ticks(pid) or ("", None))[1]) == ticks
        }

    def remove_files(self) -> None:
        """Remove the files of an earlier job, as its process ids may have been reused."""
        for name in ("rank-{}.pid", "error-{}.json", "stacks-{}.txt"):
            for path in self.list_files(name):
                path.unlink(missing_ok=True)

    def list_files(self, name: str) -> list[Path]:
        """Return the files with this name pattern for the ranks of this machine."""
        paths = [self.folder / name.format(rank) for rank in self.ranks]
        return [p for p in paths if p.exists()]


class Started(Ranks):
    """Manage ranks started by this process itself, on one machine and once, where torchrun would only add seconds.

    Context manager: leaving it in any way kills all of them; so does the end of this process (subprocess_guard.py).
    """

    def __init__(self, folder: Path, events: Path, count: int, worker: str, device: str) -> None:
        """Start `python -m WORKER FOLDER` for each rank, with RANK and WORLD_SIZE in its environment."""
        super().__init__(folder, folder, events, range(count))
        self._command = subprocess_guard.make_rank_command(worker, str(folder), str(folder), str(folder), 0, count)
        self._device = device
        self._accounts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        env = make_environment(self._device) | {subprocess_guard.PARENT: str(os.getpid())}
        try:
            for rank in self.ranks:
                self._accounts.append(
                    subprocess.Popen(
                        self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=env | {"LOCAL_RANK": str(rank)},
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def has_ended(self) -> bool:
        """Return True if all ranks have ended."""
        return None not in [account.poll() for account in self._accounts]

    def kill(self) -> None:
        """Kill all ranks; the kernel kills a rank without a pid file together with the process that watches it."""
        self.send_signal(signal.SIGKILL)
        for account in self._accounts:
            account.kill()
        for account in self._accounts:
            account.wait()


def make_environment(device: str, *, loopback: bool = True) -> dict[str, str]:
    """Return the environment of ranks on this device; with `loopback` they listen only there unless it says otherwise."""
    env = os.environ | version_check.get_environment()
    env.pop(SECRET, None)  # of no use to ranks
    if device == "cpu":
        env.setdefault("OMP_NUM_THREADS", "1")
        env["TRITON_INTERPRET"] = "1"
    if loopback and Path("/sys/class/net/lo").exists():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, "lo")
    return env


def read_text(path: Path) -> str:
    """Return the text of a file, empty if it does not exist."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
