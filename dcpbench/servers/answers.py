"""The answer to one request as it streams in: when each chunk came, and how many tokens it brought."""

from __future__ import annotations

import time

from dcpbench.redaction import redact_part
from dcpbench.servers.client import CLIENT_ERROR, MOST_ERROR, OK, RequestError, status_error
from dcpbench.servers.events import DONE, Choice, Events, StreamError, Usage, error_in, read_completion

BY_IDS, BY_USAGE, BY_CHUNKS = "token ids", "usage", "chunks"
"""What told how many tokens a chunk brought."""
UNKNOWN = -1
SPARE_CHUNKS = 1000
"""Chunks beyond twice the tokens asked for, after which a stream is taken for endless."""
EVENT_STREAM = b"text/event-stream"
TELLING = 512
"""Bytes of an answer of another kind that say what it is."""


class Streamed:
    """A client.Reply of a completion that is streamed."""

    __slots__ = (
        "_asked",
        "_body",
        "_chunk_tokens",
        "_counted",
        "_done",
        "_events",
        "_headers",
        "_keep",
        "_other",
        "choices",
        "chunk_s",
        "finish_reason",
        "heard_s",
        "status",
        "tokens",
        "usage",
    )

    def __init__(self, asked: int, *, keep: bool = False) -> None:
        """`asked`: tokens that were asked for. `keep`: all choices, with their texts and logprobs."""
        self.heard_s = time.perf_counter()
        self.status = 0
        self.chunk_s: list[float] = []
        """When each chunk with tokens came."""
        self.tokens: list[int] = []
        """Their ids, where the server says them."""
        self.choices: list[Choice] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._asked, self._keep = asked, keep
        self._chunk_tokens: list[int] = []
        self._counted = 0
        self._events = Events()
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._other = self._done = False

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """See client.Reply."""
        self.status, self._headers = status, headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        self._other = status != OK or (kind not in (EVENT_STREAM, b""))

    def body(self, data: bytes, now_s: float) -> None:
        """See client.Reply."""
        if self._other:
            self._body += data
            if len(self._body) > MOST_ERROR or (self.status == OK and len(self._body) > TELLING):
                raise self._no_stream()
            return
        for event in self._events.feed(data):
            self._take(event, now_s)

    def end(self) -> None:
        """See client.Reply."""
        if self._other:
            raise self._no_stream()
        for event in self._events.end():
            self._take(event, self.heard_s)
        if not self._done and self.finish_reason is None:
            raise RequestError(
                "cut off", f"the stream ended after {len(self.chunk_s)} chunks, before it said that the answer had."
            )
        if not self.chunk_s:
            raise RequestError("no tokens", "the server's answer holds no token.")

    @property
    def counted_by(self) -> str:
        """BY_IDS, BY_USAGE or BY_CHUNKS."""
        if self.tokens and len(self.tokens) == sum(self._chunk_tokens):
            return BY_IDS
        return BY_USAGE if self.usage is not None and self.usage.completion_tokens else BY_CHUNKS

    def chunk_tokens(self) -> list[int]:
        """Tokens of each chunk: as the server says; of those of which it does not, evenly what is left, at least one."""
        counts = list(self._chunk_tokens)
        unknown = [i for i, count in enumerate(counts) if count == UNKNOWN]
        if unknown:
            total = self.usage.completion_tokens if self.usage and self.usage.completion_tokens else 0
            left = max(total - sum(count for count in counts if count > 0), len(unknown))
            each, more = divmod(left, len(unknown))
            for k, i in enumerate(reversed(unknown)):  # a first chunk mostly has one
                counts[i] = each + (k < more)
        return counts

    def _take(self, event: bytes, now: float) -> None:
        """One event. Raises StreamError for what is no chunk of an answer."""
        if event == DONE:
            self._done = True
            return
        found = read_completion(event)
        told = None
        if found.usage is not None:
            self.usage = found.usage
            told = found.usage.completion_tokens
        if not found.choices:
            return
        choice = found.choices[0]
        self.finish_reason = choice.finish_reason or self.finish_reason
        count = self._count(choice, told)
        if not count:
            return
        self.heard_s = now
        self.chunk_s.append(now)
        self._chunk_tokens.append(count)
        if choice.token_ids:
            self.tokens += choice.token_ids
        if self._keep:
            self.choices.append(choice)
        if len(self.chunk_s) > 2 * self._asked + SPARE_CHUNKS:
            raise StreamError(f"it sent {len(self.chunk_s):,} chunks for {self._asked:,} tokens and did not end")

    def _count(self, choice: Choice, told: int | None) -> int:
        """Tokens of a chunk; UNKNOWN where there are some; 0 where it brought none, as the one with a chat's role.

        Usage that comes with the last chunk alone is of all of them, and says nothing of one.
        """
        if choice.token_ids:
            return len(choice.token_ids)
        if told is not None and UNKNOWN not in self._chunk_tokens[:1]:
            new, self._counted = told - self._counted, max(told, self._counted)
            return max(new, 0)
        return UNKNOWN if choice.new_text else 0

    def _no_stream(self) -> RequestError:
        if self.status != OK:
            return status_error(self.status, self._headers, self._body)
        kind = redact_part(self._headers.get(b"content-type", b"").decode("latin-1"))[:100]
        return RequestError("no stream", f"the server sent {kind} in place of a stream: {error_in(self._body)}")


def refused(error: RequestError) -> bool:
    """Whether a server did not take a request as it was put, and may take it otherwise."""
    return error.status in (CLIENT_ERROR, 415, 422)
