"""An HTTP/1.1 client for a load generator: bytes are timestamped on arrival, before any other processing.

The kernel timestamps them if it can (socket_timestamps.py), else the read does. A connection is an asyncio.Protocol that parses
received data and passes each piece of a body on at once, in the same iteration of the loop: there is no stream, queue
or task between the socket and the clock. The buffered size of heads, lines and bodies is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import socket
import ssl
import struct
import time
import urllib.parse
from typing import TYPE_CHECKING, Protocol

from dcpbench.errors import UsageError
from dcpbench.points import redaction
from dcpbench.servers.descriptors import OPEN_FILES, SHORTAGE, format_shortage
from dcpbench.servers.events import BadStream, StreamError, read_error_message
from dcpbench.servers.request_options import find_secrets
from dcpbench.servers.socket_timestamps import StampedSocket
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HEAD = 1 << 16  # bytes of a head, and of a line between two chunks
MAX_INTERIM = 64  # heads of status 1xx before an answer
MAX_BODY = 1 << 22  # bytes of an answer that is kept whole
MAX_ERROR = 1 << 16  # bytes of the body that comes with an error
MAX_LOCATION, MAX_CODING = 200, 40  # characters that are repeated of these headers
MAX_LENGTH_DIGITS = 18  # of a Content-Length
BUFFER = memoryview(bytearray(1 << 16))
MAX_LABEL = 63  # characters between two dots of a host's name (RFC 1035)
NO_BODY = (204, 304)
CONTINUE = 100
OK = 200
CLIENT_ERROR = 400
TOO_MANY = 429
KEY_ERRORS, NO_ENDPOINT = (401, 403), (404, 405, 501)  # statuses of a wrong key, and of an endpoint that a server lacks
KEY_HINT = "Put its API key into the environment variable that --api-key-env names, OPENAI_API_KEY by default."
PORTS = {"http": 80, "https": 443}
IDENTITY = (b"", b"identity")
STATUS_LINE = re.compile(rb"HTTP/1\.\S*\s+(\d{3})(?=\s|$)")
CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
ACKED_BYTES = struct.Struct("@Q")
ACKED_AT, TCP_INFO_SIZE = 120, 256  # place of tcpi_bytes_acked in struct tcp_info (linux/tcp.h, since Linux 4.1)
CLOSED, TIME_OUT = "closed", "time-out"  # kinds of RequestError that the code distinguishes
EXAMPLE = "write for example --url http://127.0.0.1:8000"


class RequestError(Exception):
    """A request that failed: its kind, in a word or two, and a sentence."""

    def __init__(
        self,
        kind: str,
        sentence: str,
        *,
        status: int = 0,
        retry_after_s: float | None = None,
        bad: BadStream | None = None,
    ) -> None:
        """Create the error; `bad` describes the fault of the stream, for the kind `bad stream`."""
        super().__init__(sentence)
        self.kind, self.sentence, self.status, self.retry_after_s = kind, sentence, status, retry_after_s
        self.bad = bad

    @classmethod
    def from_stream_error(cls, error: StreamError) -> RequestError:
        """Return the failure of a request after its stream was abandoned."""
        return cls("bad stream", f"{str(error).rstrip('.')}.", bad=error.bad)

    def __reduce__(self) -> tuple[Callable[..., RequestError], tuple[object, ...]]:
        """Support pickling: errors travel between client processes."""
        make = functools.partial(RequestError, status=self.status, retry_after_s=self.retry_after_s, bad=self.bad)
        return make, (self.kind, self.sentence)


KEY_VARIABLE = "OPENAI_API_KEY"  # default environment variable of a server's key


def load_api_key(variable: str) -> str:
    """Return the key in an environment variable, "" if the default one is not set; it is redacted from then on.

    Raise UsageError if another variable is not set. The message does not repeat the name, which may be a key typed by
    mistake.
    """
    if variable != KEY_VARIABLE and variable not in os.environ:
        raise UsageError(
            "--api-key-env takes the name of an environment variable that is set, not the key itself; write for example "
            f"`export {KEY_VARIABLE}=…` and leave the option out."
        )
    key = os.environ.get(variable, "")
    redaction.register_secrets(key)
    return key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A server, with the options of requests to it."""

    scheme: str
    host: str
    port: int
    path: str = ""  # path before /v1
    key: str = dataclasses.field(default="", repr=False)  # API key; never recorded or printed
    headers: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)  # --header; values are never shown
    timeout_s: float = 600.0  # time in s without any received data after which a request has failed

    @classmethod
    def from_url(
        cls, url: str, *, key: str = "", headers: tuple[tuple[str, str], ...] = (), timeout_s: float = 600.0
    ) -> Target:
        """Return the server at a URL such as http://127.0.0.1:8000. Raise UsageError for an invalid URL.

        Secrets in the URL and in the headers are redacted from then on.
        """
        redaction.register_url(url)
        redaction.register_secrets(*find_secrets(headers))
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise UsageError(f"--url {fit_line(url)}: {e}; {EXAMPLE}.") from e
        if port == 0:
            raise UsageError(f"--url {fit_line(url)}: no server listens at port 0; {EXAMPLE}.")
        labels = host.removesuffix(".").split(".") if host else []
        if any(not 0 < len(label) <= MAX_LABEL for label in labels):
            raise UsageError(
                f"--url {fit_line(url)}: each part of a host's name has 1 to {MAX_LABEL} characters; {EXAMPLE}."
            )
        if parts.scheme not in PORTS or not host:
            raise UsageError(f"--url {fit_line(url)} is no address of a server; {EXAMPLE}.")
        if parts.username or parts.password:
            raise UsageError("--url has a name or password in it; put an API key in an environment variable instead.")
        if parts.query or parts.fragment:
            raise UsageError(
                f"--url {fit_line(url)}: leave out what follows {(parts.query and '?') or '#'}; {EXAMPLE}."
            )
        if parts.path.rstrip("/").endswith("/completions"):
            raise UsageError(f"--url {fit_line(url)}: leave out the path of the endpoint; {EXAMPLE}.")
        if any(ord(c) <= ord(" ") or ord(c) > ord("~") for c in host + parts.path + key):
            raise UsageError(f"--url or the API key holds a blank or a character that no header can have; {EXAMPLE}.")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port or PORTS[parts.scheme],
            path=path,
            key=key,
            headers=headers,
            timeout_s=timeout_s,
        )

    @property
    def url(self) -> str:
        """Return the URL for messages, without a key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def encode_request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return all bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += ["Accept-Encoding: identity", "User-Agent: dcpbench"]
        own_authorization = any(name.lower() == "authorization" for name, _ in self.headers)
        lines += [f"Authorization: Bearer {self.key}"] if self.key and not own_authorization else []
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if method == "POST" else []
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Reply(Protocol):
    """Interface of an object that receives an answer as it arrives."""

    awaits: str  # description of the missing answer if the request times out
    heard_s: float  # time.perf_counter() of the last progress, which restarts the time limit

    def receive_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take the status and the headers; names are in lower case."""

    def receive_body(self, data: bytes, now_s: float) -> None:
        """Take a piece of the body. The connection is closed if this raises RequestError or StreamError."""

    def receive_end(self) -> None:
        """Take the end of the body. May raise like `body`."""


