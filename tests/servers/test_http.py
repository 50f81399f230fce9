"""Test the HTTP/1.1 parser of a connection with valid answers in any pieces and with invalid ones."""

from __future__ import annotations

import itertools
import json
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import UsageError
from dcpbench.servers import client
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import MAX_HEAD, Connection, RequestError, Target, WholeReply, make_status_error
from dcpbench.servers.events import StreamError

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nhel\r\n2;name=value\r\nlo\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
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
    """Record the callbacks of a connection."""

    awaits = "nothing"

    def __init__(self) -> None:
        self.status, self.data, self.heard_s, self.ended = 0, b"", 0.0, 0
        self.times: list[float] = []

    def receive_head(self, status: int, _: object) -> None:
        self.status = status

    def receive_body(self, data: bytes, now_s: float) -> None:
        self.data += data
        self.times.append(now_s)

    def receive_end(self) -> None:
        self.ended += 1


def connected() -> tuple[Connection, Reply, list[str]]:
    """Return a connection that waits for an answer, its reply, and the list of calls of its transport."""
    found = Connection(SimpleNamespace(came_s=None), [], lambda _: None)  # type: ignore[arg-type]
    reply, events = Reply(), list[str]()
    found._reply = reply  # type: ignore[assignment]
    found._transport = SimpleNamespace(close=lambda: events.append("closed"))  # type: ignore[assignment]
    return found, reply, events


@given(name=st.sampled_from([*ANSWERS]), cuts=st.lists(st.integers(1, 150), max_size=8))
def test_parsed_answer_does_not_depend_on_the_cuts(name: str, cuts: list[int]) -> None:
    text, status, body, again = ANSWERS[name]
    connection, reply, did = connected()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for a, b in itertools.pairwise(edges):
        assert not reply.ended
        connection._parse(text[a:b], 1.5)
    assert (reply.status, reply.data, reply.ended, reply.heard_s) == (status, body, 1, 0.0)
    assert did == ([] if again else ["closed"])


def test_answer_without_length_ends_at_eof() -> None:
    connection, reply, did = connected()
    connection._parse(b"HTTP/1.1 200 OK\r\n\r\nhel", 1.0)
    connection._parse(b"lo", 1.0)
    assert not reply.ended
    connection.eof_received()
    assert (reply.data, reply.ended, did) == (b"hello", 1, ["closed"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"SSH-2.0-OpenSSH", "is not HTTP/1.1"),
        (b"HTTP/1.1 OK\r\n\r\n", "is not HTTP/1.1"),
        (b"HTTP/1.1 " + b"2" * 5000 + b" OK\r\n\r\n", "is not HTTP/1.1"),
        (SIZED + b"!", "more bytes than its Content-Length"),
        (CHUNKED_HEAD + b"xyz\r\n", "has no valid length"),
        (CHUNKED_HEAD + b"-5\r\n", "has no valid length"),
        (CHUNKED_HEAD + b"1_0\r\n", "has no valid length"),
        (CHUNKED_HEAD + b"f" * 17 + b"\r\n", "has no valid length"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 65 + SIZED, "more than 64 heads of status 1xx"),
    ],
)
def test_invalid_http_raises_request_error(text: bytes, message: str) -> None:
    connection, _, _ = connected()
    with pytest.raises(RequestError, match=message) as error:
        connection._parse(text, 1.0)
    assert error.value.kind == "not HTTP"


@pytest.mark.parametrize(
    ("text", "limit", "whole"),
    [(b"x" * 5, 5, True), (b"x" * 6, 5, False)],
)
def test_whole_reply_has_a_size_limit(text: bytes, limit: int, whole: bool) -> None:
    """The size limit holds however the answer is cut, and no piece restarts the time limit."""
    reply = WholeReply(limit)
    reply.receive_head(200, {b"a": b"b"})
    heard_s = reply.heard_s
    reply.receive_body(text[:3], heard_s + 1.0)
    if whole:
        reply.receive_body(text[3:], heard_s + 2.5)
        assert (reply.status, reply.headers, reply.data, reply.heard_s) == (200, {b"a": b"b"}, text, heard_s)
    else:
        with pytest.raises(RequestError, match=r"^the server's answer is longer than 5 bytes\.$") as error:
            reply.receive_body(text[3:], 2.5)
        assert error.value.kind == "too long"
    assert WholeReply()._limit == 4 << 20


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:80"),
        ("https://host/v1", "https://host:443"),
        ("https://host:7/a/b/v1/", "https://host:7/a/b"),
        ("http://[::1]:9/x/", "http://[::1]:9/x"),
    ],
)
def test_target_url_has_a_port_and_no_v1(url: str, expected: str) -> None:
    assert Target.from_url(url).url == expected


