"""Streams of events, cut anywhere, with any ends of lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.servers.events import Events, StreamError, read_completion

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
