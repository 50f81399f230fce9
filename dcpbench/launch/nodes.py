"""Run one sweep on several machines: node 0 sends the others the next job to start, and when to stop it. No torch.

Every node runs the same command; only node 0 decides, because it alone has the records and knows which points --resume
or a failed point leaves to do. The others connect to the endpoint of --nodes once, before the first job, and keep that
connection for the whole sweep; rank 0's store of torch.distributed then listens at the same address, so that one open
port is enough. Both listen only at that address.

    both ways          a Hello, which proves that the sender has the secret of DCPBENCH_SECRET and belongs to the sweep
    node 0 → others    a Job, one line of JSON: start it · `stop`: end it · closed: the sweep is over
    others → node 0    `failed`: a rank of mine died · an Ended, one line of JSON, in answer to `stop`

Each line after the Hellos begins with its authentication code, made with a key of this connection. A line without a
valid code closes the connection. The lines are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import time
from typing import Self

import msgspec

from dcpbench.errors import UsageError, WorkerError
from dcpbench.launch.jobs import SECRET, Exit, Failure, Job, open_listener
from dcpbench.records.lines import UNREADABLE

STOP = b"stop"
FAILED = b"failed"
ANSWER_WAIT_S = 60.0
HELLO_WAIT_S = 5.0
MAX_HELLO_BYTES, MAX_LINE_BYTES = 1 << 10, 64 << 20  # bytes per line; prompts of a checkpoint's check are longest
CODE = 64  # hexadecimal digits of an authentication code
LEADS, FOLLOWS = b"node 0", b"another node"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Represent the first message of each side; node 0 sends a second one with its proof."""

    node: int
    nonce: str
    proof: str = ""  # proof that the sender has the secret, over both nonces and the node


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """End of one node's part of a job."""

    node: int
    code: int  # torchrun's exit code
    failures: list[Failure] = []
    exits: list[Exit] = []
    stacks: dict[str, str] = {}  # stacks by rank, if the job had to be ended


class NodeConnection:
    """Connect to another node by whole lines, which are authenticated once both sides have a key."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""
        self._longest = MAX_HELLO_BYTES
        self._key = b""
        self._mine = self._theirs = b""
        self._sent = self._received = 0
        self.closed = False

    def set_key(self, key: bytes, mine: bytes, theirs: bytes) -> None:
        """Authenticate every later line with this key; `mine` and `theirs` distinguish the two directions."""
        self._key, self._mine, self._theirs, self._longest = key, mine, theirs, MAX_LINE_BYTES

    def send(self, data: bytes) -> None:
        """Send one line, given without its end. A peer that has gone away sets `closed`."""
        if self._key:
            data = _compute_code(self._key, self._mine, b"%d" % self._sent, data) + data
            self._sent += 1
        try:
            self._connection.sendall(data + b"\n")
        except OSError:
            self.closed = True

    def receive(self, wait: float) -> bytes | None:
        """Return the next line without its end, or None if none came within `wait` seconds or the peer closed the
        connection.

        A line that is too long, or fails authentication, sets `closed`.
        """
        end = time.monotonic() + wait
        while b"\n" not in self._pending:
            left = max(end - time.monotonic(), 0)
            if self.closed or not select.select([self._connection], [], [], left)[0]:
                return None
            try:
                data = self._connection.recv(1 << 16)
            except OSError:
                data = b""
            self._pending += data
            self.closed = not data or (b"\n" not in data and len(self._pending) > self._longest)
        line, _, self._pending = self._pending.partition(b"\n")
        return self._verify(line) if self._key else line

    def _verify(self, line: bytes) -> bytes | None:
        code, data = line[:CODE], line[CODE:]
        if not hmac.compare_digest(code, _compute_code(self._key, self._theirs, b"%d" % self._received, data)):
            self.closed = True
            return None
        self._received += 1
        return data

    def close(self) -> None:
        """Close; the peer reads it as the end of the sweep."""
        self.closed = True
        self._connection.close()


class Leader:
    """Manage node 0's connections to all other nodes. Context manager; leaving it ends the sweep everywhere."""

    def __init__(self, endpoint: str, nnodes: int, timeout: float) -> None:
        """Wait for all others, at most `timeout` seconds."""
        self._lines: list[NodeConnection] = []
        if nnodes > 1:
            self._lines = _wait_for_nodes(endpoint, nnodes - 1, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._lines:
            connection.close()

    def start(self, job: Job) -> None:
        """Make every other node start this job."""
        for connection in self._lines:
            connection.send(msgspec.json.encode(job))

    def stop(self) -> list[Ended]:
        """Make every other node end its part, and return how each ended."""
        for connection in self._lines:
            connection.send(STOP)
        return [_decode_ended(a) for connection in self._lines if (a := _receive_answer(connection))]

    def has_failure(self) -> bool:
        """Return True if a rank of another node died, or a node disconnected."""
        return any(connection.receive(0) == FAILED or connection.closed for connection in self._lines)


def join_leader(endpoint: str, timeout: float, node: int = 1) -> NodeConnection:
    """Connect another node to node 0, which may not be up yet. Raise WorkerError if the peer does not belong to the
    sweep.
    """
    host, port = split_endpoint(endpoint)
    key = get_secret()
    end = time.monotonic() + timeout
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HELLO_WAIT_S)
        except OSError as e:
            if time.monotonic() > end:
                raise WorkerError(
                    f"no answer from node 0 at {endpoint} within {timeout:.0f} s ({e}); "
                    "start the same command there with --nodes rank=0, and check that the port is open."
                ) from e
            time.sleep(0.5)
            continue
        sock.settimeout(None)
        connection = NodeConnection(sock)
        if not _send_greeting(connection, key, node):
            connection.close()
            raise WorkerError(
                f"{endpoint} did not take this node for one of its sweep: {SECRET} must be that of node 0, and "
                "each rank of --nodes of one machine only."
            )
        return connection


