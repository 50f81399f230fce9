"""Run a process of a job tied to the one that started it: if the parent ends, the kernel kills this process.

It is run by its path, before any import, so that a launcher that dies while torch is being imported leaves no process
behind. It therefore uses only the standard library.

    subprocess_guard.py tied PARENT COMMAND…                be COMMAND, tied to the process PARENT
    subprocess_guard.py rank WORKER JOB FOLDER LOGS FIRST RANKS
                                                 have a process run JOB as one of RANKS ranks, of which this machine
                                                 has those from FIRST on, and record its life cycle:

    FOLDER/rank-R.pid     its process id and start time (read_start_ticks), written before it imports any module
    LOGS/rank-R.log       its whole output; torchrun's own --log-dir makes up random names
    LOGS/rank-R.exit      how it ended (jobs.Exit)

torchrun closes every descriptor of its ranks but the standard ones, so the lock of the run's folder is passed as
standard input: each rank holds it until it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import stat
import sys
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PARENT = "DCPBENCH_PARENT"  # variable with the id of the parent to which a tied process and its children belong
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torchrun ends ranks by them, or by SIGKILL


def make_tied_command(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command`, starting with a path, tied to this process."""
    return [sys.executable, "-I", "-S", __file__, "tied", str(os.getpid()), *command]


def make_rank_command(worker: str, job: str, folder: str, logs: str, first: int, ranks: int) -> list[str]:
    """Return the command line of each rank, for a tied parent named by PARENT: a torchrun, or this process."""
    return [sys.executable, "-I", "-S", __file__, "rank", worker, job, folder, logs, str(first), str(ranks)]


def read_start_ticks(pid: int) -> tuple[str, int] | None:
    """Return (state, clock ticks from boot to start) of a process, by proc(5); None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 -- no path of a user
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def set_death_signal(number: int) -> None:
    """Make the kernel send this signal to this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _tie(parent: int) -> None:
    """Make the kernel kill this process when `parent` dies, and exit now if it is dead already."""
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(parent: int, command: list[str]) -> NoReturn:
    _tie(parent)
    os.environ[PARENT] = str(os.getpid())
    os.execvp(command[0], command)  # noqa: S606 -- a list of arguments, no shell


def _run_rank(worker: str, job: str, folder: str, logs: str, first: str, ranks: str) -> int:
    """Start the rank, pass signals on to it, and write how it ended. Returns the exit code, as of a shell."""
    _tie(int(os.environ[PARENT]))
    rank, own, passed_signals, child = str(int(first) + int(os.environ["LOCAL_RANK"])), os.getpid(), [], 0
    os.environ |= {"RANK": rank, "WORLD_SIZE": ranks}

    def pass_on(number: int, _: object) -> None:
        passed_signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # no signal is lost before the process exists
    child = os.fork()
    if child == 0:
        try:
            _exec_rank(own, rank, [sys.executable, "-m", worker, job], folder, logs)
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    result = {"rank": int(rank), "code": code, "terminated": bool(passed_signals), "at": time.time()}
    with contextlib.suppress(OSError):  # a full disk, or a deleted folder
        _write_atomically(f"{logs}/rank-{rank}.exit", json.dumps(result))
    return code if code >= 0 else 128 - code


def _exec_rank(parent: int, rank: str, command: list[str], folder: str, logs: str) -> NoReturn:
    os.setpgid(0, 0)  # torchrun signals its process group, and this one gets each signal once
    _tie(parent)
    pid = os.getpid()
    if stat.S_ISREG(os.fstat(0).st_mode):
        lock = os.dup(0)
        os.set_inheritable(lock, True)  # noqa: FBT003 -- it has no name
        os.write(lock, f"{pid}\n".encode())
    began = read_start_ticks(pid)
    _write_atomically(f"{folder}/rank-{rank}.pid", f"{pid} {began and began[1]}\n")
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(f"{logs}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.execv(command[0], command)  # noqa: S606 -- a list of arguments, no shell


def _write_atomically(path: str, text: str) -> None:
    """Write a file atomically, because it is read while others are being written."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:  # noqa: PTH123 -- pathlib takes longer to import
        file.write(text)
    os.replace(f"{path}.part", path)  # noqa: PTH105 -- as above


if __name__ == "__main__":
    if sys.argv[1] == "tied":
        _become(int(sys.argv[2]), sys.argv[3:])
    sys.exit(_run_rank(*sys.argv[2:]))
