"""Run a server and end all of its processes when it is stopped and when the process that started it dies.

    process_group.py PARENT GRACE < {"command": [...], "secrets": [...], "placeholder": "(API key)"}

runs the command and ends with its exit code. On SIGTERM, which the kernel also sends when the process PARENT dies, all
descendants get SIGTERM, and after GRACE seconds SIGKILL: a process that loses its own parent meanwhile becomes a child
of this one. The command is passed on stdin, so that no key in it is repeated in the title of this process, and secrets
are replaced in the output of the server. It is run by its path, so that it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_INTERVAL_S = 0.05
READ_BYTES = 1 << 16


def list_descendants(pid: int) -> list[int]:
    """Return all descendants of a process, nearest first."""
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


def _stop_all(grace_s: float) -> None:
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        for pid in list_descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            _reap_children()
            below = list_descendants(os.getpid())
            if not below:
                return
            if number == signal.SIGKILL:
                for pid in below:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(POLL_INTERVAL_S)


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def copy_redacted(source: int, target: int, secrets: list[bytes], placeholder: bytes) -> None:
    """Copy data from one descriptor to another with secrets replaced, including secrets that are split between two
    reads.
    """
    held = b""
    while data := os.read(source, READ_BYTES):
        text = _remove_secrets(held + data, secrets, placeholder)
        kept = max((n for secret in secrets for n in range(1, len(secret)) if text.endswith(secret[:n])), default=0)
        text, held = text[: len(text) - kept], text[len(text) - kept :]
        _write_all(target, text)
    _write_all(target, _remove_secrets(held, secrets, placeholder))
    os.close(source)


def _remove_secrets(text: bytes, secrets: list[bytes], placeholder: bytes) -> bytes:
    for secret in secrets:
        text = text.replace(secret, placeholder)
    return text


def _write_all(target: int, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop the server
        while text:
            text = text[os.write(target, text) :]


def main(
    parent: int, grace_s: float, command: list[str], secrets: list[bytes] | None = None, placeholder: bytes = b""
) -> int:
    """Run the command; see the module."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which stops this process as it sees fit
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    source, sink = os.pipe() if secrets else (-1, -1)
    server = os.fork()
    if server == 0:
        if secrets:
            os.dup2(sink, 1)
            os.dup2(sink, 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        try:
            os.execvp(command[0], command)  # noqa: S606 -- a list of arguments, no shell
        except OSError as e:
            os.write(2, f"{type(e).__name__}: {command[0]}: {e.strerror}\n".encode())
            os._exit(127)
    copying = None
    if secrets:
        os.close(sink)
        copying = threading.Thread(target=copy_redacted, args=(source, 1, secrets, placeholder), daemon=True)
        copying.start()
    code = 128 + signal.SIGTERM
    while not signals:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            break
        time.sleep(POLL_INTERVAL_S)
    _stop_all(grace_s)
    if copying is not None:
        copying.join(grace_s)  # ends with the last process that could write
    return code


def _main() -> int:
    request = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    secrets = [secret.encode() for secret in request["secrets"]]
    return main(int(sys.argv[1]), float(sys.argv[2]), request["command"], secrets, request["placeholder"].encode())


if __name__ == "__main__":
    sys.exit(_main())
