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
