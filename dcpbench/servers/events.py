"""Parse server-sent events as their bytes arrive, and the JSON of OpenAI's API inside them.

    data: {"choices": [{"text": " a"}]}⏎⏎data: [DONE]⏎⏎

A read may hold half an event or many. The size of an unfinished event is bounded, whatever a server sends.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from dcpbench.points.redaction import redact_part
from dcpbench.records.lines import UNREADABLE
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_EVENT = 1 << 20  # bytes of one event without the echo of a prompt; a chunk with its logprobs has some thousands
MAX_QUOTE, MAX_SHOWN = 300, 200  # characters of a server's error message, and of anything else that it sent
DONE = b"[DONE]"
PLAIN, COMMENT, BYTE_ORDER_MARK = b"data: ", b":", b"\xef\xbb\xbf"


class Fault(enum.StrEnum):
    """Reasons to give up a stream."""

    EVENT_TOO_LONG = "event too long"
    HALF_EVENT = "half an event"
    NOT_A_COMPLETION = "not a completion"
    SERVER_ERROR = "server error"
    TOO_MANY_TOKENS = "too many tokens"
    TOO_MUCH_TEXT = "too much text"
    TOKEN_ID = "token id out of range"  # noqa: S105 -- the name of a fault
    USAGE = "usage out of range"


class BadStream(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a stream was abandoned. `format_bad_stream` makes a sentence from it."""

    fault: Fault
    field: str = ""  # which number of `usage` is out of range
    value: int = 0  # value sent by the server or counted
    limit: int = 0  # maximum possible value for this request
    requested: int = 0  # tokens requested
    quote: str = ""  # message of the server, or the beginning of the received data
    detail: str = ""  # message of the JSON decoder


FORMATS: dict[Fault, Callable[[BadStream], str]] = {
    Fault.EVENT_TOO_LONG: lambda bad: f"one event of the stream is longer than {bad.limit:,} bytes",
    Fault.HALF_EVENT: lambda bad: f"the stream ended in the middle of an event: {bad.quote}",
    Fault.NOT_A_COMPLETION: lambda bad: f"an event is not a completion ({bad.detail}): {bad.quote}",
    Fault.SERVER_ERROR: lambda bad: f"the server broke off with an error: {bad.quote}",
    Fault.TOO_MANY_TOKENS: lambda bad: (
        f"the server sent more than {bad.limit:,} chunks or token ids for {bad.requested:,} tokens and did not end"
    ),
    Fault.TOO_MUCH_TEXT: lambda bad: f"the text of {bad.requested:,} tokens is longer than {bad.limit:,} characters",
    Fault.TOKEN_ID: lambda bad: f"the token id {_format_number(bad.value)} is not between 0 and {bad.limit:,}",
    Fault.USAGE: lambda bad: (
        f"usage.{bad.field} is {_format_number(bad.value)}, which is not between 0 and {bad.limit:,} "
        f"for a request of {bad.requested:,} tokens"
    ),
}
MAX_SHOWN_NUMBER = 10**18  # larger numbers are shown as a power of ten


def format_bad_stream(bad: BadStream) -> str:
    """Return the sentence for an abandoned stream, without its full stop."""
    return FORMATS[bad.fault](bad)


def _format_number(number: int) -> str:
    if abs(number) <= MAX_SHOWN_NUMBER:
        return f"{number:,}"
    return f"{'-' if number < 0 else ''}about 10^{len(str(abs(number))) - 1}"


class StreamError(Exception):
    """A stream that does not follow OpenAI's API, or that contradicts its request."""

    def __init__(self, bad: BadStream) -> None:
        super().__init__(format_bad_stream(bad))
        self.bad = bad


