"""Test how many tokens each chunk of a stream contains, according to the server."""

from __future__ import annotations

import json

import pytest

from dcpbench.servers.answers import BY_IDS, BY_USAGE, StreamReply
from dcpbench.servers.client import RequestError
from dcpbench.servers.events import Fault, StreamError
from dcpbench.servers.token_counts import SPARE_CHUNKS, Counting


def make_event(
    text: str, *, usage: int | None = None, ids: list[int] | None = None, end: bool = False
) -> dict[str, object]:
    """Return one event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": "length" if end else None}
    body: dict[str, object] = {"choices": [choice | ({"token_ids": ids} if ids is not None else {})]}
    return body if usage is None else body | {"usage": {"completion_tokens": usage, "prompt_tokens": 3}}


def read_stream(*events: dict[str, object], requested: int = 4) -> StreamReply:
    """Return the answer to a stream of these events, one per second."""
    answer = StreamReply(requested)
    answer.receive_head(200, {b"content-type": b"text/event-stream"})
    for second, each in enumerate(events):
        answer.receive_body(b"data: " + json.dumps(each).encode() + b"\n\n", float(second))
    answer.receive_body(b"data: [DONE]\n\n", float(len(events)))
    answer.receive_end()
    return answer


LAST = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 3}}


@pytest.mark.parametrize(("chunks", "ends"), [(2 * 4 + SPARE_CHUNKS, True), (2 * 4 + SPARE_CHUNKS + 1, False)])
def test_number_of_chunks_is_limited_by_requested_tokens(chunks: int, ends: bool) -> None:
    """For four requested tokens the limit is twice as many chunks plus a constant."""
    events = [make_event("a", ids=[1]) for _ in range(chunks)]
    if ends:
        assert len(read_stream(*events, make_event("", end=True)).chunk_s) == chunks
    else:
        with pytest.raises(StreamError, match="more than 1,008 chunks or token ids for 4 tokens") as error:
            read_stream(*events)
        assert error.value.bad.fault == Fault.TOO_MANY_TOKENS


@pytest.mark.parametrize(
    ("events", "counts", "by"),
    [
        ([make_event("a"), make_event("b"), make_event("c"), make_event("d", end=True), LAST], [1, 1, 1, 1], BY_USAGE),
        # `transformers serve` sends usage in the last chunk, which has no text
        (
            [make_event("a"), make_event("b"), make_event("c"), make_event("d"), make_event("", usage=4, end=True)],
            [1, 1, 1, 1],
            BY_USAGE,
        ),
        ([make_event("a"), make_event("b c d", usage=4, end=True)], [2, 2], BY_USAGE),
        ([make_event("a"), make_event("b c d", end=True), LAST], [2, 2], BY_USAGE),
        ([make_event("a"), make_event("b"), make_event("c d", end=True), LAST], [1, 1, 2], BY_USAGE),
        ([make_event("a", usage=1), make_event("b c d", usage=4, end=True)], [1, 3], BY_USAGE),
        ([make_event("a", ids=[1]), make_event("b c d", ids=[2, 3, 4], end=True), LAST], [1, 3], BY_IDS),
    ],
)
def test_tokens_of_chunks_add_up_to_the_server_count(
    events: list[dict[str, object]], counts: list[int], by: str
) -> None:
    """The server counts four tokens; they are spread evenly over chunks without counts."""
    answer = read_stream(*events)
    assert answer.list_chunk_tokens() == counts
    assert answer.counted_by == by
    assert answer.chunk_s == [float(n) for n in range(len(counts))]


@pytest.mark.parametrize(
    ("status", "kind", "pieces", "message"),
    [
        (200, b"text/html", [b"<html>", b"Sign in"], "text/html instead of a stream: <html>Sign in"),
        (200, b"text/html", [b"x" * 300, b"y" * 300, b"z"], "text/html instead of a stream: xxx"),
        (500, b"text/plain", [b"x" * 600, b" told at its end"], "told at its end"),
    ],
    ids=["short", "long enough", "error"],
)
def test_answer_that_is_not_a_stream_is_read_up_to_a_limit(
    status: int, kind: bytes, pieces: list[bytes], message: str
) -> None:
    """The limit is 512 bytes for a page; an error is read whole because its message may come last."""
    answer = StreamReply(4)
    answer.receive_head(status, {b"content-type": kind})

    def come() -> None:
        for piece in pieces:
            answer.receive_body(piece, 0.0)
        answer.receive_end()

    with pytest.raises(RequestError) as error:
        come()
    data = answer._body
    assert len(data) == (600 if len(pieces) == 3 else sum(map(len, pieces))), (
        "the third piece of the long page is not read"
    )
    assert message in error.value.sentence or status == 500


def test_first_of_several_choices_is_used() -> None:
    choices = [{"index": i, "text": text, "token_ids": [i], "finish_reason": "length"} for i, text in enumerate("ab")]
    answer = read_stream({"choices": choices})
    assert (answer.tokens, answer.finish_reason) == ([0], "length")


@pytest.mark.parametrize(
    ("requested", "unknown", "total", "counts"),
    [(4, 3, 3, [1, 1, 1]), (9, 3, 8, [2, 3, 3]), (4, 2, 1, [1, 1]), (4, 1, None, [1])],
)
def test_tokens_without_counts_are_spread_evenly_over_chunks(
    requested: int, unknown: int, total: int | None, counts: list[int]
) -> None:
    """The remainder goes to the last chunks, and each chunk has at least one token."""
    answer = StreamReply(requested)
    answer.receive_head(200, {})
    for n in range(unknown):
        answer.receive_body(b"data: " + json.dumps(make_event("x", end=n + 1 == unknown)).encode() + b"\n\n", float(n))
    if total is not None:
        answer.receive_body(
            b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": total}}).encode() + b"\n\n", 9.0
        )
    answer.receive_end()
    assert answer.list_chunk_tokens() == counts


def test_stream_without_done_or_finish_reason_was_cut_off() -> None:
    """A stream that ends properly without any token fails with "no tokens"."""
    answer = StreamReply(4)
    answer.receive_head(200, {b"content-type": b"text/event-stream; charset=utf-8"})
    answer.receive_body(b"data: " + json.dumps(make_event("a")).encode() + b"\n\n", 1.0)
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


def read_chunks(
    *usages: int | None, texts: str = "", total: int | None = None, requested: int = 0, **about: object
) -> StreamReply:
    """Return the answer to a stream with a usage per chunk, then `total` in an event; "-" is a chunk without text."""
    events = [
        make_event("" if texts[i : i + 1] == "-" else "a", usage=usage, end=i + 1 == len(usages))
        for i, usage in enumerate(usages)
    ]
    last = {"choices": [], "usage": {"completion_tokens": total, "prompt_tokens": 3} | about}
    return read_stream(*events, *([last] if total is not None else []), requested=requested or max(len(usages), 4))


@pytest.mark.parametrize(
    ("answer", "by", "counts"),
    [
        (read_chunks(1, 2, 3, 4), Counting.CUMULATIVE, [1, 1, 1, 1]),
        (read_chunks(1, 3, 4), Counting.CUMULATIVE, [1, 2, 1]),
        (read_chunks(1, 2, 4, texts="a-a"), Counting.CUMULATIVE, [1, 1, 2]),  # the text of a token is incomplete
        (read_chunks(1, 2, 3, 4, 4), Counting.CUMULATIVE, [1, 1, 1, 1]),  # the last text was sent late
        (read_chunks(4), Counting.CUMULATIVE, [4]),
        (read_chunks(0, 0, 0, 4), Counting.TOTAL, [1, 1, 1, 1]),
        (read_chunks(0, None, None, None, total=4), Counting.TOTAL, [1, 1, 1, 1]),
        (read_chunks(4, 4, 4, 4), Counting.TOTAL, [1, 1, 1, 1]),
        (read_chunks(4, 4), Counting.TOTAL, [2, 2]),
        (read_chunks(0, 1, 2, 3, total=4), Counting.TOTAL, [1, 1, 1, 1]),  # counts lag behind
        (read_chunks(1, 1, 1, 1), Counting.DELTAS, [1, 1, 1, 1]),
        (read_chunks(1, 2, 1), Counting.DELTAS, [1, 2, 1]),
        (read_chunks(1, 1, 2, total=4), Counting.DELTAS, [1, 1, 2]),
        (read_chunks(1, 1, 1, 1, total=8), Counting.TOTAL, [2, 2, 2, 2]),
        (read_chunks(*[None] * 7, total=4, requested=4), Counting.TOTAL, [1, 1, 1, 1]),  # chunks of parts of tokens
        (read_chunks(*[None] * 7, total=1, requested=4), Counting.TOTAL, [1]),
        (read_chunks(*[None] * 7, requested=4), Counting.CHUNKS, [1] * 7),  # the server may ignore max_tokens
        (read_chunks(0, 0, 0, 0), Counting.CHUNKS, [1, 1, 1, 1]),
        (read_chunks(None, None, None, None), Counting.CHUNKS, [1, 1, 1, 1]),
    ],
)
def test_usage_of_chunks_is_used_if_consistent(answer: StreamReply, by: Counting, counts: list[int]) -> None:
    """Servers fill `usage` of a chunk with cumulative counts, deltas, the total or zeros."""
    assert (answer.counts.by, answer.list_chunk_tokens()) == (by, counts)


def test_parts_of_tokens_keep_the_times_of_the_first_and_the_last_chunk() -> None:
    """A proxy cuts three tokens into six chunks, at 0 to 5 s."""
    assert read_chunks(*[None] * 6, total=3, requested=3).chunk_s == [0.0, 2.0, 5.0]


def test_first_chunk_sets_ttft_whatever_its_usage() -> None:
    for answer in (read_chunks(0, 0, 0, 4), read_chunks(0, None, None, None, total=4), read_chunks(4, 4, 4, 4)):
        assert answer.chunk_s == [0.0, 1.0, 2.0, 3.0]


HIDDEN = {"completion_tokens_details": {"reasoning_tokens": 500}}


@pytest.mark.parametrize(
    ("answer", "hidden", "counts"),
    [
        (read_chunks(None, None, None, None, total=504, **HIDDEN), 500, [1, 1, 1, 1]),
        (read_chunks(501, 502, 503, 504, total=504, requested=600, **HIDDEN), 500, [1, 1, 1, 1]),
        (read_chunks(*range(1, 505), total=504, **HIDDEN), 0, [1] * 504),
        (read_chunks(*[None] * 504, total=504, **HIDDEN), 0, [1] * 504),
        (read_chunks(None, None, None, None, total=504, reasoning_tokens=500), 500, [1, 1, 1, 1]),
    ],
    ids=["total", "cumulative", "sent, cumulative", "sent, total", "SGLang"],
)
def test_hidden_reasoning_tokens_belong_to_no_chunk(answer: StreamReply, hidden: int, counts: list[int]) -> None:
    """The answer has 500 reasoning tokens and 4 others; ITL would be 0 if the first chunk contained them all."""
    assert (answer.hidden_tokens, answer.list_chunk_tokens()) == (hidden, counts)


def test_streamed_reasoning_tokens_are_counted() -> None:
    deltas = [{"reasoning_content": "a"}, {"content": "b"}]
    events = [{"choices": [{"delta": delta, "finish_reason": "stop"}]} for delta in deltas]
    last = {"choices": [], "usage": {"completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 2}}}
    answer = read_stream(*events, last)
    assert (answer.hidden_tokens, answer.list_chunk_tokens()) == (0, [2, 2])


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_answer_aborted_by_the_server_is_a_failed_request(reason: str) -> None:
    with pytest.raises(RequestError, match=f"after 2 chunks with finish_reason {reason}") as error:
        read_stream(make_event("a"), {"choices": [{"text": "b", "finish_reason": reason}]})
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
def test_usage_beyond_the_request_raises_stream_error(usage: dict[str, object], field: str, limit: int) -> None:
    """The request asks for 24 tokens after a prompt of 100."""
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
def test_token_id_outside_int32_raises_stream_error(ids: list[int]) -> None:
    """Samples store token ids as int32."""
    with pytest.raises(StreamError) as error:
        read_stream(make_event("a", ids=ids))
    assert error.value.bad.fault == Fault.TOKEN_ID
    assert read_stream(make_event("a", ids=[0, (1 << 31) - 1], end=True)).tokens == [0, (1 << 31) - 1]


def test_tokens_of_an_invalid_event_are_not_counted() -> None:
    """Rates of a run include the tokens of failed requests, except those of the invalid event."""
    for bad in ([-1] * 500, [1] * 1009):
        answer = StreamReply(4)
        answer.receive_body(b"data: " + json.dumps(make_event("a", ids=[1])).encode() + b"\n\n", 0.0)
        with pytest.raises(StreamError):
            answer.receive_body(b"data: " + json.dumps(make_event("a", ids=bad)).encode() + b"\n\n", 1.0)
        assert (answer.list_chunk_tokens(), answer.tokens) == ([1], [1])


def test_size_of_kept_text_is_limited() -> None:
    """The limit is 64 KiB plus 1 KiB for each of 4 tokens; without `keep` no text is stored."""
    long = make_event("x" * (1 << 16) + "x" * (4 << 10))
    answer = StreamReply(4, keep=True)
    data = b"data: " + json.dumps(long).encode() + b"\n\n"
    answer.receive_body(data, 0.0)
    with pytest.raises(StreamError) as error:
        answer.receive_body(b"data: " + json.dumps(make_event("x")).encode() + b"\n\n", 0.0)
    assert error.value.bad.fault == Fault.TOO_MUCH_TEXT
    other = StreamReply(4)
    for _ in range(3):
        other.receive_body(data, 0.0)
    assert other.texts == []


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(200_000, True), (20_000, False)])
def test_event_size_limit_grows_with_the_echoed_prompt(prompt_tokens: int, fits: bool) -> None:
    """200,000 ids of six digits are 1.4 MB in reads of 64 KiB; the token gets the time of the first read."""
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
