"""Decide how many tokens each chunk of a stream brought, from what servers report about them.

    token ids   the chunk lists the ids of its tokens (`return_token_ids`)
    cumulative  `usage` of each chunk counts all tokens so far (`continuous_usage_stats`)
    deltas      `usage` of each chunk counts its own tokens
    total       one `usage` counts all tokens; each chunk gets an equal share
    chunks      nothing is reported; each chunk counts as one token

Servers fill `usage` of a chunk in different ways, so it is believed only if it fits the chunks that arrived: text cannot
arrive with a count of 0, and most chunks with text have to raise a cumulative count.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from dcpbench.servers.events import BadStream, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.servers.events import Usage

MIN_PROMPT_SLACK = 1 << 15  # tokens that a server may add to a prompt: a system prompt, a chat template
MIN_OUTPUT_SLACK = 8  # tokens that a usage may count beyond the request: speculative decoding may overshoot
OUTPUT_SLACK_SHARE = 0.05  # or this share of the request, whichever is more
MAX_HIDDEN = 1 << 20  # reasoning tokens that are counted and not sent
SPARE_CHUNKS = 1000  # chunks beyond twice the tokens that the request asked for, after which a stream never ends
MAX_TOKEN_ID = (1 << 31) - 1  # samples keep ids as int32
MIN_TEXT, TEXT_OF_TOKEN = 1 << 16, 1 << 10  # characters of an answer, and for each of its tokens
BYTES_OF_ID = 12  # of one id in JSON, with the comma and the space after it


class Counting(enum.Enum):
    """How the tokens of each chunk are known; see the module."""

    IDS = "token ids"
    CUMULATIVE = "cumulative"
    DELTAS = "deltas"
    TOTAL = "total"
    CHUNKS = "chunks"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The most that a server can rightly report about one request."""

    output_tokens: int  # that the request asks for
    prompt_tokens: int = 0  # of the prompt as the client made it; 0 if not known

    @property
    def chunks(self) -> int:
        """Chunks with output."""
        return 2 * self.output_tokens + SPARE_CHUNKS

    @property
    def usage_output(self) -> int:
        """Tokens that `usage` counts, without hidden reasoning."""
        return self.output_tokens + max(MIN_OUTPUT_SLACK, int(OUTPUT_SLACK_SHARE * self.output_tokens))

    @property
    def usage_prompt(self) -> int:
        """Tokens of the prompt that `usage` counts."""
        return 2 * self.prompt_tokens + MIN_PROMPT_SLACK

    @property
    def text(self) -> int:
        """Characters of the answer."""
        return MIN_TEXT + TEXT_OF_TOKEN * self.output_tokens

    @property
    def echo_bytes(self) -> int:
        """Bytes by which an event may be longer because it repeats the ids of the prompt."""
        return BYTES_OF_ID * self.prompt_tokens

    def find_excess(self, usage: Usage) -> BadStream | None:
        """Return what is wrong with the first field of a `usage` that is out of range; None if all are in range."""
        prompt = self.usage_prompt
        cached = max(usage.prompt_tokens or 0, self.prompt_tokens or prompt)
        checks = (
            ("prompt_tokens", usage.prompt_tokens, prompt),
            ("prompt_tokens_details.cached_tokens", usage.cached, cached),
            ("reasoning_tokens", usage.reasoning, MAX_HIDDEN),
            ("completion_tokens", usage.completion_tokens, self.usage_output + usage.reasoning),
        )
        for name, value, limit in checks:
            if value is not None and not 0 <= value <= limit:
                asked = self.prompt_tokens if name.startswith("prompt") else self.output_tokens
                return BadStream(fault=Fault.USAGE, field=name, value=value, limit=limit, asked=asked)
        return None


@dataclasses.dataclass(slots=True)
class Chunk:
    """One event of a stream that brings output, or says that there is more of it."""

    time_s: float
    has_output: bool  # text or a part of a tool call
    ids: int  # token ids in it
    usage: int | None  # completion_tokens of the `usage` in the same event


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """The chunks of a stream that brought tokens, and how many each."""

    by: Counting
    time_s: list[float]
    tokens: list[int]


