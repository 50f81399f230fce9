"""HTTP/1.1 as a load generator needs it: bytes are stamped when they come, before anything else is done with them.

They are stamped by the kernel where it does (stamps.py), else by the read. A connection is an asyncio.Protocol that parses what
it receives and hands each piece of a body on at once, in the same turn of the loop: no stream, queue or task stands
between the socket and the clock. What is held of heads, lines and bodies is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import ssl
import time
import urllib.parse
from typing import TYPE_CHECKING, Protocol

import msgspec

from dcpbench import redaction
from dcpbench.errors import UsageError
from dcpbench.servers.descriptors import OPEN_FILES, SHORTAGE, shortage_sentence
from dcpbench.servers.events import StreamError, error_in
from dcpbench.servers.stamps import StampedSocket
from dcpbench.show.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_HEAD = 1 << 16
MOST_BODY = 1 << 26
"""Bytes of an answer that is kept whole."""
MOST_ERROR = 1 << 16
"""And of the body that comes with an error."""
BUFFER = memoryview(bytearray(1 << 16))
MAX_LABEL = 63  # characters between two dots of a host's name (RFC 1035)
NO_BODY = (204, 304)
CONTINUE = 100
OK = 200
REDIRECT, CLIENT_ERROR = 300, 400
TOO_MANY = 429
PORTS = {"http": 80, "https": 443}
EXAMPLE = "write for example --url http://127.0.0.1:8000"


class RequestError(Exception):
    """A request that failed: its kind, in a word or two, and a sentence."""

    def __init__(self, kind: str, sentence: str, *, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.kind, self.sentence, self.status, self.retry_after_s = kind, sentence, status, retry_after_s

    def __reduce__(self) -> tuple[Callable[..., RequestError], tuple[object, ...]]:
        """As it goes from one process to another."""
        return _request_error, (self.kind, self.sentence, self.status, self.retry_after_s)


def _request_error(kind: str, sentence: str, status: int, retry_after_s: float | None) -> RequestError:
    return RequestError(kind, sentence, status=status, retry_after_s=retry_after_s)


KEY_VARIABLE = "OPENAI_API_KEY"
"""Where a server's key is looked for."""