class WholeReply:
    """An answer that is kept whole. Its time limit covers the whole answer, for any speed of the server."""

    awaits = "no complete answer"

    def __init__(self, limit: int = MAX_BODY) -> None:
        """Keep at most `limit` bytes."""
        self.status, self.headers, self.heard_s = 0, dict[bytes, bytes](), time.perf_counter()
        self._pieces: list[bytes] = []
        self._size, self._limit = 0, limit

    def receive_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Implement Reply.receive_head."""
        self.status, self.headers = status, headers

    def receive_body(self, data: bytes, now_s: float) -> None:  # noqa: ARG002
        """Implement Reply.receive_body."""
        self._size += len(data)
        if self._size > self._limit:
            raise RequestError("too long", f"the server's answer is longer than {self._limit:,} bytes.")
        self._pieces.append(data)

    def receive_end(self) -> None:
        """Implement Reply.receive_end."""

    @property
    def data(self) -> bytes:
        """Return the body."""
        return b"".join(self._pieces)


class WholeOkReply(WholeReply):
    """An answer that is kept whole. Its end raises RequestError if its status is not 200."""

    def receive_end(self) -> None:
        """Implement Reply.receive_end."""
        if self.status != OK:
            raise make_status_error(self.status, self.headers, self.data)


def _find_encoding(headers: dict[bytes, bytes]) -> str | None:
    """Return the header by which an answer is compressed, or None if it is not."""
    coding = headers.get(b"content-encoding", b"").lower()
    if coding not in IDENTITY:
        return f"Content-Encoding: {fit_line(coding.decode('latin-1'), MAX_CODING)}"
    codings = [name.strip() for name in headers.get(b"transfer-encoding", b"").lower().split(b",")]
    other = [name for name in codings if name not in (b"chunked", *IDENTITY)]
    return f"Transfer-Encoding: {fit_line(other[0].decode('latin-1'), MAX_CODING)}" if other else None


def make_status_error(status: int, headers: dict[bytes, bytes], body: bytes) -> RequestError:
    """Return the failure that an HTTP status other than 200 means, with the server's own message."""
    message = read_error_message(body).rstrip(".") if body.strip() else "no message"
    if (encoding := _find_encoding(headers)) is not None:
        message = f"a message in {encoding}"
    if status < CLIENT_ERROR:
        to = fit_line(headers.get(b"location", b"").decode("latin-1"), MAX_LOCATION)
        return RequestError(f"HTTP {status}", f"the server redirects (HTTP {status}) to {to}. Use that in --url.")
    after = headers.get(b"retry-after", b"").decode("latin-1")
    return RequestError(
        f"HTTP {status}",
        f"the server answered HTTP {status}: {message}.",
        status=status,
        retry_after_s=float(after) if after.isdecimal() else None,
    )


