"""Start a server, wait until it takes requests, and end it with all its child processes (process_group.py). No torch."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from dcpbench.errors import WorkerError
from dcpbench.points import redaction
from dcpbench.servers import process_group
from dcpbench.servers.engine_log import StartWatch
from dcpbench.servers.exit_reason import POINTS_ELSEWHERE, Cause, find_exit_reason, find_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dcpbench.records.record import StartPhase

LOGS = "servers"  # folder of a run with the logs of its servers
GRACE_S = 10.0
POLL_S = 0.2


def choose_log_path(folder: Path, name: str) -> Path:
    """Return the path of a new log file in the folder of servers' logs of a run."""
    plain = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in name)[:120]
    paths = (folder / LOGS / f"{plain}{f'-{n}' if n else ''}.log" for n in itertools.count())
    return next(path for path in paths if not path.exists())


def find_free_port() -> int:
    """Return a port of the loopback that is free at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """A started server, as a context manager: leaving it ends all processes of the server."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str], port: int, ready: str) -> None:
        self.words, self.log, self.port, self.ready = list(words), log, port, ready
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", process_group.__file__, str(os.getpid()), str(GRACE_S)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
            )
        guard_input = {"command": self.words, "secrets": redaction.list_forms(), "placeholder": redaction.PLACEHOLDER}
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._guard.stdin as f:
            f.write(json.dumps(guard_input).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_reason(self) -> str:
        """Return the reason why the server ended, and what to do about a known cause; empty while it runs."""
        code = self._guard.poll()
        if code is None:
            return ""
        found = find_exit_reason(self._read_log_bytes())
        advice = f". {found.advice}" if found.advice else ""
        return f"it ended with exit code {code}: {found.message.rstrip('.') if advice else found.message}{advice}"

    @property
    def exit_cause(self) -> Cause:
        """Return the cause for which the server ended, as far as its log shows it."""
        return Cause.UNKNOWN if self._guard.poll() is None else find_exit_reason(self._read_log_bytes()).cause

    def wait_until_ready(self, limit_s: float, tell: Callable[[str], None] = lambda _: None) -> list[StartPhase]:
        """Wait until it takes requests; return the phases of its start, as far as its log shows them.

        `tell` is called with the present phase. Raises WorkerError if the server ends, or is not ready in time.
        """
        began, watch = time.monotonic(), StartWatch()
        with self.log.open("rb") as log:
            while (waited := time.monotonic() - began) < limit_s:
                if dead := self.exit_reason:
                    raise WorkerError(f"the server did not start: {dead}")
                watch.feed(log.read().decode("utf-8", "replace"), waited)
                if self._is_ready():
                    return watch.finish(time.monotonic() - began)
                tell(f"{watch.phase}, {waited:.0f} s")
                time.sleep(POLL_S)
        raise WorkerError(
            f"the server took no requests within {limit_s:g} s (--timeout start); the last line of its log: "
            f"{find_reason(self._read_log_bytes())}"
        )

    def read_log(self) -> str:
        """Return the text that the server has written so far."""
        return self._read_log_bytes().decode("utf-8", "replace")

    def find_cause(self, message: str) -> str:
        """Return the reason in its log, if its error message only refers to the log; else an empty string."""
        return f" (its log: {find_reason(self._read_log_bytes())})" if POINTS_ELSEWHERE.search(message) else ""

    def stop(self) -> None:
        """End it and all its child processes."""
        if self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(2 * GRACE_S + 5)
        if self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", self.ready)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _read_log_bytes(self) -> bytes:
        try:
            return self.log.read_bytes()
        except OSError:
            return b""
