"""Read the streamed answer to one request: when each chunk arrived, and how many tokens it brought."""

from __future__ import annotations

import time

from dcpbench.servers.client import CLIENT_ERROR, MAX_ERROR, OK, RequestError, make_status_error
from dcpbench.servers.events import (
    DONE,
    MAX_EVENT,
    BadStream,
    Events,
    Fault,
    StreamError,
    Usage,
    read_completion,
    read_error_message,
)
from dcpbench.servers.token_counts import (
    Chunks,
    Counting,
    Counts,
    Limits,
    count_hidden,
    count_tokens,
)
from dcpbench.serving.request_files import MAX_TOKEN_ID
from dcpbench.show.text import fit_line, format_count

BY_IDS, BY_USAGE, BY_CHUNKS = "token ids", "usage", "chunks"  # sources of the token count of a chunk, in records
COUNTED_BY = {Counting.IDS: BY_IDS, Counting.CHUNKS: BY_CHUNKS}  # all others are of usage
EVENT_STREAM = b"text/event-stream"
MAX_OTHER = 512  # bytes kept of an answer of another type, enough to identify it
LENGTH = "length"  # finish_reason of an answer with all requested tokens
BROKEN_OFF = ("abort", "error")  # finish_reason of an answer that the server gave up


class StreamReply:
    """A client.Reply that reads a streamed completion."""

    awaits = "no token"
    __slots__ = (
        "_body",
        "_chunks",
        "_counts",
        "_done",
        "_events",
        "_headers",
        "_highest",
        "_keep",
        "_length",
        "_limits",
        "_other",
        "_reasoned",
        "_total",
        "finish_reason",
        "heard_s",
        "status",
        "texts",
        "tokens",
        "usage",
    )

    def __init__(self, output_tokens: int, *, prompt_tokens: int = 0, keep: bool = False) -> None:
        """Create the reply; `output_tokens` is the requested number of output tokens.

        `prompt_tokens` is the length of its prompt, 0 if unknown. With `keep`, the texts are kept.
        """
        self.heard_s = time.perf_counter()
        self.status = 0
        self.tokens: list[int] = []  # ids of the answer, if the server sends them
        self.texts: list[str] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._limits, self._keep = Limits(output_tokens, prompt_tokens), keep
        self._chunks = Chunks()
        self._counts: tuple[int, Counts] | None = None
        self._total: int | None = None
        self._highest = self._length = 0
        self._reasoned = False
        self._events = Events(MAX_EVENT + self._limits.echo_bytes)
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._other = self._done = False

    def receive_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Implement client.Reply.receive_head."""
        self.status, self._headers = status, headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        self._other = status != OK or (kind not in (EVENT_STREAM, b""))

    def receive_body(self, data: bytes, now_s: float) -> None:
        """Implement client.Reply.receive_body."""
        if self._other:
            self._body += data
            if len(self._body) > MAX_ERROR or (self.status == OK and len(self._body) > MAX_OTHER):
                raise self._make_error()
            return
        for event, began_s in self._events.parse_data(data, now_s):
            self._read_event(event, began_s)

    def receive_end(self) -> None:
        """Implement client.Reply.receive_end."""
        if self._other:
            raise self._make_error()
        for event, began_s in self._events.finish_stream():
            self._read_event(event, began_s)
        if self.finish_reason in BROKEN_OFF:
            arrived = format_count(len(self._chunks), "chunk")
            raise RequestError(
                "aborted", f"the server ended the request after {arrived} with finish_reason {self.finish_reason}."
            )
        if not self._done and self.finish_reason is None:
            arrived = format_count(len(self._chunks), "chunk")
            raise RequestError("cut off", f"the stream ended after {arrived}, without a finish_reason or [DONE].")
        if not self.chunk_s:
            raise RequestError("no tokens", "the server's answer holds no token.")

    @property
    def chunks(self) -> int:
        """Return the number of chunks with output so far."""
        return len(self._chunks)

    @property
    def counts(self) -> Counts:
        """Return the chunks with tokens so far, and the number of tokens in each."""
        if self._counts is None or self._counts[0] != len(self._chunks):
            counts = count_tokens(
                self._chunks,
                self._total,
                hidden=self.hidden_tokens,
                requested=self._limits.output_tokens,
                full_length=self.finish_reason == LENGTH,
            )
            self._counts = len(self._chunks), counts
        return self._counts[1]

    @property
    def chunk_s(self) -> list[float]:
        """Return the arrival time of each chunk with tokens."""
        return self.counts.time_s.tolist()

    def list_chunk_tokens(self) -> list[int]:
        """Return the tokens of each chunk with tokens."""
        return self.counts.tokens.tolist()

    @property
    def counted_by(self) -> str:
        """Return the source of the counts: BY_IDS, BY_USAGE or BY_CHUNKS."""
        return COUNTED_BY.get(self.counts.by, BY_USAGE)

    @property
    def has_chunk_counts(self) -> bool:
        """Return True if the server reports the tokens of each chunk."""
        return self.counts.by in (Counting.IDS, Counting.CUMULATIVE, Counting.DELTAS)

    @property
    def hidden_tokens(self) -> int:
        """Return the number of reasoning tokens that the server generated and did not send."""
        reasoning = self.usage.reasoning if self.usage is not None and not self._reasoned else 0
        return count_hidden(self._chunks, self._total, reasoning)

    def _read_event(self, event: bytes, began_s: float) -> None:
        """Read one event. Raise StreamError if it is no chunk of an answer, or contradicts the request."""
        if event == DONE:
            self._done = True
            return
        found = read_completion(event)
        usage = self._add_usage(found.usage) if found.usage is not None else None
        if not found.choices:
            return
        choice = found.choices[0]
        if choice.finish_reason:
            self.finish_reason, self._counts = choice.finish_reason, None
        message, ids, has_output = choice.new_message, choice.token_ids, choice.has_output
        if message is not None and message.reasoning_text:
            self._reasoned = True
        if usage is not None and usage > self._highest:
            self._highest = usage
        elif not (ids or has_output):
            return
        if len(self._chunks) >= self._limits.chunks:
            self._raise_fault(Fault.TOO_MANY_TOKENS, limit=self._limits.chunks)
        if ids:
            self._add_ids(ids)
        if self._keep:
            self._add_text(choice.new_text)
        self.heard_s = began_s
        self._chunks.add_chunk(began_s, has_output, len(ids) if ids else 0, usage)

    def _add_usage(self, usage: Usage) -> int | None:
        if (bad := self._limits.find_excess(usage)) is not None:
            raise StreamError(bad)
        self.usage, self._counts = usage, None
        if usage.completion_tokens is not None:
            self._total = usage.completion_tokens
        return usage.completion_tokens

    def _add_ids(self, ids: list[int]) -> None:
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme <= MAX_TOKEN_ID:
                self._raise_fault(Fault.TOKEN_ID, value=extreme, limit=MAX_TOKEN_ID)
        if len(self.tokens) + len(ids) > self._limits.chunks:
            self._raise_fault(Fault.TOO_MANY_TOKENS, limit=self._limits.chunks)
        self.tokens += ids

    def _add_text(self, text: str) -> None:
        self._length += len(text)
        if self._length > self._limits.text:
            self._raise_fault(Fault.TOO_MUCH_TEXT, limit=self._limits.text)
        self.texts.append(text)

    def _raise_fault(self, fault: Fault, *, value: int = 0, limit: int = 0) -> None:
        raise StreamError(BadStream(fault=fault, value=value, limit=limit, requested=self._limits.output_tokens))

    def _make_error(self) -> RequestError:
        if self.status != OK:
            return make_status_error(self.status, self._headers, self._body)
        kind = fit_line(self._headers.get(b"content-type", b"").decode("latin-1"), 100)
        return RequestError(
            "no stream", f"the server sent {kind} instead of a stream: {read_error_message(self._body[:MAX_OTHER])}"
        )


def is_refusal(error: RequestError) -> bool:
    """Return whether the server did not accept the fields of a request, and may accept others."""
    return error.status in (CLIENT_ERROR, 415, 422)
