"""Several machines, one sweep: node 0 tells the others which job to start next and when to stop it. No torch.

Every node runs the same command; only node 0 decides (it alone has the records, so it alone knows what --resume or a
dead point leaves to do). The others connect to --rdzv-endpoint once, before the first job, and keep that connection
for the whole sweep; torchrun's own rendezvous then listens on the same port, so that one open port is enough.

    node 0 → others    a Job, one line of JSON: start it · `stop`: end it · closed: the sweep is over
    others → node 0    `failed`: a rank of mine died · an Ended, one line of JSON, in answer to `stop`
"""

from __future__ import annotations

import select
import socket
import time
from typing import Self

import msgspec

from dcpbench.errors import UsageError, WorkerError
from dcpbench.jobs import Exit, Failure, Job

STOP = b"stop"
FAILED = b"failed"
ANSWER_WAIT_S = 60.0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How one node's part of a job ended."""

    node: int
    code: int
    """torchrun's exit code."""
    failures: list[Failure] = []
    exits: list[Exit] = []
    stacks: dict[str, str] = {}
    """By rank, where the job had to be ended."""


class Line:
    """A connection to another node that carries whole lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""
        self.closed = False

    def send(self, data: bytes) -> None:
        """Send one line, given without its end. A peer that has gone away sets `closed`."""
        try:
            self._connection.sendall(data + b"\n")
        except OSError:
            self.closed = True

    def receive(self, wait: float) -> bytes | None:
        """The next line without its end, or None when none came within `wait` seconds or the peer closed."""
        end = time.monotonic() + wait
        while b"\n" not in self._pending:
            left = max(end - time.monotonic(), 0)
            if self.closed or not select.select([self._connection], [], [], left)[0]:
                return None
            try:
                data = self._connection.recv(1 << 16)
            except OSError:
                data = b""
            self.closed = not data
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def close(self) -> None:
        """Close; the peer reads it as the end of the sweep."""
        self._connection.close()


class Leader:
    """Node 0's side: the connections to all other nodes. Context manager; leaving it ends the sweep everywhere."""

    def __init__(self, endpoint: str, nnodes: int, timeout: float) -> None:
        self._lines: list[Line] = []
        if nnodes > 1:
            self._lines = _accept(endpoint, nnodes - 1, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:
            line.close()

    def start(self, job: Job) -> None:
        """Have every other node start this job."""
        for line in self._lines:
            line.send(msgspec.json.encode(job))

    def stop(self) -> list[Ended]:
        """Have every other node end its part, and hear how it ended."""
        for line in self._lines:
            line.send(STOP)
        return [msgspec.json.decode(a, type=Ended) for line in self._lines if (a := _answer(line))]

    def in_trouble(self) -> bool:
        """Whether a rank of another node died, or a node went away."""
        return any(line.receive(0) == FAILED or line.closed for line in self._lines)


def follow(endpoint: str, timeout: float) -> Line:
    """Another node's side: connect to node 0, which may not be up yet."""
    host, port = split_endpoint(endpoint)
    end = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
        except OSError as e:
            if time.monotonic() > end:
                raise WorkerError(
                    f"no answer from node 0 at {endpoint} within {timeout:.0f} s ({e}); "
                    "start the same command there with --node-rank 0, and check that the port is open."
                ) from e
            time.sleep(0.5)
            continue
        connection.settimeout(None)
        return Line(connection)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`HOST:PORT` in two. Raises UsageError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--rdzv-endpoint {endpoint or '(missing)'}: write HOST:PORT of node 0, for example "
            "--rdzv-endpoint 10.0.0.1:29500."
        )
    return host.strip("[]"), int(port)


def _answer(line: Line) -> bytes | None:
    answer = line.receive(ANSWER_WAIT_S)
    return line.receive(ANSWER_WAIT_S) if answer == FAILED else answer


def _accept(endpoint: str, count: int, timeout: float) -> list[Line]:
    port = split_endpoint(endpoint)[1]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as e:
        raise UsageError(f"--rdzv-endpoint {endpoint}: cannot listen on port {port} ({e}); choose another.") from e
    lines = []
    with server:
        server.settimeout(timeout)
        for _ in range(count):
            try:
                lines.append(Line(server.accept()[0]))
            except TimeoutError as e:
                raise WorkerError(
                    f"{len(lines)} of {count} other nodes came to {endpoint} within {timeout:.0f} s; start the same "
                    "command with its own --node-rank on each, or raise --timeout."
                ) from e
    return lines
