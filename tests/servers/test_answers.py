"""How many tokens each chunk of a stream brought, as servers tell it."""

from __future__ import annotations

import json

import pytest

from dcpbench.servers.answers import BY_IDS, BY_USAGE, StreamReply
from dcpbench.servers.client import RequestError
from dcpbench.servers.events import Fault, StreamError
from dcpbench.servers.token_counts import SPARE_CHUNKS, Counting


def event(text: str, *, usage: int | None = None, ids: list[int] | None = None, end: bool = False) -> dict[str, object]:
    """One event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": "length" if end else None}
    said: dict[str, object] = {"choices": [choice | ({"token_ids": ids} if ids is not None else {})]}
    return said if usage is None else said | {"usage": {"completion_tokens": usage, "prompt_tokens": 3}}


def streamed(*events: dict[str, object], asked: int = 4) -> StreamReply:
    """The answer that these events make, one every second."""
    answer = StreamReply(asked)
    answer.receive_head(200, {b"content-type": b"text/event-stream"})
    for second, said in enumerate(events):
        answer.receive_body(b"data: " + json.dumps(said).encode() + b"\n\n", float(second))
    answer.receive_body(b"data: [DONE]\n\n", float(len(events)))
    answer.receive_end()
    return answer


LAST = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 3}}


@pytest.mark.parametrize(("chunks", "ends"), [(2 * 4 + SPARE_CHUNKS, True), (2 * 4 + SPARE_CHUNKS + 1, False)])
def test_a_stream_may_have_twice_the_chunks_of_what_was_asked_and_some_to_spare(chunks: int, ends: bool) -> None:
    """Four tokens were asked for."""
    events = [event("a", ids=[1]) for _ in range(chunks)]
    if ends:
        assert len(streamed(*events, event("", end=True)).chunk_s) == chunks
    else:
        with pytest.raises(StreamError, match="more than 1,008 chunks or token ids for 4 tokens") as error:
            streamed(*events)
        assert error.value.bad.fault == Fault.TOO_MANY_TOKENS


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
    assert answer.list_chunk_tokens() == counts
    assert answer.counted_by == by
    assert answer.chunk_s == [float(n) for n in range(len(counts))]


@pytest.mark.parametrize(
    ("status", "kind", "pieces", "said"),
    [
        (200, b"text/html", [b"<html>", b"Sign in"], "text/html instead of a stream: <html>Sign in"),
        (200, b"text/html", [b"x" * 300, b"y" * 300, b"z"], "text/html instead of a stream: xxx"),
        (500, b"text/plain", [b"x" * 600, b" told at its end"], "told at its end"),
    ],
    ids=["short", "long enough", "error"],
)
def test_what_is_no_stream_is_read_until_it_tells_enough(
    status: int, kind: bytes, pieces: list[bytes], said: str
) -> None:
    """512 bytes of a page; of an error all there is, as its message may come last."""
    answer = StreamReply(4)
    answer.receive_head(status, {b"content-type": kind})

    def come() -> None:
        for piece in pieces:
            answer.receive_body(piece, 0.0)
        answer.receive_end()

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
    answer = StreamReply(asked)
    answer.receive_head(200, {})
    for n in range(unknown):
        answer.receive_body(b"data: " + json.dumps(event("x", end=n + 1 == unknown)).encode() + b"\n\n", float(n))
    if total is not None:
        answer.receive_body(
            b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": total}}).encode() + b"\n\n", 9.0
        )
    answer.receive_end()
    assert answer.list_chunk_tokens() == counts


def test_a_stream_that_says_neither_that_it_is_done_nor_why_was_cut_off() -> None:
    """And one that says so without a token has none."""
    answer = StreamReply(4)
    answer.receive_head(200, {b"content-type": b"text/event-stream; charset=utf-8"})
    answer.receive_body(b"data: " + json.dumps(event("a")).encode() + b"\n\n", 1.0)
    with pytest.raises(
        RequestError, match=r"^the stream ended after 1 chunk, without a finish_reason or \[DONE\]\.$"
    ) as error:
        answer.receive_end()
    assert error.value.kind == "cut off"
    empty = StreamReply(4)
    empty.receive_head(200, {})
    empty.receive_body(b"data: [DONE]\n\n", 1.0)
    with pytest.raises(RequestError, match=r"^the server's answer holds no token\.$") as error:
        empty.receive_end()
    assert error.value.kind == "no tokens"


def chunks(
    *usages: int | None, texts: str = "", total: int | None = None, asked: int = 0, **about: object
) -> StreamReply:
    """The answer of a stream with these counts in its chunks, then `total` in an event of its own. "-": no text."""
    events = [
        event("" if texts[i : i + 1] == "-" else "a", usage=usage, end=i + 1 == len(usages))
        for i, usage in enumerate(usages)
    ]
    last = {"choices": [], "usage": {"completion_tokens": total, "prompt_tokens": 3} | about}
    return streamed(*events, *([last] if total is not None else []), asked=asked or max(len(usages), 4))


@pytest.mark.parametrize(
    ("answer", "by", "counts"),
    [
        (chunks(1, 2, 3, 4), Counting.CUMULATIVE, [1, 1, 1, 1]),
        (chunks(1, 3, 4), Counting.CUMULATIVE, [1, 2, 1]),
        (chunks(1, 2, 4, texts="a-a"), Counting.CUMULATIVE, [1, 1, 2]),  # a token whose text is not complete yet
        (chunks(1, 2, 3, 4, 4), Counting.CUMULATIVE, [1, 1, 1, 1]),  # the last text had been held back
        (chunks(4), Counting.CUMULATIVE, [4]),
        (chunks(0, 0, 0, 4), Counting.TOTAL, [1, 1, 1, 1]),
        (chunks(0, None, None, None, total=4), Counting.TOTAL, [1, 1, 1, 1]),
        (chunks(4, 4, 4, 4), Counting.TOTAL, [1, 1, 1, 1]),
        (chunks(4, 4), Counting.TOTAL, [2, 2]),
        (chunks(0, 1, 2, 3, total=4), Counting.TOTAL, [1, 1, 1, 1]),  # counts lag behind
        (chunks(1, 1, 1, 1), Counting.DELTAS, [1, 1, 1, 1]),
        (chunks(1, 2, 1), Counting.DELTAS, [1, 2, 1]),
        (chunks(1, 1, 2, total=4), Counting.DELTAS, [1, 1, 2]),
        (chunks(1, 1, 1, 1, total=8), Counting.TOTAL, [2, 2, 2, 2]),
        (chunks(0, 0, 0, 0), Counting.CHUNKS, [1, 1, 1, 1]),
        (chunks(None, None, None, None), Counting.CHUNKS, [1, 1, 1, 1]),
    ],
)
def test_usage_of_chunks_is_believed_if_it_fits_them(answer: StreamReply, by: Counting, counts: list[int]) -> None:
    """All but the first ones are of servers that fill `usage` of a chunk in their own way."""
    assert (answer.counts.by, answer.list_chunk_tokens()) == (by, counts)


def test_the_first_chunk_counts_whatever_its_usage_says() -> None:
    """TTFT is its time."""
    for answer in (chunks(0, 0, 0, 4), chunks(0, None, None, None, total=4), chunks(4, 4, 4, 4)):
        assert answer.chunk_s == [0.0, 1.0, 2.0, 3.0]


HIDDEN = {"completion_tokens_details": {"reasoning_tokens": 500}}


@pytest.mark.parametrize(
    ("answer", "hidden", "counts"),
    [
        (chunks(None, None, None, None, total=504, **HIDDEN), 500, [1, 1, 1, 1]),
        (chunks(501, 502, 503, 504, total=504, asked=600, **HIDDEN), 500, [1, 1, 1, 1]),
        (chunks(*range(1, 505), total=504, **HIDDEN), 0, [1] * 504),
        (chunks(*[None] * 504, total=504, **HIDDEN), 0, [1] * 504),
        (chunks(None, None, None, None, total=504, reasoning_tokens=500), 500, [1, 1, 1, 1]),
    ],
    ids=["total", "cumulative", "sent, cumulative", "sent, total", "as by SGLang"],
)
def test_reasoning_that_is_not_sent_is_in_no_chunk(answer: StreamReply, hidden: int, counts: list[int]) -> None:
    """500 tokens of reasoning and 4 others: with them in the first chunk ITL would be 0."""
    assert (answer.hidden_tokens, answer.list_chunk_tokens()) == (hidden, counts)


def test_reasoning_that_is_sent_as_such_counts() -> None:
    deltas = [{"reasoning_content": "a"}, {"content": "b"}]
    events = [{"choices": [{"delta": delta, "finish_reason": "stop"}]} for delta in deltas]
    last = {"choices": [], "usage": {"completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 2}}}
    answer = streamed(*events, last)
    assert (answer.hidden_tokens, answer.list_chunk_tokens()) == (0, [2, 2])


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_its_server_gave_up_is_a_failed_request(reason: str) -> None:
    with pytest.raises(RequestError, match=f"after 2 chunks with finish_reason {reason}") as error:
        streamed(event("a"), {"choices": [{"text": "b", "finish_reason": reason}]})
    assert error.value.kind == "aborted"


@pytest.mark.parametrize(
    ("usage", "field", "limit"),
    [
        ({"completion_tokens": -1}, "completion_tokens", 32),
        ({"completion_tokens": 33}, "completion_tokens", 32),
        ({"completion_tokens": 10**26}, "completion_tokens", 32),
        ({"completion_tokens": 533, "reasoning_tokens": 500}, "completion_tokens", 532),
        ({"completion_tokens": 5, "reasoning_tokens": 10**12}, "reasoning_tokens", 1 << 20),
        ({"prompt_tokens": -1}, "prompt_tokens", 32_968),
        ({"prompt_tokens": 10**16}, "prompt_tokens", 32_968),
        ({"prompt_tokens_details": {"cached_tokens": -99}}, "prompt_tokens_details.cached_tokens", 100),
        ({"prompt_tokens_details": {"cached_tokens": 101}}, "prompt_tokens_details.cached_tokens", 100),
    ],
)
def test_usage_is_held_against_what_was_asked(usage: dict[str, object], field: str, limit: int) -> None:
    """24 tokens after a prompt of 100; one token less is right."""
    answer = StreamReply(24, prompt_tokens=100)
    with pytest.raises(StreamError) as error:
        answer.receive_body(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n", 0.0)
    bad = error.value.bad
    assert (bad.fault, bad.field, bad.limit) == (Fault.USAGE, field, limit)
    assert answer.usage is None


@pytest.mark.parametrize("usage", [{"completion_tokens": 32}, {"prompt_tokens": 32_968}, {"prompt_tokens": None}, {}])
def test_usage_within_bounds_is_kept(usage: dict[str, object]) -> None:
    answer = StreamReply(24, prompt_tokens=100)
    answer.receive_body(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n", 0.0)
    assert answer.usage is not None


@pytest.mark.parametrize("ids", [[-1], [1 << 31], [1 << 70], [5, -5]])
def test_a_token_id_fits_into_32_bits(ids: list[int]) -> None:
    """Samples keep them so."""
    with pytest.raises(StreamError) as error:
        streamed(event("a", ids=ids))
    assert error.value.bad.fault == Fault.TOKEN_ID
    assert streamed(event("a", ids=[0, (1 << 31) - 1], end=True)).tokens == [0, (1 << 31) - 1]


def test_what_contradicts_the_request_counts_for_no_token() -> None:
    """The tokens of a failed request are in the rates of its run: those of the bad event are not."""
    for bad in ([-1] * 500, [1] * 1009):
        answer = StreamReply(4)
        answer.receive_body(b"data: " + json.dumps(event("a", ids=[1])).encode() + b"\n\n", 0.0)
        with pytest.raises(StreamError):
            answer.receive_body(b"data: " + json.dumps(event("a", ids=bad)).encode() + b"\n\n", 1.0)
        assert (answer.list_chunk_tokens(), answer.tokens) == ([1], [1])


def test_text_that_is_kept_is_bounded() -> None:
    """64 KiB and 1 KiB for each of 4 tokens; without keeping it, it takes no memory."""
    long = event("x" * (1 << 16) + "x" * (4 << 10))
    answer = StreamReply(4, keep=True)
    data = b"data: " + json.dumps(long).encode() + b"\n\n"
    answer.receive_body(data, 0.0)
    with pytest.raises(StreamError) as error:
        answer.receive_body(b"data: " + json.dumps(event("x")).encode() + b"\n\n", 0.0)
    assert error.value.bad.fault == Fault.TOO_MUCH_TEXT
    other = StreamReply(4)
    for _ in range(3):
        other.receive_body(data, 0.0)
    assert other.texts == []


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(200_000, True), (20_000, False)])
def test_an_event_may_be_as_much_longer_as_the_prompt_that_it_repeats(prompt_tokens: int, fits: bool) -> None:
    """200,000 ids of six digits are 1.4 MB, in reads of 64 KiB; its token has the time of the first of them."""
    echo = {"choices": [{"text": "a", "token_ids": [1], "prompt_token_ids": [128_000] * 200_000, "finish_reason": "x"}]}
    data = b"data: " + json.dumps(echo, separators=(",", ":")).encode() + b"\n\n"
    answer = StreamReply(4, prompt_tokens=prompt_tokens)

    def arrive() -> None:
        for number, start in enumerate(range(0, len(data), 1 << 16)):
            answer.receive_body(data[start : start + (1 << 16)], 10.0 + number)

    if fits:
        arrive()
        answer.receive_end()
        assert (answer.chunk_s, answer.list_chunk_tokens(), len(data) > 1 << 20) == ([10.0], [1], True)
    else:
        with pytest.raises(StreamError, match="is longer than 1,288,576 bytes"):
            arrive()