class Connection(asyncio.BufferedProtocol):
    """A connection, which carries one request at a time."""

    def __init__(self, sock: StampedSocket, ages_s: list[float], lost: Callable[[Connection], None]) -> None:
        self._socket, self._ages_s, self._lost = sock, ages_s, lost
        self._heard_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self._parse: Callable[[bytes, float], None] = self._parse_head
        self._held = b""
        self._left = self._interim = 0
        self._trailer = False
        self._keep = True
        self._ended = False  # whether the peer has ended its side
        self._acked: int | None = None
        self.answered = False  # whether anything arrived for the present request
        self.unread = False  # whether the connection ended before its peer received a byte of the request
        self.used = 0  # requests that were answered

    @property
    def is_open(self) -> bool:
        """Return True if a request can be sent, as far as the event loop knows."""
        return self._transport is not None and not self._transport.is_closing()

    def is_alive(self, *, encrypted: bool) -> bool:
        """Return whether an idle connection can take a request, by what its socket has received.

        A server closes a kept connection when it has been idle for some seconds. The kernel knows this before the event
        loop reads it. Unexpected bytes make the next answer ambiguous; on an `encrypted` connection they may
        be a session ticket.
        """
        try:
            waiting = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(waiting) and encrypted

    def start_request(self, data: bytes, reply: Reply) -> asyncio.Future[None]:
        """Send a request. The result is set when the answer is whole, or to RequestError if the request failed."""
        assert self._transport is not None
        self._parse, self._held, self._left, self._trailer, self._keep = self._parse_head, b"", 0, False, True
        self.answered, self._reply, self._heard_s, self._interim = False, reply, time.perf_counter(), 0
        self._acked, self.unread = _get_acked_bytes(self._socket), False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._done

    def abort(self, error: BaseException | None = None) -> None:
        """Close the connection now. A request that is under way fails with the error."""
        if self._transport is not None:
            self._transport.abort()
        if error is not None:
            self._set_error(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement asyncio.Protocol.connection_made."""
        self._transport = transport  # type: ignore[assignment]  # of TCP or TLS

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Implement asyncio.BufferedProtocol.get_buffer. All connections share one buffer."""
        return BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Implement asyncio.BufferedProtocol.buffer_updated."""
        now = time.perf_counter()
        if (came_s := self._socket.came_s) is not None:
            came_s = min(max(came_s, self._heard_s), now)  # the machine's date may have been set meanwhile
            self._ages_s.append(now - came_s)
            now = came_s
        self._heard_s = now
        data = bytes(BUFFER[:nbytes])
        if self._reply is None:
            self.abort()
            return
        self.answered = True
        try:
            self._parse(data, now)
        except StreamError as e:
            self.abort(RequestError.from_stream_error(e))
        except RequestError as e:
            self.abort(e)

    def eof_received(self) -> None:
        """Implement asyncio.Protocol.eof_received."""
        self._ended = True
        if self._parse == self._parse_to_end and self._reply is not None:
            try:
                self._finish_answer()
            except RequestError as e:
                self._set_error(e)

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement asyncio.Protocol.connection_lost."""
        where = "in the middle of its answer" if self.answered else "without an answer"
        why = f" ({exc})" if exc else ""
        self.unread = self._is_unread(exc)
        self._set_error(RequestError(CLOSED, f"the server closed the connection {where}{why}."))
        self._transport = None
        self._lost(self)

    def _is_unread(self, exc: Exception | None) -> bool:
        """Return whether the peer closed the connection before it received any part of the request.

        The end of a connection (FIN) acknowledges all data that its peer has received. A reset may arrive before the
        acknowledgement of data that was read, so that after it the state is unknown. A broken pipe is an end followed
        by a reset.
        """
        ended = self._ended or isinstance(exc, BrokenPipeError)
        return ended and self._acked is not None and _get_acked_bytes(self._socket) == self._acked

    def _set_error(self, error: BaseException) -> None:
        done, self._done, self._reply = self._done, None, None
        if done is not None and not done.done():
            done.set_exception(error)

    def _finish_answer(self, rest: bytes = b"") -> None:
        """End an answer. The connection is not used again if bytes follow it."""
        assert self._reply is not None
        try:
            self._reply.receive_end()
        except StreamError as e:
            raise RequestError.from_stream_error(e) from e
        done, self._done, self._reply = self._done, None, None
        self.used += 1
        if (rest or not self._keep) and self._transport is not None:
            self._transport.close()
        if done is not None and not done.done():
            done.set_result(None)

    def _parse_head(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        head, rest = self._split_head(self._held + data)
        if head is None:
            return
        status, headers = head
        if status == OK and (encoding := _find_encoding(headers)) is not None:
            raise RequestError(
                "compressed",
                f"the server's answer is compressed ({encoding}), although the request accepts none; turn compression off in "
                "the server or in the proxy before it.",
            )
        self._reply.receive_head(status, headers)
        length = headers.get(b"content-length", b"")
        if headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._parse = self._parse_chunks
        elif status in NO_BODY or length == b"0":
            self._finish_answer(rest)
            return
        elif length.isdigit() and len(length) <= MAX_LENGTH_DIGITS:
            self._parse, self._left = self._parse_sized, int(length)
        else:
            self._parse, self._keep = self._parse_to_end, False
        if rest:
            self._parse(rest, now)

    def _split_head(self, text: bytes) -> tuple[tuple[int, dict[bytes, bytes]] | None, bytes]:
        """Return the status and the headers of the final head, and the bytes after it; None while it is incomplete."""
        while True:
            head, blank, rest = text.partition(b"\r\n\r\n")
            if not blank:
                if len(text) > MAX_HEAD or not b"HTTP/".startswith(text[:5]):
                    raise _make_http_error()
                self._held = text
                return None, b""
            status, headers = _read_head(head)
            if not CONTINUE <= status < OK:
                break
            text = rest
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise RequestError("not HTTP", f"the server sent more than {MAX_INTERIM} heads of status 1xx.")
        self._held = b""
        self._keep = headers.get(b"connection", b"").lower() != b"close" and head.startswith(b"HTTP/1.1")
        return (status, headers), rest

    def _parse_sized(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        self._left -= len(data)
        if self._left < 0:
            raise RequestError("not HTTP", "the server sent more bytes than its Content-Length.")
        self._reply.receive_body(data, now)
        if not self._left:
            self._finish_answer()

    def _parse_to_end(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        self._reply.receive_body(data, now)

    def _parse_chunks(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        place, size = 0, len(data)
        while place < size:
            if self._left:
                piece = data[place : place + self._left]
                self._left -= len(piece)
                place += len(piece)
                self._reply.receive_body(piece, now)
                continue
            end = data.find(b"\n", place)
            if end < 0:
                self._held += data[place:]
                if len(self._held) > MAX_HEAD:
                    raise _make_chunk_error()
                return
            line, self._held = (self._held + data[place:end]).strip(), b""
            place = end + 1
            if self._trailer:
                if not line:
                    self._finish_answer(data[place:])
                    return
            elif line:
                self._start_chunk(line)

    def _start_chunk(self, line: bytes) -> None:
        size = line.partition(b";")[0].strip()
        if CHUNK_SIZE.fullmatch(size) is None:
            raise _make_chunk_error()
        self._left = int(size, 16)
        self._trailer = self._left == 0


def _make_http_error() -> RequestError:
    return RequestError("not HTTP", "the server's answer is not HTTP/1.1.")


def _make_chunk_error() -> RequestError:
    return RequestError("not HTTP", "a chunk of the server's answer has no valid length.")


def _get_acked_bytes(sock: socket.socket) -> int | None:
    """Return how many bytes the peer's kernel has acknowledged; None if the system does not report it."""
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
        return int(ACKED_BYTES.unpack_from(found, ACKED_AT)[0])
    except (OSError, AttributeError, struct.error):
        return None


def _read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    if (match := STATUS_LINE.match(first)) is None:
        raise _make_http_error()
    pairs = (line.partition(b":") for line in lines)
    return int(match[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


class Client:
    """Connections to one server, which are kept and used again. It belongs to one event loop."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.resent = 0  # requests that were sent again; see send_request
        self.ages_s: list[float] = []  # how long each piece lay in the kernel before it was read, if it stamps it
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls: ssl.SSLContext | None = ssl.create_default_context() if target.scheme == "https" else None

    async def __aenter__(self) -> Client:  # noqa: PYI034 -- nothing derives from it
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._all):
            connection.abort()

    async def open_connections(self, count: int) -> None:
        """Open connections until `count` are ready. Raise RequestError if one of them cannot be made."""
        missing = range(count - len(self._idle))
        limit_s = self.target.timeout_s
        found = await asyncio.gather(*(self._open_within(limit_s) for _ in missing), return_exceptions=True)
        self._idle += [connection for connection in found if isinstance(connection, Connection)]
        for failure in found:
            if isinstance(failure, BaseException):
                raise failure

    async def get(self, path: str, timeout_s: float | None = None, limit: int = MAX_BODY) -> WholeReply:
        """Return the answer to a GET with any status, of at most `limit` bytes. Raise RequestError if there is none."""
        reply = WholeReply(limit)
        await self.send_request(self.target.encode_request("GET", path), reply, timeout_s)
        return reply

    async def post(self, path: str, body: bytes = b"", timeout_s: float | None = None, limit: int = MAX_BODY) -> bytes:
        """Return the answer of status 200 to a POST, of at most `limit` bytes. Raise RequestError for another one, or none."""
        reply = WholeOkReply(limit)
        await self.send_request(self.target.encode_request("POST", path, body), reply, timeout_s)
        return reply.data

    async def send_request(self, request: bytes, reply: Reply, timeout_s: float | None = None) -> None:
        """Send a request and wait for the end of its answer. Raise RequestError if it fails.

        A request is resent only if no part of it can have been read: its peer ended a kept connection before it
        received a single byte. If that is not certain (a reset, TLS, or not Linux), the request counts as failed.
        """
        limit_s = self.target.timeout_s if timeout_s is None else timeout_s
        option = " (--timeout)" if timeout_s is None else ""
        while True:
            connection = self._get_idle()
            kept = connection is not None
            if connection is None:
                connection = await self._open_within(limit_s)
            try:
                await self._send_once(connection, request, reply, limit_s, option)
            except RequestError as e:
                if e.kind == CLOSED and kept and connection.unread and not connection.answered:
                    self.resent += 1
                    continue
                raise
            except asyncio.CancelledError:
                connection.abort()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return

    async def _send_once(
        self, connection: Connection, request: bytes, reply: Reply, limit_s: float, option: str
    ) -> None:
        loop = asyncio.get_running_loop()
        reply.heard_s = time.perf_counter()

        def check_timeout() -> None:
            left = reply.heard_s + limit_s - time.perf_counter()
            if left > 0:
                timers[0] = loop.call_later(left, check_timeout)
            else:
                connection.abort(
                    RequestError(
                        TIME_OUT, f"{reply.awaits} came for {limit_s:g} s{option}; the client gave the request up."
                    )
                )

        timers = [loop.call_later(limit_s, check_timeout)]
        try:
            await connection.start_request(request, reply)
        finally:
            timers[0].cancel()

    def _get_idle(self) -> Connection | None:
        """Return a kept connection that its server has not closed, or None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.is_alive(encrypted=self._tls is not None):
                return connection
            connection.abort()
        return None

    async def _open_within(self, limit_s: float) -> Connection:
        try:
            async with asyncio.timeout(limit_s):
                return await self._open_connection()
        except TimeoutError as e:
            raise RequestError(TIME_OUT, f"no connection to {self.target.url} within {limit_s:g} s.") from e

    async def _open_connection(self) -> Connection:
        target, loop = self.target, asyncio.get_running_loop()
        try:
            sock = await _open_socket(target.host, target.port)
            _, connection = await loop.create_connection(
                lambda: Connection(sock, self.ages_s, self._remove_connection),
                sock=sock,
                ssl=self._tls,
                server_hostname=target.host if self._tls else None,
            )
        except ssl.SSLError as e:
            what = e.reason or str(e)
            detail = getattr(e, "verify_message", "")
            message = f"{what}: {detail}" if detail else what
            raise RequestError(
                "TLS", f"no TLS with {target.url}: {message}. For a certificate of your own, set SSL_CERT_FILE."
            ) from e
        except socket.gaierror as e:
            raise RequestError(
                "no such host", f"{target.host} is no host that is known here ({e.strerror}); {EXAMPLE}."
            ) from e
        except OSError as e:
            if e.errno in SHORTAGE:
                raise RequestError(OPEN_FILES, format_shortage()) from e
            why = e.strerror or str(e)
            raise RequestError(
                "refused", f"no server answers at {target.url} ({why}); is the server running, and at that port?"
            ) from e
        self._all.add(connection)
        return connection

    def _remove_connection(self, connection: Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


async def _open_socket(host: str, port: int) -> StampedSocket:
    """Return a socket connected to the first of a host's addresses that accepts. Raise the OSError of the last one."""
    loop = asyncio.get_running_loop()
    error: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = StampedSocket(family, kind, protocol).enable_timestamps()
        sock.settimeout(0)
        try:
            await loop.sock_connect(sock, address)
        except OSError as e:
            sock.close()
            error = e
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error or OSError("no address")
