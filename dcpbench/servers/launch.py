"""Starts a server, waits until it takes requests, and ends it with everything that it started (guard.py). No torch."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from dcpbench import redaction
from dcpbench.errors import WorkerError
from dcpbench.redaction import redact_part
from dcpbench.servers import guard
from dcpbench.show.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

GRACE_S = 10.0
POLL_S = 0.2
OK = 200
TAIL = 1 << 17
"""Bytes of a log in which a reason is looked for."""
RAISED = re.compile(r"^(?:.*?\s)?([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)): (.+)$")
POINTS_ELSEWHERE = re.compile(
    r"root cause above|initialization failed|see (the )?(stack )?trace|encountered an issue", re.IGNORECASE
)
VALIDATION = re.compile(r"\d+ validation errors? for \w+$")
SAID_AT_MOST = 400


class ServerError(WorkerError):
    """A server that did not start, or died; the sentence quotes its own reason."""


def free_port() -> int:
    """A port of the loopback that nobody has at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def reason_in(log: bytes) -> str:
    """Why a server ended, in its own words: the last error that it raised and that names a cause, else its last line."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", redact_part(log[-TAIL:].decode("utf-8", "replace")))
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [(m, i) for i, line in enumerate(lines) if (m := RAISED.match(line))]
    causes = [(m, i) for m, i in raised if not POINTS_ELSEWHERE.search(m[0])]
    if found := (causes or raised):
        error, place = found[-1]
        said = f"{error[1]}: {error[2]}"
        if VALIDATION.search(said) and place + 1 < len(lines):  # pydantic's message begins in the next line
            said += f": {lines[place + 1].strip().partition(' [type=')[0]}"
        return one_line(said)[:SAID_AT_MOST]
    return one_line(lines[-1])[:SAID_AT_MOST] if lines else "it wrote nothing"


class Server:
    """A started server. Context manager: leaving it ends every process of it, whatever happened."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str], port: int, ready: str) -> None:
        self.words, self.log, self.port, self.ready = list(words), log, port, ready
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(GRACE_S)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
            )
        told = {"command": self.words, "secrets": redaction.forms(), "placeholder": redaction.PLACEHOLDER}
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._guard.stdin as f:
            f.write(json.dumps(told).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def dead(self) -> str:
        """Why it ended; empty while it runs."""
        code = self._guard.poll()
        if code is None:
            return ""
        return f"it ended with exit code {code}: {reason_in(self._log())}"

    def wait(self, limit_s: float, tell: Callable[[str], None] = lambda _: None) -> float:
        """Until it takes requests; returns the seconds that took. Raises ServerError where it ends, or never does."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < limit_s:
            if dead := self.dead:
                raise ServerError(f"the server did not start: {dead}")
            if self._answers():
                return waited
            tell(f"starting, {waited:.0f} s")
            time.sleep(POLL_S)
        raise ServerError(
            f"the server took no requests within {limit_s:g} s (--start-timeout); the last that it wrote: "
            f"{reason_in(self._log())}"
        )

    def read_log(self) -> str:
        """Return the text that the server has written so far."""
        return self._log().decode("utf-8", "replace")

    def cause(self, said: str) -> str:
        """What its log says, where what it said itself only points there."""
        return f" (its log: {reason_in(self._log())})" if POINTS_ELSEWHERE.search(said) else ""

    def stop(self) -> None:
        """End it and everything below it."""
        if self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(2 * GRACE_S + 5)
        if self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", self.ready)
            return connection.getresponse().status == OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log(self) -> bytes:
        try:
            return self.log.read_bytes()
        except OSError:
            return b""
