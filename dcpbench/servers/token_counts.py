"""Determine the number of tokens in each chunk of a stream, from the servers' reports.

    token ids   the chunk lists the ids of its tokens (`return_token_ids`)
    cumulative  `usage` of each chunk counts all tokens so far (`continuous_usage_stats`)
    deltas      `usage` of each chunk counts its own tokens
    total       one `usage` counts all tokens; each chunk gets an equal share, at least one. More chunks than requested tokens
                hold parts of tokens, as from a proxy that cuts texts: the first, the last and evenly spaced ones get one each
    chunks      no count is reported; each chunk counts as one token

Servers fill `usage` of a chunk in different ways, so it is used only if it fits the chunks that arrived: text cannot
arrive with a count of 0, and most chunks with text have to raise a cumulative count.
"""

from __future__ import annotations

import dataclasses
import enum
from array import array
from typing import TYPE_CHECKING

from dcpbench.servers.events import BadStream, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.servers.events import Usage

MIN_PROMPT_SLACK = 1 << 15  # tokens that a server may add to a prompt: a system prompt, a chat template
MAX_PROMPT = (1 << 31) - 1  # tokens of a prompt of unknown length: samples keep them as int32
MIN_OUTPUT_SLACK = 8  # tokens that a usage may count beyond the request: speculative decoding may overshoot
OUTPUT_SLACK_SHARE = 0.05  # or this share of the request, whichever is more
MAX_HIDDEN = 1 << 20  # reasoning tokens that are counted and not sent
SPARE_CHUNKS = 1000  # chunks beyond twice the tokens that the request allows, after which a stream never ends
MIN_TEXT, TEXT_OF_TOKEN = 1 << 16, 1 << 10  # characters of an answer, and for each of its tokens
BYTES_OF_ID = 12  # of one id in JSON, with the comma and the space after it


class Counting(enum.Enum):
    """Sources of the number of tokens in each chunk; see the module."""

    IDS = "token ids"
    CUMULATIVE = "cumulative"
    DELTAS = "deltas"
    TOTAL = "total"
    CHUNKS = "chunks"


class Limits:
    """The most that a server can rightly report about one request."""

    __slots__ = ("chunks", "echo_bytes", "output_tokens", "prompt_tokens", "text", "usage_output", "usage_prompt")

    def __init__(self, output_tokens: int, prompt_tokens: int = 0) -> None:
        """Take the tokens that the request asks for, and those of its prompt; 0 if not known."""
        self.output_tokens, self.prompt_tokens = output_tokens, prompt_tokens
        self.chunks = 2 * output_tokens + SPARE_CHUNKS  # chunks with output, and token ids
        self.usage_output = output_tokens + max(MIN_OUTPUT_SLACK, int(OUTPUT_SLACK_SHARE * output_tokens))
        self.usage_prompt = 2 * prompt_tokens + MIN_PROMPT_SLACK if prompt_tokens else MAX_PROMPT
        self.text = MIN_TEXT + TEXT_OF_TOKEN * output_tokens  # characters of the answer
        self.echo_bytes = BYTES_OF_ID * prompt_tokens  # by which an event may be longer as it repeats the prompt's ids

    def find_excess(self, usage: Usage) -> BadStream | None:
        """Return the fault of the first field of a `usage` that is out of range; None if all are in range."""
        prompt, reasoning = usage.prompt_tokens, usage.reasoning
        for field, value, limit in (
            ("prompt_tokens", prompt, self.usage_prompt),
            ("reasoning_tokens", reasoning, MAX_HIDDEN),
            ("completion_tokens", usage.completion_tokens, self.usage_output + reasoning),
            (
                "prompt_tokens_details.cached_tokens",
                usage.cached_tokens,
                max(prompt or 0, self.prompt_tokens or self.usage_prompt),
            ),
        ):
            if value is not None and not 0 <= value <= limit:
                requested = self.prompt_tokens if field.startswith("prompt") else self.output_tokens
                return BadStream(fault=Fault.USAGE, field=field, value=value, limit=limit, requested=requested)
        return None


NO_USAGE = -1