def get_secret() -> bytes:
    """Return the secret shared by the machines of a sweep. Raise UsageError without one."""
    value = os.environ.get(SECRET, "")
    if not value:
        raise UsageError(
            "several machines need a secret that they share, or anyone who reaches the port could give them jobs: type "
            f"`export {SECRET}=$(openssl rand -hex 16)` on one, and export the same value on the others."
        )
    return value.encode()


def _compute_code(key: bytes, *parts: bytes) -> bytes:
    """Return the authentication code of these parts, separated by their lengths."""
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


def _compute_proof(key: bytes, side: bytes, node: int, nonces: tuple[str, str]) -> str:
    return _compute_code(key, side, b"%d" % node, *(n.encode() for n in nonces)).decode()


def _send_greeting(connection: NodeConnection, key: bytes, node: int) -> bool:
    """Perform another node's half of the greeting; return True if both sides have proved their identity."""
    theirs = _receive_hello(connection)
    if theirs is None:
        return False
    nonces = theirs.nonce, secrets.token_hex(16)
    connection.send(
        msgspec.json.encode(Hello(node=node, nonce=nonces[1], proof=_compute_proof(key, FOLLOWS, node, nonces)))
    )
    answer = _receive_hello(connection)
    if answer is None or not hmac.compare_digest(answer.proof, _compute_proof(key, LEADS, node, nonces)):
        return False
    connection.set_key(_compute_code(key, b"key", *(n.encode() for n in nonces)), FOLLOWS, LEADS)
    return True


def _receive_greeting(connection: NodeConnection, key: bytes, expected: set[int]) -> int | None:
    """Perform node 0's half of the greeting; return the number of the node, or None for an unexpected peer."""
    nonce = secrets.token_hex(16)
    connection.send(msgspec.json.encode(Hello(node=0, nonce=nonce)))
    theirs = _receive_hello(connection)
    if theirs is None or theirs.node not in expected:
        return None
    nonces = nonce, theirs.nonce
    if not hmac.compare_digest(theirs.proof, _compute_proof(key, FOLLOWS, theirs.node, nonces)):
        return None
    connection.send(
        msgspec.json.encode(Hello(node=0, nonce=nonce, proof=_compute_proof(key, LEADS, theirs.node, nonces)))
    )
    connection.set_key(_compute_code(key, b"key", *(n.encode() for n in nonces)), LEADS, FOLLOWS)
    return theirs.node


def _receive_hello(connection: NodeConnection) -> Hello | None:
    data = connection.receive(HELLO_WAIT_S)
    try:
        found = msgspec.json.decode(data or b"", type=Hello)
    except UNREADABLE:
        return None
    return found if found.proof.isascii() else None


def _decode_ended(answer: bytes) -> Ended:
    try:
        return msgspec.json.decode(answer, type=Ended)
    except UNREADABLE as e:
        raise WorkerError(
            f"another node answered with something else than how its job ended ({e}); install the same dcpbench on all."
        ) from e


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `HOST:PORT`. Raise UsageError for another form."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--nodes endpoint={endpoint or '(missing)'}: write HOST:PORT of node 0, for example "
            "endpoint=10.0.0.1:29500."
        )
    return host.strip("[]"), int(port)


def _receive_answer(connection: NodeConnection) -> bytes | None:
    answer = connection.receive(ANSWER_WAIT_S)
    return connection.receive(ANSWER_WAIT_S) if answer == FAILED else answer


def _wait_for_nodes(endpoint: str, count: int, timeout: float) -> list[NodeConnection]:
    """Return the connections to all other nodes; peers without the secret are rejected, and waiting continues."""
    host, port = split_endpoint(endpoint)
    key = get_secret()
    try:
        server = open_listener(host, port)
    except OSError as e:
        raise UsageError(
            f"--nodes endpoint={endpoint}: node 0 cannot listen there ({e}); give an address that it has, and a free "
            "port."
        ) from e
    lines: dict[int, NodeConnection] = {}
    refused, end = 0, time.monotonic() + timeout
    with server:
        while len(lines) < count:
            server.settimeout(max(end - time.monotonic(), 0.001))
            try:
                connection = NodeConnection(server.accept()[0])
            except TimeoutError as e:
                others = f" {refused} that came had another {SECRET}." if refused else ""
                raise WorkerError(
                    f"{len(lines)} of {count} other nodes came to {endpoint} within {timeout:.0f} s; start the same "
                    f"command with its own rank of --nodes on each, or raise --timeout.{others}"
                ) from e
            node = _receive_greeting(connection, key, set(range(1, count + 1)) - set(lines))
            if node is None:
                connection.close()
                refused += 1
            else:
                lines[node] = connection
    return [lines[node] for node in sorted(lines)]