def api_key(variable: str) -> str:
    """Return the key that an environment variable holds, "" where the usual one is not set; it is redacted from then on.

    Raises UsageError, which repeats nothing, where another one is not set: a key typed in its place would be recorded.
    """
    if variable != KEY_VARIABLE and variable not in os.environ:
        raise UsageError(
            "--api-key-env takes the name of an environment variable that is set, not the key itself; write for example "
            f"`export {KEY_VARIABLE}=…` and leave the option out."
        )
    key = os.environ.get(variable, "")
    redaction.register(key)
    return key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A server and how it is asked."""

    scheme: str
    host: str
    port: int
    path: str = ""
    """Before /v1."""
    key: str = dataclasses.field(default="", repr=False)
    """API key; never recorded or printed."""
    timeout_s: float = 600.0
    """A request for which nothing comes so long has failed."""

    @classmethod
    def at(cls, url: str, *, key: str = "", timeout_s: float = 600.0) -> Target:
        """Return the server at a URL such as http://127.0.0.1:8000. Raises UsageError for what is none."""
        redaction.register_url(url)
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise UsageError(f"--url {one_line(url)}: {e}; {EXAMPLE}.") from e
        if port == 0:
            raise UsageError(f"--url {one_line(url)}: no server listens at port 0; {EXAMPLE}.")
        labels = host.removesuffix(".").split(".") if host else []
        if any(not 0 < len(label) <= MAX_LABEL for label in labels):
            raise UsageError(
                f"--url {one_line(url)}: each part of a host's name has 1 to {MAX_LABEL} characters; {EXAMPLE}."
            )
        if parts.scheme not in PORTS or not host:
            raise UsageError(f"--url {one_line(url)} is no address of a server; {EXAMPLE}.")
        if parts.username or parts.password:
            raise UsageError("--url has a name or password in it; put an API key in an environment variable instead.")
        if parts.query or parts.fragment:
            raise UsageError(
                f"--url {one_line(url)}: leave out what follows {(parts.query and '?') or '#'}; {EXAMPLE}."
            )
        if any(ord(c) <= ord(" ") or ord(c) > ord("~") for c in host + parts.path + key):
            raise UsageError(f"--url or the API key holds a blank or a character that no header can have; {EXAMPLE}.")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port or PORTS[parts.scheme],
            path=path,
            key=key,
            timeout_s=timeout_s,
        )

    @property
    def url(self) -> str:
        """As it is said: without a key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """All bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += ["Accept-Encoding: identity", "User-Agent: dcpbench"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if method == "POST" else []
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Reply(Protocol):
    """What takes an answer as it comes."""

    heard_s: float
    """When there was progress last, by time.perf_counter()."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The status and the headers, names in small letters."""

    def body(self, data: bytes, now_s: float) -> None:
        """A piece of the body. May raise RequestError or StreamError: then the connection is closed."""

    def end(self) -> None:
        """The body is whole. May raise likewise."""


class Whole:
    """An answer that is kept whole."""

    def __init__(self, most: int = MOST_BODY) -> None:
        self.status, self.headers, self.heard_s = 0, dict[bytes, bytes](), time.perf_counter()
        self._pieces: list[bytes] = []
        self._size, self._most = 0, most

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """See Reply."""
        self.status, self.headers = status, headers

    def body(self, data: bytes, now_s: float) -> None:
        """See Reply."""
        self._size += len(data)
        self.heard_s = now_s
        if self._size > self._most:
            raise RequestError("too long", f"the server's answer is longer than {self._most:,} bytes.")
        self._pieces.append(data)

    def end(self) -> None:
        """See Reply."""

    @property
    def data(self) -> bytes:
        """The body."""
        return b"".join(self._pieces)


def status_error(status: int, headers: dict[bytes, bytes], body: bytes) -> RequestError:
    """What an HTTP status other than 200 means for a request, with what the server says."""
    said = error_in(body).rstrip(".") if body.strip() else "nothing more"
    if status < CLIENT_ERROR:
        to = redaction.redact_part(headers.get(b"location", b"").decode("latin-1"))[:200]
        return RequestError(f"HTTP {status}", f"the server sends elsewhere (HTTP {status}): {to}. Name that in --url.")
    after = headers.get(b"retry-after", b"").decode("latin-1")
    return RequestError(
        f"HTTP {status}",
        f"the server answered HTTP {status}: {said}.",
        status=status,
        retry_after_s=float(after) if after.isdecimal() else None,
    )


class Connection(asyncio.BufferedProtocol):
    """One connection, with one request at a time on its way."""

    def __init__(self, sock: StampedSocket, ages_s: list[float], lost: Callable[[Connection], None]) -> None:
        self._socket, self._ages_s, self._lost = sock, ages_s, lost
        self._heard_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self._parse: Callable[[bytes, float], None] = self._parse_head
        self._held = b""
        self._left = 0
        self._trailer = False
        self._keep = True
        self.answered = False
        """Whether anything came for the request on its way."""
        self.used = 0
        """Requests that were answered before."""

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes, reply: Reply) -> asyncio.Future[None]:
        """Send a request; done when its answer is whole, with RequestError where it failed."""
        assert self._transport is not None
        self._parse, self._held, self._left, self._trailer, self._keep = self._parse_head, b"", 0, False, True
        self.answered, self._reply, self._heard_s = False, reply, time.perf_counter()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._done

    def abort(self, error: BaseException | None = None) -> None:
        """Close it now; a request on its way fails with the error."""
        if self._transport is not None:
            self._transport.abort()
        if error is not None:
            self._fail(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport  # type: ignore[assignment]  # of TCP or TLS

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """See asyncio.BufferedProtocol; one for all connections, as each read is taken out of it at once."""
        return BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
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
            self.abort(RequestError("bad stream", f"the server at work: {e}."))
        except RequestError as e:
            self.abort(e)

    def eof_received(self) -> None:
        """See asyncio.Protocol."""
        if self._parse == self._parse_to_end and self._reply is not None:
            try:
                self._finish()
            except RequestError as e:
                self._fail(e)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        where = "in the middle of its answer" if self.answered else "without an answer"
        why = f" ({exc})" if exc else ""
        self._fail(RequestError("closed", f"the server closed the connection {where}{why}."))
        self._transport = None
        self._lost(self)

    def _fail(self, error: BaseException) -> None:
        done, self._done, self._reply = self._done, None, None
        if done is not None and not done.done():
            done.set_exception(error)

    def _finish(self) -> None:
        assert self._reply is not None
        try:
            self._reply.end()
        except StreamError as e:
            raise RequestError("bad stream", f"the server at work: {e}.") from e
        done, self._done, self._reply = self._done, None, None
        self.used += 1
        if not self._keep and self._transport is not None:
            self._transport.close()
        if done is not None and not done.done():
            done.set_result(None)

    def _parse_head(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        text = self._held + data
        head, blank, rest = text.partition(b"\r\n\r\n")
        if not blank:
            if len(text) > MOST_HEAD or not b"HTTP/".startswith(text[:5]):
                raise RequestError("not HTTP", "what the server sent is no answer of HTTP/1.1.")
            self._held = text
            return
        status, headers = _read_head(head)
        self._held = b""
        if CONTINUE <= status < OK:
            if rest:
                self._parse_head(rest, now)
            return
        self._keep = headers.get(b"connection", b"").lower() != b"close" and head.startswith(b"HTTP/1.1")
        self._reply.heard_s = now
        self._reply.head(status, headers)
        length = headers.get(b"content-length", b"")
        if headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._parse = self._parse_chunks
        elif status in NO_BODY or length == b"0":
            self._finish()
            return
        elif length.isdigit():
            self._parse, self._left = self._parse_sized, int(length)
        else:
            self._parse, self._keep = self._parse_to_end, False
        if rest:
            self._parse(rest, now)

    def _parse_sized(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        self._left -= len(data)
        if self._left < 0:
            raise RequestError("not HTTP", "the server sent more than its Content-Length says.")
        self._reply.body(data, now)
        if not self._left:
            self._finish()

    def _parse_to_end(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        self._reply.body(data, now)

    def _parse_chunks(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        place, size = 0, len(data)
        while place < size:
            if self._left:
                piece = data[place : place + self._left]
                self._left -= len(piece)
                place += len(piece)
                self._reply.body(piece, now)
                continue
            end = data.find(b"\n", place)
            if end < 0:
                self._held += data[place:]
                if len(self._held) > MOST_HEAD:
                    raise RequestError("not HTTP", "a chunk of the server's answer has no length.")
                return
            line, self._held = (self._held + data[place:end]).strip(), b""
            place = end + 1
            if self._trailer:
                if not line:
                    self._finish()
                    return
            elif line:
                self._begin_chunk(line)

    def _begin_chunk(self, line: bytes) -> None:
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            self._left = -1
        if self._left < 0:
            raise RequestError("not HTTP", "a chunk of the server's answer has no length.")
        self._trailer = self._left == 0


def _read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():  # noqa: PLR2004
        raise RequestError("not HTTP", "what the server sent is no answer of HTTP/1.1.")
    pairs = (line.partition(b":") for line in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


class Client:
    """Connections to one server, which are kept and used again. Of one event loop."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.resent = 0
        """Requests that were sent again because the connection had been closed before the server read anything."""
        self.ages_s: list[float] = []
        """How long each piece had lain in the kernel when it was read, where the kernel says."""
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

    async def open(self, count: int) -> None:
        """Have so many connections ready. Raises RequestError."""
        missing = count - len(self._idle)
        self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))

    async def get(self, path: str, timeout_s: float | None = None) -> Whole:
        """The answer to a GET, whatever its status. Raises RequestError where there is none."""
        reply = Whole()
        await self.exchange(self.target.request("GET", path), reply, timeout_s)
        return reply

    async def post(self, path: str, body: object = None, timeout_s: float | None = None) -> Whole:
        """The same of a POST of JSON."""
        reply = Whole()
        data = b"" if body is None else msgspec.json.encode(body)
        await self.exchange(self.target.request("POST", path, data), reply, timeout_s)
        return reply

    async def exchange(self, request: bytes, reply: Reply, timeout_s: float | None = None) -> None:
        """Send a request and wait for the end of its answer. Raises RequestError where it fails.

        It is sent once more where the server had closed a kept connection before it read anything.
        """
        limit_s = self.target.timeout_s if timeout_s is None else timeout_s
        while True:
            connection = await self._lend(limit_s)
            try:
                await self._exchange(connection, request, reply, limit_s)
            except RequestError as e:
                if e.kind == "closed" and connection.used and not connection.answered:
                    self.resent += 1
                    continue
                raise
            except asyncio.CancelledError:
                connection.abort()
                raise
            if connection.open:
                self._idle.append(connection)
            return

    async def _exchange(self, connection: Connection, request: bytes, reply: Reply, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        reply.heard_s = time.perf_counter()

        def look() -> None:
            left = reply.heard_s + limit_s - time.perf_counter()
            if left > 0:
                timers[0] = loop.call_later(left, look)
            else:
                connection.abort(
                    RequestError("time-out", f"nothing came for {limit_s:g} s (--request-timeout); it was given up.")
                )

        timers = [loop.call_later(limit_s, look)]
        try:
            await connection.send(request, reply)
        finally:
            timers[0].cancel()

    async def _lend(self, limit_s: float) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        try:
            async with asyncio.timeout(limit_s):
                return await self._connect()
        except TimeoutError as e:
            raise RequestError("time-out", f"no connection to {self.target.url} within {limit_s:g} s.") from e

    async def _connect(self) -> Connection:
        target, loop = self.target, asyncio.get_running_loop()
        try:
            sock = await _connected(target.host, target.port)
            _, connection = await loop.create_connection(
                lambda: Connection(sock, self.ages_s, self._forget),
                sock=sock,
                ssl=self._tls,
                server_hostname=target.host if self._tls else None,
            )
        except ssl.SSLError as e:
            what = e.reason or str(e)
            detail = getattr(e, "verify_message", "")
            said = f"{what}: {detail}" if detail else what
            raise RequestError(
                "TLS", f"no TLS with {target.url}: {said}. For a certificate of your own, set SSL_CERT_FILE."
            ) from e
        except socket.gaierror as e:
            raise RequestError(
                "no such host", f"{target.host} is no host that is known here ({e.strerror}); {EXAMPLE}."
            ) from e
        except OSError as e:
            if e.errno in SHORTAGE:
                raise RequestError(OPEN_FILES, shortage_sentence()) from e
            why = e.strerror or str(e)
            raise RequestError(
                "refused", f"nothing answers at {target.url} ({why}); is the server running, and at that port?"
            ) from e
        self._all.add(connection)
        return connection

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


async def _connected(host: str, port: int) -> StampedSocket:
    """A socket to the first of a host's addresses that takes one. Raises OSError, that of the last."""
    loop = asyncio.get_running_loop()
    error: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = StampedSocket(family, kind, protocol).stamp()
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
