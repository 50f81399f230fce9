"""Server-sent events as their bytes come, and what OpenAI's API says in them.

    data: {"choices": [{"text": " a"}]}⏎⏎data: [DONE]⏎⏎

A read may hold half an event or many. What is kept of an unfinished one is bounded, whatever a server sends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dcpbench.redaction import redact_part

MAX_MESSAGE, MAX_SHOWN = 300, 200  # characters of what a server says of an error, and of what came instead
MOST_EVENT = 1 << 20
"""Bytes of one event: a chunk of an answer with its logprobs has some thousands."""
DONE = b"[DONE]"
PLAIN = b"data: "


class StreamError(Exception):
    """A stream that is none of OpenAI's API; the message says what it is instead."""


class Events:
    """Cuts a stream into the `data` of its events."""

    __slots__ = ("_after_return", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Of the events that these bytes complete. Raises StreamError for one that is too long."""
        if self._after_return or b"\r" in data:
            data = self._with_newlines(data)
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MOST_EVENT:
            raise StreamError(f"one event of its stream is longer than {MOST_EVENT:,} bytes")
        return [found for event in whole if (found := _data_of(event)) is not None]

    def end(self) -> list[bytes]:
        """At the end of a stream. Raises StreamError where an event was begun and not ended.

        But what ends a whole stream needs no blank line behind it.
        """
        rest, self._rest = self._rest.strip(), b""
        found = _data_of(rest) if rest else None
        if found is not None and found != DONE:
            raise StreamError(f"its stream ended in the middle of an event: {_shown(rest)}")
        return [] if found is None else [found]

    def _with_newlines(self, data: bytes) -> bytes:
        """A line may end in CR LF, LF or CR, and CR LF may be cut in two."""
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(event: bytes) -> bytes | None:
    """The lines of its field `data`; None where it has none, as a comment that only keeps a connection alive."""
    if event.startswith(PLAIN) and b"\n" not in event:
        return event[len(PLAIN) :]
    fields = (line.partition(b":") for line in event.split(b"\n"))
    lines = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
    return b"\n".join(lines) if lines else None


class Details(msgspec.Struct):
    """Of a prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What a server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Message(msgspec.Struct):
    """Of a chat: a whole answer, or what is new of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """All that was generated, reasoning included."""
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class Choice(msgspec.Struct):
    """An answer, or what is new of it."""

    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    token_ids: list[int] | None = None
    """Of the answer, where the server takes return_token_ids."""
    logprobs: Any = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """What was generated, of completions and of chats."""
        said = self.delta or self.message
        return said.text if said is not None else self.text or ""


class Completion(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


class _Error(msgspec.Struct):
    message: str | None = None


_completion = msgspec.json.Decoder(Completion)


def read_completion(data: bytes) -> Completion:
    """An event, or a whole answer. Raises StreamError for what is none, and for an error that a server tells in it."""
    try:
        found = _completion.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise StreamError(f"it sent what is no completion ({e}): {_shown(data)}") from e
    if found.error is not None:
        raise StreamError(f"it broke off with an error: {error_in(data)}")
    if found.object == "error":
        raise StreamError(f"it broke off with an error: {redact_part(found.message or '')}")
    return found


def error_in(data: bytes) -> str:
    """Return what a body says of an error, as OpenAI's API and FastAPI put it, else its beginning; without secrets."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _shown(data)
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return redact_part(found)[:MAX_MESSAGE] if isinstance(found, str) else _shown(data)


def _shown(data: bytes) -> str:
    """Return the beginning of what came, on one line, inert and without secrets, which are replaced before it is cut."""
    text = " ".join(redact_part(data.decode("utf-8", "replace")).split())
    return "".join(c if c.isprintable() else "�" for c in text[:MAX_SHOWN]) + ("…" if len(text) > MAX_SHOWN else "")
