"""Test that a request is sent again only if the server cannot have read any of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import pytest

from dcpbench.servers import client as http
from dcpbench.servers.client import Client, Connection, RequestError, Target, WholeReply

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LINGER_OFF = b"\x01\x00\x00\x00\x00\x00\x00\x00"


class Serving:
    """Serve in a thread: answer the first request, and then handle the connection with `then`."""

    def __init__(self, then: Callable[[socket.socket], None]) -> None:
        self.then, self.requests, self.done = then, list[bytes](), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.target = Target.from_url(f"http://127.0.0.1:{self._listening.getsockname()[1]}", timeout_s=5.0)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as accepted:
            first = self._accept_and_answer(accepted)
            self.then(first)
            self.done.set()
            while True:
                self._accept_and_answer(accepted)

    def _accept_and_answer(self, accepted: contextlib.ExitStack) -> socket.socket:
        """Answer the first request of the next connection, which `accepted` closes."""
        connection = accepted.enter_context(self._listening.accept()[0])
        self.requests.append(connection.recv(1 << 16))
        connection.sendall(ANSWER)
        return connection


def close(sock: socket.socket) -> None:
    """Close a connection as a server closes one that was idle for too long."""
    sock.close()


def reset(sock: socket.socket) -> None:
    """Reset a connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_OFF)
    sock.close()


def read_and(end: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """Return a handler that reads another request before it ends the connection."""

    def then(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        end(sock)

    return then


async def ask_twice(server: Serving, between: Callable[[], None]) -> tuple[WholeReply | RequestError, int]:
    """Send two requests; return the second answer or failure, and how many were sent again.

    `between` runs in the event loop, which therefore does not see what happens to the connection meanwhile.
    """
    async with Client(server.target) as client:
        await client.get("/1")
        between()
        try:
            return await client.get("/2"), client.resent
        except RequestError as e:
            return e, client.resent


def wait_for(server: Serving) -> None:
    """Let the server act and the packets arrive."""
    assert server.done.wait(5)
    time.sleep(0.1)


@pytest.mark.parametrize("end", [close, reset])
def test_request_that_was_read_and_dropped_fails(end: Callable[[socket.socket], None]) -> None:
    """The server must not get the request twice."""
    with Serving(read_and(end)) as server:
        found, resent = asyncio.run(ask_twice(server, lambda: None))
    assert isinstance(found, RequestError)
    assert (found.kind, resent) == ("closed", 0)
    assert [b"GET /2" in request for request in server.requests] == [False]


@pytest.mark.parametrize("end", [close, reset])
def test_connection_closed_while_idle_is_not_used(end: Callable[[socket.socket], None]) -> None:
    """The kernel knows that the connection ended, although the event loop has not read it yet."""
    with Serving(end) as server:
        found, resent = asyncio.run(ask_twice(server, lambda: wait_for(server)))
    assert isinstance(found, WholeReply)
    assert (found.data, resent, len(server.requests)) == (b"ok", 0, 2)


def test_unrequested_bytes_close_the_connection() -> None:
    """Unrequested bytes would be read as the answer to the next request."""

    def then(sock: socket.socket) -> None:
        time.sleep(0.1)
        sock.sendall(ANSWER.replace(b"ok", b"no"))

    with Serving(then) as server:
        found, resent = asyncio.run(ask_twice(server, lambda: wait_for(server)))
    assert isinstance(found, WholeReply)
    assert (found.data, resent) == (b"ok", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports how many bytes were acknowledged")
def test_request_that_crosses_a_close_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed while the request is under way, so the peer acknowledges none of it."""
    monkeypatch.setattr(Connection, "is_alive", lambda *_, **__: True)
    with Serving(close) as server:
        found, resent = asyncio.run(ask_twice(server, lambda: wait_for(server)))
    assert isinstance(found, WholeReply)
    assert (found.data, resent, len(server.requests)) == (b"ok", 1, 2)


def test_request_that_crosses_a_reset_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that reads a request and resets the connection at once acknowledges no byte either."""
    monkeypatch.setattr(Connection, "is_alive", lambda *_, **__: True)
    with Serving(reset) as server:
        found, resent = asyncio.run(ask_twice(server, lambda: wait_for(server)))
    assert isinstance(found, RequestError)
    assert (found.kind, resent, len(server.requests)) == ("closed", 0, 1)


def test_request_fails_if_acknowledged_bytes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have read the request."""
    monkeypatch.setattr(Connection, "is_alive", lambda *_, **__: True)
    monkeypatch.setattr(http, "_get_acked_bytes", lambda _: None)
    with Serving(close) as server:
        found, resent = asyncio.run(ask_twice(server, lambda: wait_for(server)))
    assert isinstance(found, RequestError)
    assert (found.kind, resent, len(server.requests)) == ("closed", 0, 1)


def test_request_is_not_repeated_forever_if_each_connection_closes() -> None:
    """Only a kept connection can have ended before the request was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = Target.from_url(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=2.0)
        accepted = list[int]()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    accepted.append(1)
                    reset(sock)

        threading.Thread(target=serve, daemon=True).start()

        async def ask() -> None:
            async with Client(target) as client:
                await client.get("/")

        with pytest.raises(RequestError):
            asyncio.run(ask())
        assert len(accepted) == 1


def test_connection_timeout_before_the_load_fails() -> None:
    """The queue of the host is full, so it accepts no connection."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        target = Target.from_url(f"http://127.0.0.1:{address[1]}", timeout_s=0.5)
        held = [socket.socket() for _ in range(8)]
        for sock in held:
            sock.settimeout(0)
            sock.connect_ex(address)

        async def ask() -> None:
            async with Client(target) as client:
                await client.open_connections(3)

        began = time.monotonic()
        with pytest.raises(RequestError, match=r"no connection to .* within 0\.5 s"):
            asyncio.run(ask())
        assert time.monotonic() - began < 4.0
        for sock in held:
            sock.close()
