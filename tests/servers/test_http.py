"""Answers of HTTP/1.1 as a connection reads them: the same however they are cut, or no HTTP at all."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.servers.client import Connection, RequestError

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nhel\r\n2;name=value\r\nlo\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
ANSWERS: dict[str, tuple[bytes, int, bytes, bool]] = {
    "sized": (SIZED, 200, b"hello", True),
    "chunked": (CHUNKED, 200, b"hello", True),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, 200, b"hello", True),
    "early hints": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
        200,
        b"hello",
        True,
    ),
    "close": (b"HTTP/1.1 500 No\r\nConnection: Close\r\nContent-Length: 2\r\n\r\nno", 500, b"no", False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
}
"""Bytes, and what is made of them: status, body, and whether the connection is used again."""


class Reply:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.status, self.data, self.heard_s, self.ended = 0, b"", 0.0, 0

    def head(self, status: int, _: object) -> None:
        self.status = status

    def body(self, data: bytes, _: float) -> None:
        self.data += data

    def end(self) -> None:
        self.ended += 1


def connected() -> tuple[Connection, Reply, list[str]]:
    """A connection that waits for an answer, what it is told, and what becomes of its transport."""
    found = Connection(SimpleNamespace(came_s=None), [], lambda _: None)  # type: ignore[arg-type]
    reply, did = Reply(), list[str]()
    found._reply = reply  # type: ignore[assignment]
    found._transport = SimpleNamespace(close=lambda: did.append("closed"))  # type: ignore[assignment]
    return found, reply, did


@given(name=st.sampled_from([*ANSWERS]), cuts=st.lists(st.integers(1, 150), max_size=8))
def test_an_answer_is_the_same_wherever_it_is_cut(name: str, cuts: list[int]) -> None:
    text, status, body, again = ANSWERS[name]
    connection, reply, did = connected()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for a, b in itertools.pairwise(edges):
        assert not reply.ended
        connection._parse(text[a:b], 1.5)
    assert (reply.status, reply.data, reply.ended, reply.heard_s) == (status, body, 1, 1.5)
    assert did == ([] if again else ["closed"])


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    connection, reply, did = connected()
    connection._parse(b"HTTP/1.1 200 OK\r\n\r\nhel", 1.0)
    connection._parse(b"lo", 1.0)
    assert not reply.ended
    connection.eof_received()
    assert (reply.data, reply.ended, did) == (b"hello", 1, ["closed"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"SSH-2.0-OpenSSH", "no answer of HTTP/1.1"),
        (b"HTTP/1.1 OK\r\n\r\n", "no answer of HTTP/1.1"),
        (SIZED + b"!", "more than its Content-Length says"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "has no length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "has no length"),
    ],
)
def test_what_is_no_http_is_said_to_be_none(text: bytes, said: str) -> None:
    connection, _, _ = connected()
    with pytest.raises(RequestError, match=said) as error:
        connection._parse(text, 1.0)
    assert error.value.kind == "not HTTP"