class Events:
    """Cut a stream into the `data` of its events, each with the time at which its first byte arrived.

    Comments before an event do not belong to it. An event of the type `error` becomes an error of OpenAI's API.
    """

    __slots__ = ("_after_return", "_began_s", "_held", "_limit")

    def __init__(self, limit: int = MAX_EVENT) -> None:
        """Hold at most `limit` bytes of an unfinished event."""
        self._held = bytearray()
        self._began_s = 0.0
        self._after_return = False
        self._limit = limit

    def parse_data(self, data: bytes, now_s: float) -> list[tuple[bytes, float]]:
        """Return the events that these bytes complete. Raise StreamError for one that is too long.

        Only the new bytes are searched, so that a long event costs no more than its length.
        """
        if self._after_return or b"\r" in data:
            data = self._normalize_newlines(data)
        held = self._held
        if held.startswith(COMMENT):
            self._began_s = now_s
        if not held:
            data = data.removeprefix(BYTE_ORDER_MARK)
            *whole, rest = data.split(b"\n\n")
            self._add_rest(rest, now_s)
            return [(text, now_s) for event in whole if (text := _get_data(event)) is not None]
        search, start = len(held) - 1, 0
        held += data
        found = []
        while (end := held.find(b"\n\n", search)) >= 0:
            if (text := _get_data(bytes(held[start:end]))) is not None:
                found.append((text, self._began_s))
            self._began_s = now_s
            start = search = end + 2
        rest = bytes(held[start:]) if start else b""
        if start:
            held.clear()
        self._add_rest(rest, self._began_s)
        return found

    def _add_rest(self, rest: bytes, began_s: float) -> None:
        """Add the beginning of an event to the held bytes. Further blank lines and comments begin no new one."""
        if rest and (self._held or (rest := rest.lstrip(b"\n"))):
            self._began_s = began_s
            self._held += rest
        while self._held.startswith(COMMENT) and (end := self._held.find(b"\n")) >= 0:
            del self._held[: end + 1]
        if len(self._held) > self._limit:
            raise StreamError(BadStream(fault=Fault.EVENT_TOO_LONG, limit=self._limit))

    def finish_stream(self) -> list[tuple[bytes, float]]:
        """Return the remaining data at the end of a stream. Raise StreamError if an event is incomplete.

        The `[DONE]` that ends a whole stream needs no blank line after it.
        """
        rest = bytes(self._held).strip()
        self._held.clear()
        found = _get_data(rest) if rest else None
        if found is not None and found != DONE:
            raise StreamError(BadStream(fault=Fault.HALF_EVENT, quote=_format_quote(rest)))
        return [] if found is None else [(found, self._began_s)]

    def _normalize_newlines(self, data: bytes) -> bytes:
        """Replace CR LF and CR by LF. A read may end between CR and LF."""
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _get_data(event: bytes) -> bytes | None:
    """Return the lines of the field `data`, or None if there is none, as in a keep-alive comment.

    Dynamo puts the message of an error into a comment.
    """
    if event.startswith(PLAIN) and b"\n" not in event:
        return event[len(PLAIN) :]
    fields: dict[bytes, list[bytes]] = {}
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    data = fields.get(b"data")
    if fields.get(b"event", [])[-1:] == [b"error"]:
        return msgspec.json.encode({"error": read_error_message(b"\n".join(data or fields.get(b"", [])))})
    return b"\n".join(data) if data else None


class PromptDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int | None = None


class OutputDetails(msgspec.Struct, frozen=True):
    """Details of the output's tokens."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    reasoning_tokens: int | None = None  # field of SGLang

    @property
    def cached_tokens(self) -> int | None:
        """Return the prompt tokens found in the prefix cache."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None

    @property
    def reasoning(self) -> int:
        """Return the output tokens of reasoning; 0 if the server does not report them."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details else None) or self.reasoning_tokens or 0


NULL = msgspec.Raw(b"null")  # default of fields that are not parsed here, so that their JSON takes no memory


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """A chat message, or the new part of one."""

    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = NULL

    @property
    def reasoning_text(self) -> str:
        """Return the text of the reasoning."""
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        """Return all generated text, reasoning included."""
        if isinstance(self.content, list):
            return self.reasoning_text + "".join(part.text or "" for part in self.content)
        return self.reasoning_text + (self.content or "")

    @property
    def has_tool_call(self) -> bool:
        """Return True if it holds a part of a tool call."""
        return self.tool_calls is not NULL and bytes(self.tool_calls) not in (b"null", b"[]")


class Choice(msgspec.Struct, frozen=True):
    """An answer, or the new part of one."""

    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    token_ids: list[int] | None = None  # of the answer, where the server supports return_token_ids
    logprobs: msgspec.Raw = NULL
    finish_reason: str | None = None

    @property
    def new_message(self) -> Message | None:
        """Return the message of a chat; None in completions."""
        return self.delta or self.message

    @property
    def new_text(self) -> str:
        """Return the generated text, of completions and of chats."""
        message = self.new_message
        return message.text if message is not None else self.text or ""

    @property
    def has_output(self) -> bool:
        """Return True if it brings text or a part of a tool call."""
        message = self.new_message
        return bool(self.text) if message is None else bool(message.text) or message.has_tool_call


class Completion(msgspec.Struct, frozen=True):
    """An event of a stream, or a whole answer."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = NULL
    object: str | None = None
    message: str | None = None


_completion = msgspec.json.Decoder(Completion)


def read_completion(data: bytes) -> Completion:
    """Parse an event or a whole answer. Raise StreamError if it is invalid, or if it reports an error."""
    try:
        found = _completion.decode(data)
    except UNREADABLE as e:
        bad = BadStream(fault=Fault.NOT_A_COMPLETION, detail=fit_line(str(e)), quote=_format_quote(data))
        raise StreamError(bad) from e
    if found.error is not NULL and bytes(found.error) != b"null":
        raise StreamError(BadStream(fault=Fault.SERVER_ERROR, quote=read_error_message(data)))
    if found.object == "error":
        raise StreamError(BadStream(fault=Fault.SERVER_ERROR, quote=fit_line(str(found.message), MAX_QUOTE)))
    return found


def read_error_message(data: bytes) -> str:
    """Return the error message in a body, where OpenAI's API and FastAPI put it, else its beginning; without secrets."""
    try:
        found = msgspec.json.decode(data)
    except UNREADABLE:
        return _format_quote(data)
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return fit_line(found, MAX_QUOTE) if isinstance(found, str) else _format_quote(data)


def _format_quote(data: bytes) -> str:
    """Return the beginning of the received data, on one line and printable; secrets are replaced before it is cut."""
    text = " ".join(redact_part(data.decode("utf-8", "replace")).split())
    return "".join(c if c.isprintable() else "�" for c in text[:MAX_SHOWN]) + ("…" if len(text) > MAX_SHOWN else "")
