"""Streams of events, cut anywhere, with any ends of lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.servers.events import MOST_EVENT, Events, Message, StreamError, error_in, read_completion

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(end=ENDS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_events_are_the_same_wherever_they_are_cut_and_however_lines_end(end: bytes, cuts: list[int]) -> None:
    """Three of them: two lines each, of which one is blank."""
    lines = [b"data: one", b"", b"data:  two", b"", b"data:three", b""]
    text = b"".join(line + end for line in lines)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    stream = Events()
    found = [event for a, b in itertools.pairwise(edges) for event in stream.feed(text[a:b])]
    assert found + stream.end() == [b"one", b" two", b"three"]


def test_what_is_no_completion_is_shown_with_what_is_wrong() -> None:
    with pytest.raises(StreamError) as error:
        read_completion(b'{"choices": 5}')
    said = "it sent what is no completion (Expected `array | null`, got `int` - at `$.choices`): "
    assert str(error.value) == said + '{"choices": 5}'


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no room"}}', "no room"),
        (b'{"error": "no room"}', "no room"),
        (b'{"detail": "no such model"}', "no such model"),
        (b'{"message": "no"}', "no"),
        (b'{"detail": {"message": "no"}, "message": "other"}', "no"),
        (b'{"error": {"code": 5}}', '{"error": {"code": 5}}'),
        (b"[1]", "[1]"),
        (b"<html>\n no", "<html> no"),
        (b'"' + b"x" * 301 + b'"', "x" * 300),
        (b"\xff\x00 it", "\ufffd\ufffd it"),
        (b"x" * 200, "x" * 200),
        (b"x" * 201, "x" * 200 + "…"),
        (b" " * 600 + b"x", "x"),
        (b" " * 599 + b"x", "x"),
    ],
)
def test_an_error_is_found_where_servers_put_it(body: bytes, said: str) -> None:
    """Else the beginning of what came is shown, on one line and inert."""
    assert error_in(body) == said


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (b'{"error": {"message": "dead"}}', "it broke off with an error: dead"),
        (b'{"object": "error", "message": "dead"}', "it broke off with an error: dead"),
        (b"no", "it sent what is no completion ("),
    ],
)
def test_an_error_in_the_stream_is_told(event: bytes, said: str) -> None:
    with pytest.raises(StreamError) as error:
        read_completion(event)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        (b"data: [DONE]", [b"[DONE]"]),
        (b" \n", []),
        (b": kept alive", []),
        (b"event: x\ndata:[DONE]\n", [b"[DONE]"]),
        (b"data: {", "its stream ended in the middle of an event: data: {"),
    ],
)
def test_what_ends_a_stream_needs_no_blank_line_behind_it(rest: bytes, found: list[bytes] | str) -> None:
    stream = Events()
    assert stream.feed(rest) == []
    if isinstance(found, str):
        with pytest.raises(StreamError) as error:
            stream.end()
        assert str(error.value) == found
    else:
        assert stream.end() == found
        assert stream.end() == []


def test_an_event_of_several_lines_is_their_data_alone() -> None:
    """A comment and an event without data are none."""
    text = b": hi\n\nevent: x\ndata: a\nid: 1\ndata:b\n\nid: 2\n\ndata: c\n\n"
    assert Events().feed(text) == [b"a\nb", b"c"]


def test_what_is_kept_of_an_unfinished_event_is_bounded() -> None:
    """A MiB; a whole one may be longer."""
    stream = Events()
    assert stream.feed(b"x" * MOST_EVENT) == []
    with pytest.raises(StreamError, match=r"^one event of its stream is longer than 1,048,576 bytes$"):
        stream.feed(b"x")
    assert len(Events().feed(b"data: " + b"x" * MOST_EVENT + b"\n\n")[0]) == MOST_EVENT


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({}, ""),
        ({"content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning_content": "c", "reasoning": "b", "content": "a"}, "ca"),
    ],
)
def test_reasoning_is_generated_text_too(said: dict[str, str], text: str) -> None:
    assert Message(**said).text == text


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
def test_new_text_is_of_completions_and_of_chats(choice: str, text: str) -> None:
    (found,) = read_completion(f'{{"choices": [{choice}]}}'.encode()).choices or []
    assert found.new_text == text