EXAMPLE = "write for example --url http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("ftp://host", "", f"--url ftp://host is no address of a server; {EXAMPLE}."),
        ("http://", "", f"--url http:// is no address of a server; {EXAMPLE}."),
        ("http://host:x", "", f"; {EXAMPLE}."),
        ("http://me@host", "", "has a name or password in it"),
        ("http://:secret@host", "", "has a name or password in it"),
        ("http://host/?a=1", "", f"--url http://host/?a=1: leave out what follows ?; {EXAMPLE}."),
        ("http://host/#a", "", f"--url http://host/#a: leave out what follows #; {EXAMPLE}."),
        ("http://ho st", "", "holds a blank or a character that no header can have"),
        ("http://host", "a b", "holds a blank or a character that no header can have"),
        ("http://host", "\x7f", "holds a blank or a character that no header can have"),
    ],
)
def test_invalid_url_or_key_raises_usage_error(url: str, key: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Target.from_url(url, key=key)
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_key_may_contain_any_printable_ascii_character() -> None:
    assert Target.from_url("http://host", key="!~").key == "!~"


def test_encode_request_returns_these_bytes() -> None:
    """The key is sent, but does not appear in the target's repr."""
    target = Target.from_url("http://[::1]:9/x", key="k")
    head = (
        "Host: [::1]:9\r\nAccept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: dcpbench\r\nAuthorization: Bearer k"
    )
    assert target.encode_request("GET", "/v1/models") == f"GET /x/v1/models HTTP/1.1\r\n{head}\r\n\r\n".encode()
    body_headers = "Content-Type: application/json\r\nContent-Length: 2"
    assert (
        target.encode_request("POST", "/v1", b"{}")
        == f"POST /x/v1 HTTP/1.1\r\n{head}\r\n{body_headers}\r\n\r\n{{}}".encode()
    )
    assert "'k'" not in repr(target)
    assert b"Authorization" not in Target.from_url("http://host").encode_request("GET", "/")


@pytest.mark.parametrize(
    ("status", "headers", "body", "message", "after_s"),
    [
        (
            301,
            {b"location": b"http://there/" + b"x" * 200},
            b"",
            f"redirects (HTTP 301) to http://there/{'x' * 186}…. Use",
            None,
        ),
        (
            302,
            {b"location": b"a\x1b[2J"},
            b"",
            "the server redirects (HTTP 302) to a\\x1b[2J. Use that in --url.",
            None,
        ),
        (400, {}, b' {"error": {"message": "no."}}', "the server answered HTTP 400: no.", None),
        (429, {b"retry-after": b"7"}, b" \n", "the server answered HTTP 429: no message.", 7.0),
        (503, {b"retry-after": b"Wed, 21 Oct"}, b"", "the server answered HTTP 503: no message.", None),
        (500, {b"content-encoding": b"br"}, b"\x1b\x00", "HTTP 500: a message in Content-Encoding: br.", None),
    ],
)
def test_status_error_quotes_the_server_message(
    status: int, headers: dict[bytes, bytes], body: bytes, message: str, after_s: float | None
) -> None:
    error = make_status_error(status, headers, body)
    assert message in error.sentence
    assert (error.kind, error.retry_after_s) == (f"HTTP {status}", after_s)
    assert error.status == (status if status >= 400 else 0)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- ours
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD - 20), False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD - 19), True),
        (b"HTT", False),
        (b"HTT ", True),
        (b"HTTP/2 200 OK\r\n\r\n", True),
        (b"HTTP/1.1\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * MAX_HEAD, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * (MAX_HEAD + 1), True),
    ],
)
def test_size_of_an_incomplete_head_is_limited(text: bytes, wrong: bool) -> None:
    """The limit is 64 KiB for a head or a chunk length, and a head must begin as HTTP does."""
    connection, _, _ = connected()
    if wrong:
        with pytest.raises(RequestError, match=r"is not HTTP/1.1|has no valid length"):
            connection._parse(text, 1.0)
    else:
        connection._parse(text, 1.0)
        assert connection._held