def count_tokens(
    chunks: Sequence[Chunk], total: int | None = None, *, hidden: int = 0, asked: int = 0, full_length: bool = False
) -> Counts:
    """Return the tokens of each chunk.

    `total` is the last count of all tokens that the server sent. `hidden` tokens are in its counts and in no chunk.
    `full_length`: the answer ended because it has all `asked` tokens.
    """
    shown = [chunk for chunk in chunks if chunk.has_output or chunk.ids]
    total = None if total is None else max(total - hidden, 0)
    if any(chunk.ids for chunk in chunks):
        by, found = Counting.IDS, _fill_ids(shown, total)
    elif (found := _read_cumulative(chunks, hidden)) is not None and not _are_deltas(
        shown, total, asked, full_length=full_length
    ):
        by, shown = Counting.CUMULATIVE, list(chunks)
    elif _are_deltas(shown, total, asked, full_length=full_length):
        by, found = Counting.DELTAS, [chunk.usage or 0 for chunk in shown]
    elif total:
        by, found = Counting.TOTAL, _divide(max(total, len(shown)), len(shown))
    else:
        by, found = Counting.CHUNKS, [1] * len(shown)
    kept = [(chunk.time_s, tokens) for chunk, tokens in zip(shown, found, strict=True) if tokens]
    return Counts(by, [time_s for time_s, _ in kept], [tokens for _, tokens in kept])


def count_hidden(chunks: Sequence[Chunk], total: int | None, reasoning: int) -> int:
    """Return how many tokens of reasoning no chunk showed: all or none.

    Servers report reasoning tokens whether or not they send them. They were sent if a count of all tokens starts below
    them, or if there are more chunks than other tokens.
    """
    shown = [chunk for chunk in chunks if chunk.has_output or chunk.ids]
    if not reasoning or total is None or not shown:
        return 0
    first = shown[0].usage
    were_sent = first <= reasoning if first else len(shown) > total - reasoning
    return 0 if were_sent else reasoning


def _fill_ids(shown: Sequence[Chunk], total: int | None) -> list[int]:
    """Return the number of ids of each chunk. Chunks without ids share the tokens that are left."""
    found = [chunk.ids for chunk in shown]
    missing = [i for i, count in enumerate(found) if not count]
    left = len(missing) if total is None else max(total - sum(found), 0)
    for i, share in zip(missing, _divide(left, len(missing)), strict=True):
        found[i] = share
    return found


def _read_cumulative(chunks: Sequence[Chunk], hidden: int) -> list[int] | None:
    """Return what each chunk added to a cumulative count, or None if the counts do not fit the chunks."""
    before, found, raised, with_output = hidden, [], 0, 0
    for chunk in chunks:
        if chunk.usage is None or chunk.usage < before or (chunk.has_output and chunk.usage <= hidden):
            return None
        found.append(chunk.usage - before)
        raised += chunk.has_output and chunk.usage > before
        with_output += chunk.has_output
        before = chunk.usage
    return found if found and 2 * raised > with_output else None


def _are_deltas(shown: Sequence[Chunk], total: int | None, asked: int, *, full_length: bool) -> bool:
    """Return whether each chunk counts its own tokens.

    The sum has to be what the answer can have, and the last count has to be too small for a count of all tokens: smaller
    than the number of chunks, or than the `asked` tokens of an answer that has all of them.
    """
    counts = [chunk.usage for chunk in shown]
    if not counts or not all(counts):
        return False
    last, whole = counts[-1] or 0, sum(count or 0 for count in counts)
    if total is not None and total != last:
        return whole == total
    if full_length and asked:
        return whole == asked != last
    return last < len(counts) and whole <= Limits(asked).usage_output


def _divide(total: int, parts: int) -> list[int]:
    """Return equal shares of `total`. The last parts get what does not divide, as a first chunk mostly has one token."""
    if not parts:
        return []
    each, more = divmod(total, parts)
    return [each + (i >= parts - more) for i in range(parts)]
