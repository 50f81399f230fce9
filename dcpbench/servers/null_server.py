"""A minimal server: it answers each request with a token at once, and sends another each time GAP_S has passed.

Time that a client spends on its streams, and its lateness, are therefore the client's own: overhead.py.

    python -m dcpbench.servers.null_server

prints its port, and runs until its standard input ends, which also happens when the process that started it ends.
"""

from __future__ import annotations

import asyncio
import re
import sys

GAP_S = 0.02
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"null","choices":'
    b'[{"index":0,"text":" null","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[7]}],"usage":null}'
    b"\n\n"
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
LAST = b"data: [DONE]\n\n"
END = b"%x\r\n%s\r\n0\r\n\r\n" % (len(LAST), LAST)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
ASKED = re.compile(rb'"max_tokens": *(\d+)')


class Streams:
    """All streams, which get their tokens together, because a timer per stream would be an additional load."""

    def __init__(self) -> None:
        self.left: dict[asyncio.Transport, int] = {}
        self._due = 0.0

    def add_stream(self, transport: asyncio.Transport, tokens: int) -> None:
        """Add a stream of `tokens` tokens."""
        if tokens <= 1:
            transport.write(HEAD + CHUNK + END)
            return
        transport.write(HEAD + CHUNK)
        if not self.left:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + GAP_S
            loop.call_at(self._due, self._send_tokens)
        self.left[transport] = tokens - 1

    def _send_tokens(self) -> None:
        for transport, left in list(self.left.items()):
            if left > 1:
                self.left[transport] = left - 1
                transport.write(CHUNK)
            else:
                del self.left[transport]
                transport.write(CHUNK + END)
        self._due += GAP_S
        if self.left:
            asyncio.get_running_loop().call_at(self._due, self._send_tokens)


class Null(asyncio.Protocol):
    """A connection."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._held = streams, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement asyncio.Protocol.connection_made."""
        self._transport = transport  # type: ignore[assignment]  # of TCP

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol.data_received."""
        self._held += data
        head, blank, body = self._held.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if blank and self._transport is not None and len(body) >= (int(length[1]) if length else 0):
            asked = ASKED.search(body)
            self._held = b""
            self._streams.add_stream(self._transport, int(asked[1]) if asked else 1)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Implement asyncio.Protocol.connection_lost."""
        if self._transport is not None:
            self._streams.left.pop(self._transport, None)


async def run_server() -> None:
    """Serve at a free loopback port until standard input ends."""
    streams, ended, loop = Streams(), asyncio.Event(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Null(streams), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(run_server())