@pytest.mark.parametrize(
    ("came_s", "heard_s", "age_s"),
    [(None, 100.0, None), (99.5, 99.5, 0.5), (101.0, 100.0, 0.0), (90.0, 95.0, 5.0)],
    ids=["no timestamp", "kernel timestamp", "later than now", "before the last read"],
)
def test_kernel_timestamps_of_reads_are_monotonic(
    came_s: float | None, heard_s: float, age_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous read was at 95 s, and the current time is 100 s."""
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    connection, reply, _ = connected()
    connection._socket, connection._heard_s = SimpleNamespace(came_s=came_s), 95.0
    connection.get_buffer(0)[: len(SIZED)] = SIZED
    connection.buffer_updated(len(SIZED))
    assert (connection._heard_s, reply.times, reply.data) == (heard_s, [heard_s], b"hello")
    assert connection._ages_s == ([] if age_s is None else [age_s])
    assert (connection.used, connection.answered, connection._reply) == (1, True, None)


@pytest.mark.parametrize(
    ("lines", "status", "headers"),
    [
        (b"HTTP/1.1 200 OK\r\nA-b:  c : d \r\nE:", 200, {b"a-b": b"c : d", b"e": b""}),
        (b"HTTP/1.0  404   Not  Found", 404, {}),
    ],
)
def test_header_names_are_lower_case(lines: bytes, status: int, headers: dict[bytes, bytes]) -> None:
    assert client._read_head(lines) == (status, headers)


@pytest.mark.parametrize(
    "header",
    [b"Content-Encoding: gzip", b"content-encoding: BR", b"Transfer-Encoding: gzip, chunked"],
)
def test_compressed_answer_raises_an_error_with_its_header(header: bytes) -> None:
    """Requests accept no compression; an answer with an error status is still reported with its status."""
    connection, _, _ = connected()
    with pytest.raises(RequestError, match=r"is compressed \((Content|Transfer)-Encoding: (gzip|br)\)") as error:
        connection._parse(b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n", 1.0)
    assert error.value.kind == "compressed"
    connection, reply, _ = connected()
    connection._parse(b"HTTP/1.1 500 No\r\n" + header + b"\r\n\r\n", 1.0)
    assert reply.status == 500


@pytest.mark.parametrize("name", ["sized", "chunked", "empty", "no content"])
def test_extra_bytes_after_an_answer_close_the_connection(name: str) -> None:
    """Extra bytes would be read as the next answer; after a Content-Length they raise an error."""
    connection, reply, did = connected()
    if name == "sized":
        with pytest.raises(RequestError, match="more bytes than its Content-Length"):
            connection._parse(ANSWERS[name][0] + SIZED, 1.0)
    else:
        connection._parse(ANSWERS[name][0] + SIZED, 1.0)
        assert (reply.ended, did) == (1, ["closed"])


NAMES = st.sampled_from([b"Content-Length", b"Transfer-Encoding", b"Content-Type", b"Content-Encoding", b"Connection"])
VALUES = st.one_of(st.sampled_from([b"chunked", b"text/event-stream", b"9" * 5000, b"-1", b"5"]), st.binary(max_size=9))
STARTS = st.sampled_from(
    [b"HTTP/1.1 200 OK", b"HTTP/1.1 100 x", b"HTTP/1.0 503 x", b"HTTP/1.1 " + b"9" * 5000, b"HTTP"]
)
FIELDS = [
    "choices",
    "usage",
    "text",
    "delta",
    "content",
    "tool_calls",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "error",
    "object",
    "prompt_tokens_details",
    "cached_tokens",
    "completion_tokens_details",
    "reasoning_tokens",
    "message",
    "logprobs",
]
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), of, max_size=4),
    max_leaves=8,
)
EVENTS = st.one_of(
    st.binary(max_size=30),
    JSON.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n"),
    st.lists(JSON, max_size=2).map(lambda found: b"data: " + json.dumps({"choices": found}).encode() + b"\n\n"),
    st.sampled_from([b"data: [DONE]\n\n", b"\r\n", b": x\n\n", b"0\r\n\r\n"]),
)


@given(
    start=STARTS,
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=3),
    events=st.lists(EVENTS, max_size=4),
    chunked=st.booleans(),
    keep=st.booleans(),
)
def test_arbitrary_answers_raise_only_request_or_stream_errors(
    start: bytes, headers: list[tuple[bytes, bytes]], events: list[bytes], chunked: bool, keep: bool
) -> None:
    """Heads, chunks and events contain arbitrary bytes and JSON."""
    head = b"\r\n".join([start, *(name + b": " + value for name, value in headers), b"", b""])
    pieces = [head, *(b"%x\r\n%s\r\n" % (len(event), event) if chunked else event for event in events)]
    connection, _, _ = connected()
    answer = StreamReply(4, prompt_tokens=9, keep=keep)
    connection._reply = answer
    failure: Exception | None = None
    try:
        for piece in pieces:
            if connection._reply is not None:
                connection._parse(piece, 1.0)
        answer.receive_end()
    except (RequestError, StreamError) as error:
        failure = error
    assert str(failure).isprintable()
    assert sum(answer.list_chunk_tokens()) <= max(len(answer.tokens), 4 + 8)
    assert answer.hidden_tokens <= 1 << 20
