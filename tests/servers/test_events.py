"""Test event streams that are cut at any byte and have any line ends."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.servers.events import (
    MAX_EVENT,
    BadStream,
    Events,
    Fault,
    Message,
    Part,
    StreamError,
    format_bad_stream,
    read_completion,
    read_error_message,
)

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(end=ENDS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_events_do_not_depend_on_cuts_and_line_ends(end: bytes, cuts: list[int]) -> None:
    """The stream has three events of two lines each, of which one is blank."""
    lines = [b"data: one", b"", b"data:  two", b"", b"data:three", b""]
    text = b"".join(line + end for line in lines)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    stream = Events()
    found = [event for a, b in itertools.pairwise(edges) for event in stream.parse_data(text[a:b], 0.0)]
    assert [event for event, _ in found + stream.finish_stream()] == [b"one", b" two", b"three"]


def test_event_has_the_arrival_time_of_its_first_byte() -> None:
    """A long event, such as one that echoes the prompt, arrives in many reads; blank lines start no event."""
    stream = Events()
    assert stream.parse_data(b"data: a", 1.0) == []
    assert stream.parse_data(b"b", 2.0) == []
    assert stream.parse_data(b"c\n\ndata: x\n\n\n", 3.0) == [(b"abc", 1.0), (b"x", 3.0)]
    assert stream.parse_data(b"\n", 4.0) == []
    assert stream.parse_data(b"data: y\n", 5.0) == []
    assert stream.parse_data(b"\ndata: [DONE]", 6.0) == [(b"y", 5.0)]
    assert stream.finish_stream() == [(b"[DONE]", 6.0)]


@pytest.mark.parametrize("early", [b": on it\n", b": on it", b": on it\n: still\n", b"\xef\xbb\xbf"])
def test_comment_before_an_event_does_not_set_its_time(early: bytes) -> None:
    """A comment may come seconds before its event, without a blank line."""
    stream = Events()
    assert stream.parse_data(early, 1.0) == []
    rest = b"data: a\n\n" if early.endswith((b"\n", b"\xbf")) else b"\ndata: a\n\n"
    assert stream.parse_data(rest + b": x\nda", 4.0) == [(b"a", 4.0)]
    assert stream.parse_data(b"ta: b\n\n", 5.0) == [(b"b", 4.0)]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'event: error\ndata: {"message": "out of memory", "code": 500}', "out of memory"),
        (b"event: error\n: worker lost", "worker lost"),
        (b"data: stopped\nevent:error", "stopped"),
    ],
)
def test_event_of_the_type_error_fails_the_request(event: bytes, message: str) -> None:
    ((_, _), (data, _)) = Events().parse_data(b"data: {}\n\n" + event + b"\n\n", 1.0)
    with pytest.raises(StreamError) as error:
        read_completion(data)
    assert (error.value.bad.fault, error.value.bad.quote) == (Fault.SERVER_ERROR, message)


def test_bytes_of_a_long_event_are_searched_once() -> None:
    """If 16 MB in reads of 64 KiB were searched from the start each time, 2 GB would be searched."""
    stream = Events(1 << 25)
    began = time.process_time()
    for _ in range(256):
        assert stream.parse_data(b"x" * (1 << 16), 0.0) == []
    assert stream.parse_data(b"\n\ndata: a\n\n", 1.0) == [(b"a", 1.0)]
    assert time.process_time() - began < 1.0


def test_invalid_completion_raises_an_error_that_quotes_it() -> None:
    with pytest.raises(StreamError) as error:
        read_completion(b'{"choices": 5}')
    message = "an event is not a completion (Expected `array | null`, got `int` - at `$.choices`): "
    assert str(error.value) == message + '{"choices": 5}'
    assert error.value.bad.fault == Fault.NOT_A_COMPLETION


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no room"}}', "no room"),
        (b'{"error": "no room"}', "no room"),
        (b'{"detail": "no such model"}', "no such model"),
        (b'{"message": "no"}', "no"),
        (b'{"detail": {"message": "no"}, "message": "other"}', "no"),
        (b'{"error": {"code": 5}}', '{"error": {"code": 5}}'),
        (b"[1]", "[1]"),
        (b"<html>\n no", "<html> no"),
        (b'"' + b"x" * 301 + b'"', "x" * 299 + "…"),
        (b'{"error": "a\\u001b[2J\\nb"}', "a\\x1b[2J b"),
        (b"\xff\x00 it", "\ufffd\ufffd it"),
        (b"x" * 200, "x" * 200),
        (b"x" * 201, "x" * 200 + "…"),
        (b" " * 600 + b"x", "x"),
        (b" " * 599 + b"x", "x"),
    ],
)
def test_error_message_is_read_from_known_fields(body: bytes, message: str) -> None:
    """Without a known field the start of the body is quoted on one line, with control characters escaped."""
    assert read_error_message(body) == message


@pytest.mark.parametrize(
    ("event", "fault", "start"),
    [
        (b'{"error": {"message": "dead"}}', Fault.SERVER_ERROR, "the server broke off with an error: dead"),
        (b'{"object": "error", "message": "dead"}', Fault.SERVER_ERROR, "the server broke off with an error: dead"),
        (b"no", Fault.NOT_A_COMPLETION, "an event is not a completion ("),
    ],
)
def test_error_event_in_a_stream_raises_request_error(event: bytes, fault: Fault, start: str) -> None:
    with pytest.raises(StreamError) as error:
        read_completion(event)
    assert error.value.bad.fault == fault
    assert str(error.value).startswith(start)


def test_huge_numbers_of_a_stream_are_printed() -> None:
    """Python refuses to convert integers of more than 4,300 digits to text."""
    large = BadStream(fault=Fault.USAGE, field="completion_tokens", value=10**30, limit=32, requested=24)
    assert format_bad_stream(large) == (
        "usage.completion_tokens is about 10^30, which is not between 0 and 32 for a request of 24 tokens"
    )
    below = BadStream(fault=Fault.TOKEN_ID, value=-(10**20), limit=9)
    assert format_bad_stream(below) == "the token id -about 10^20 is not between 0 and 9"


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        (b"data: [DONE]", [b"[DONE]"]),
        (b" \n", []),
        (b": kept alive", []),
        (b"event: x\ndata:[DONE]\n", [b"[DONE]"]),
        (b"data: {", "the stream ended in the middle of an event: data: {"),
    ],
)
def test_end_of_stream_needs_no_blank_line(rest: bytes, found: list[bytes] | str) -> None:
    stream = Events()
    assert stream.parse_data(rest, 1.0) == []
    if isinstance(found, str):
        with pytest.raises(StreamError) as error:
            stream.finish_stream()
        assert str(error.value) == found
    else:
        assert stream.finish_stream() == [(event, 1.0) for event in found]
        assert stream.finish_stream() == []


def test_event_of_several_lines_contains_only_their_data() -> None:
    """Comments and events without data are skipped."""
    text = b": hi\n\nevent: x\ndata: a\nid: 1\ndata:b\n\nid: 2\n\ndata: c\n\n"
    assert [event for event, _ in Events().parse_data(text, 0.0)] == [b"a\nb", b"c"]


def test_size_of_an_unfinished_event_is_limited() -> None:
    """The limit is 1 MiB; an event that a single read completes may be longer."""
    stream = Events()
    assert stream.parse_data(b"x" * MAX_EVENT, 0.0) == []
    with pytest.raises(StreamError, match=r"^one event of the stream is longer than 1,048,576 bytes$"):
        stream.parse_data(b"x", 0.0)
    assert len(Events().parse_data(b"data: " + b"x" * MAX_EVENT + b"\n\n", 0.0)[0][0]) == MAX_EVENT


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, ""),
        ({"content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning_content": "c", "reasoning": "b", "content": "a"}, "ca"),
        ({"content": [Part("a"), Part(), Part("b")]}, "ab"),
    ],
)
def test_reasoning_is_part_of_the_generated_text(message: dict[str, Any], text: str) -> None:
    assert Message(**message).text == text


@pytest.mark.parametrize(
    ("choice", "has_output"),
    [
        ('{"delta": {"role": "assistant", "content": ""}}', False),
        ('{"delta": {"tool_calls": null}}', False),
        ('{"delta": {"tool_calls": []}}', False),
        ('{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}', True),
        ('{"delta": {"content": [{"type": "text", "text": "a"}]}}', True),
        ('{"delta": null, "finish_reason": "stop"}', False),
        ('{"text": " "}', True),
    ],
)
def test_chunk_has_output_if_it_has_text_or_part_of_a_tool_call(choice: str, has_output: bool) -> None:
    (found,) = read_completion(f'{{"choices": [{choice}]}}'.encode()).choices or []
    assert found.has_output is has_output


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ('{"text": "a"}', "a"),
        ('{"text": null}', ""),
        ('{"delta": {"content": "d"}, "text": "a"}', "d"),
        ('{"message": {"content": "m"}, "text": "a"}', "m"),
        ('{"delta": {}, "message": {"content": "m"}}', ""),
    ],
)
def test_text_is_read_from_completions_and_chats(choice: str, text: str) -> None:
    (found,) = read_completion(f'{{"choices": [{choice}]}}'.encode()).choices or []
    assert found.new_text == text
