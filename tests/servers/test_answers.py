"""How many tokens each chunk of a stream brought, as servers tell it."""

from __future__ import annotations

import json

import pytest

from dcpbench.servers.answers import BY_IDS, BY_USAGE, SPARE_CHUNKS, Streamed
from dcpbench.servers.client import RequestError
from dcpbench.servers.events import StreamError


def event(text: str, *, usage: int | None = None, ids: list[int] | None = None, end: bool = False) -> dict[str, object]:
    """One event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": "length" if end else None}
    said: dict[str, object] = {"choices": [choice | ({"token_ids": ids} if ids is not None else {})]}
    return said if usage is None else said | {"usage": {"completion_tokens": usage, "prompt_tokens": 3}}


def streamed(*events: dict[str, object]) -> Streamed:
    """The answer that these events make, one every second."""
    answer = Streamed(4)
    answer.head(200, {b"content-type": b"text/event-stream"})
    for second, said in enumerate(events):
        answer.body(b"data: " + json.dumps(said).encode() + b"\n\n", float(second))
    answer.body(b"data: [DONE]\n\n", float(len(events)))
    answer.end()
    return answer


LAST = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 3}}


@pytest.mark.parametrize(("chunks", "ends"), [(2 * 4 + SPARE_CHUNKS, True), (2 * 4 + SPARE_CHUNKS + 1, False)])
def test_a_stream_may_have_twice_the_chunks_of_what_was_asked_and_some_to_spare(chunks: int, ends: bool) -> None:
    """Four tokens were asked for."""
    events = [event("a", ids=[1]) for _ in range(chunks)]
    if ends:
        assert len(streamed(*events, event("", end=True)).chunk_s) == chunks
    else:
        with pytest.raises(StreamError, match=f"it sent {chunks:,} chunks for 4 tokens and did not end"):
            streamed(*events)


@pytest.mark.parametrize(
    ("events", "counts", "by"),
    [
        ([event("a"), event("b"), event("c"), event("d", end=True), LAST], [1, 1, 1, 1], BY_USAGE),
        # transformers serve tells usage in the chunk that ends an answer, which has no text of its own
        ([event("a"), event("b"), event("c"), event("d"), event("", usage=4, end=True)], [1, 1, 1, 1], BY_USAGE),
        ([event("a"), event("b c d", usage=4, end=True)], [2, 2], BY_USAGE),
        ([event("a"), event("b c d", end=True), LAST], [2, 2], BY_USAGE),
        ([event("a"), event("b"), event("c d", end=True), LAST], [1, 1, 2], BY_USAGE),
        ([event("a", usage=1), event("b c d", usage=4, end=True)], [1, 3], BY_USAGE),
        ([event("a", ids=[1]), event("b c d", ids=[2, 3, 4], end=True), LAST], [1, 3], BY_IDS),
    ],
)
def test_tokens_of_chunks_add_up_to_what_the_server_counted(
    events: list[dict[str, object]], counts: list[int], by: str
) -> None:
    """Four tokens, however they are told; evenly where nobody says which chunk has how many."""
    answer = streamed(*events)
    assert answer.chunk_tokens() == counts
    assert answer.counted_by == by
    assert answer.chunk_s == [float(n) for n in range(len(counts))]


@pytest.mark.parametrize(
    ("status", "kind", "pieces", "said"),
    [
        (200, b"text/html", [b"<html>", b"Sign in"], "text/html in place of a stream: <html>Sign in"),
        (200, b"text/html", [b"x" * 300, b"y" * 300, b"z"], "text/html in place of a stream: xxx"),
        (500, b"text/plain", [b"x" * 600, b" told at its end"], "told at its end"),
    ],
    ids=["short", "long enough", "error"],
)
def test_what_is_no_stream_is_read_until_it_tells_enough(
    status: int, kind: bytes, pieces: list[bytes], said: str
) -> None:
    """512 bytes of a page; of an error all there is, as its message may come last."""
    answer = Streamed(4)
    answer.head(status, {b"content-type": kind})

    def come() -> None:
        for piece in pieces:
            answer.body(piece, 0.0)
        answer.end()

    with pytest.raises(RequestError) as error:
        come()
    data = answer._body
    assert len(data) == (600 if len(pieces) == 3 else sum(map(len, pieces))), "not the third of the long ones"
    assert said in error.value.sentence or status == 500


def test_of_several_answers_the_first_is_taken() -> None:
    """Nobody asks for more than one."""
    choices = [{"index": i, "text": text, "token_ids": [i], "finish_reason": "length"} for i, text in enumerate("ab")]
    answer = streamed({"choices": choices})
    assert (answer.tokens, answer.finish_reason) == ([0], "length")


@pytest.mark.parametrize(
    ("asked", "unknown", "total", "counts"),
    [(4, 3, 3, [1, 1, 1]), (9, 3, 8, [2, 3, 3]), (4, 2, 1, [1, 1]), (4, 1, None, [1])],
)
def test_tokens_of_which_nobody_says_where_they_came_are_told_evenly(
    asked: int, unknown: int, total: int | None, counts: list[int]
) -> None:
    """What does not divide goes to the last chunks; each has one at least."""
    answer = Streamed(asked)
    answer.head(200, {})
    for n in range(unknown):
        answer.body(b"data: " + json.dumps(event("x", end=n + 1 == unknown)).encode() + b"\n\n", float(n))
    if total is not None:
        answer.body(
            b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": total}}).encode() + b"\n\n", 9.0
        )
    answer.end()
    assert answer.chunk_tokens() == counts


def test_a_stream_that_says_neither_that_it_is_done_nor_why_was_cut_off() -> None:
    """And one that says so without a token has none."""
    answer = Streamed(4)
    answer.head(200, {b"content-type": b"text/event-stream; charset=utf-8"})
    answer.body(b"data: " + json.dumps(event("a")).encode() + b"\n\n", 1.0)
    with pytest.raises(
        RequestError, match=r"^the stream ended after 1 chunks, before it said that the answer had\.$"
    ) as error:
        answer.end()
    assert error.value.kind == "cut off"
    empty = Streamed(4)
    empty.head(200, {})
    empty.body(b"data: [DONE]\n\n", 1.0)
    with pytest.raises(RequestError, match=r"^the server's answer holds no token\.$") as error:
        empty.end()
    assert error.value.kind == "no tokens"