class Chunks:
    """Events of a stream that bring output, or count more of it, in arrays that take 21 bytes for each."""

    __slots__ = ("has_output", "ids", "time_s", "usage")

    def __init__(self) -> None:
        self.time_s = array("d")
        self.has_output = bytearray()  # 1: text or a part of a tool call
        self.ids = array("i")  # the number of token ids
        self.usage = array("q")  # completion_tokens of the `usage` in the same event, or NO_USAGE

    def __len__(self) -> int:
        return len(self.time_s)

    def add_chunk(self, time_s: float, has_output: bool, ids: int, usage: int | None) -> None:
        """Add an event."""
        self.time_s.append(time_s)
        self.has_output.append(has_output)
        self.ids.append(ids)
        self.usage.append(NO_USAGE if usage is None else usage)

    def find_shown(self) -> list[int]:
        """Return the places of the events with output or token ids."""
        return [i for i, (text, ids) in enumerate(zip(self.has_output, self.ids, strict=True)) if text or ids]


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """The chunks of a stream that brought tokens, and how many each."""

    by: Counting
    time_s: array[float]
    tokens: array[int]


def count_tokens(
    chunks: Chunks, total: int | None = None, *, hidden: int = 0, requested: int = 0, full_length: bool = False
) -> Counts:
    """Return the tokens of each chunk.

    `total` is the last count of all tokens that the server sent. `hidden` tokens are in its counts and in no chunk.
    `full_length`: the answer ended because it has all `requested` tokens.
    """
    places = chunks.find_shown()
    usages = [chunks.usage[i] for i in places]
    total = None if total is None else max(total - hidden, 0)
    if any(chunks.ids):
        by, found = Counting.IDS, _fill_ids([chunks.ids[i] for i in places], total)
    elif _has_deltas(usages, total, requested, full_length=full_length):
        by, found = Counting.DELTAS, usages
    elif (increases := _read_cumulative(chunks, hidden)) is not None:
        by, found, places = Counting.CUMULATIVE, increases, list(range(len(chunks)))
    elif total:
        in_parts = 0 < requested < len(places)
        by, found = Counting.TOTAL, _spread_tokens(total if in_parts else max(total, len(places)), len(places))
    else:
        by, found = Counting.CHUNKS, [1] * len(places)
    kept = [(i, tokens) for i, tokens in zip(places, found, strict=True) if tokens]
    return Counts(by, array("d", [chunks.time_s[i] for i, _ in kept]), array("i", [tokens for _, tokens in kept]))


def count_hidden(chunks: Chunks, total: int | None, reasoning: int) -> int:
    """Return how many tokens of reasoning no chunk showed: all or none.

    Servers report reasoning tokens whether or not they send them. They were sent if a count of all tokens starts below
    them, or if there are more chunks than other tokens.
    """
    if not reasoning or total is None or not (places := chunks.find_shown()):
        return 0
    first = chunks.usage[places[0]]
    were_sent = first <= reasoning if first > 0 else len(places) > total - reasoning
    return 0 if were_sent else reasoning


def _fill_ids(found: list[int], total: int | None) -> list[int]:
    """Return the number of ids of each chunk. Chunks without ids share the tokens that are left."""
    missing = [i for i, count in enumerate(found) if not count]
    left = len(missing) if total is None else max(total - sum(found), 0)
    for i, share in zip(missing, _split_evenly(left, len(missing)), strict=True):
        found[i] = share
    return found


def _read_cumulative(chunks: Chunks, hidden: int) -> list[int] | None:
    """Return the increase of a cumulative count by each chunk, or None if the counts do not fit the chunks."""
    before, found, raised = hidden, [], 0
    for usage, has_output in zip(chunks.usage, chunks.has_output, strict=True):
        if usage < before or (has_output and usage <= hidden):
            return None
        found.append(usage - before)
        raised += bool(has_output and usage > before)
        before = usage
    return found if found and 2 * raised > sum(chunks.has_output) else None


def _has_deltas(usages: Sequence[int], total: int | None, requested: int, *, full_length: bool) -> bool:
    """Return whether each chunk counts its own tokens.

    The sum has to be what the answer can have, and the last count has to be too small for a count of all tokens: smaller
    than the number of chunks, or than the `requested` tokens of an answer that has all of them.
    """
    if not usages or min(usages) <= 0:
        return False
    last, whole = usages[-1], sum(usages)
    if total is not None and total != last:
        return whole == total
    if full_length and requested:
        return whole == requested != last
    return last < len(usages) and whole <= Limits(requested).usage_output


def _spread_tokens(tokens: int, chunks: int) -> list[int]:
    """Return how many of the tokens each chunk gets."""
    if tokens >= chunks:
        return _split_evenly(tokens, chunks)
    found = [0] * chunks
    for number in range(tokens):
        found[number * (chunks - 1) // max(tokens - 1, 1)] = 1
    return found


def _split_evenly(total: int, parts: int) -> list[int]:
    """Return equal shares of `total`. The last parts get the remainder, because a first chunk mostly has one token."""
    if not parts:
        return []
    each, more = divmod(total, parts)
    return [each + (i >= parts - more) for i in range(parts)]
