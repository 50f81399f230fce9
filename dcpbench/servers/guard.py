"""A server and all that it starts, which nothing outlives: neither a stop, nor the death of the one who wanted it.

    guard.py PARENT GRACE COMMAND…

runs COMMAND and ends with its exit code. On SIGTERM, which the kernel also sends when the process PARENT dies, everything below it
gets SIGTERM, and what is left after GRACE seconds SIGKILL: whatever loses its own parent meanwhile becomes a child of this process.
Run by its path, so that it has nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REST_S = 0.05


def descendants(pid: int) -> list[int]:
    """All processes below one, nearest first."""
    found: list[int] = []
    left = [pid]
    while left:
        parent = left.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208 -- pathlib takes longer to import
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children", "rb") as f:  # noqa: PTH123
                    children = [int(child) for child in f.read().split()]
                    found += children
                    left += children
    return found


def _end_all(grace_s: float) -> None:
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            _reap()
            below = descendants(os.getpid())
            if not below:
                return
            if number == signal.SIGKILL:
                for pid in below:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(REST_S)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(parent: int, grace_s: float, command: list[str]) -> int:
    """See the module."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which stops this process as it sees fit
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    server = os.fork()
    if server == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        try:
            os.execvp(command[0], command)  # noqa: S606 -- a list of arguments, no shell
        except OSError as e:
            os.write(2, f"{type(e).__name__}: {command[0]}: {e.strerror}\n".encode())
            os._exit(127)
    while not asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == server:
            _end_all(grace_s)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(REST_S)
    _end_all(grace_s)
    return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
