"""Trace files as blocks of typed events: plain or gzip, of any size, in bounded memory, and whatever was done to them.

A block ends where cutting the text gives a complete JSON array, so no tokenizer of ours is needed: text that is cut
inside a string or a nested object does not decode, and the next place is tried.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from dcpbench.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 512 << 10
LARGEST_EVENT = 64 << 20
"""An event larger than this is not a profiler's."""
MAX_RATIO = 200
"""Text per byte of gzip. Profilers' traces reach 10 to 40."""
RATIO_FROM = 256 << 20
"""Text from which the ratio is looked at."""
PIECES = 8
"""Places that look like the end of an event, and are within one, before it is given up."""
GZIP_MAGIC = b"\x1f\x8b"


class Args(msgspec.Struct, gc=False):
    """What is used of an event's `args`; -1 stands for a number that is not there."""

    correlation: int | str | float | None = -1
    external: int | str | float | None = msgspec.field(name="External id", default=-1)
    external_2021: int | str | float | None = msgspec.field(name="external id", default=-1)
    bytes: int | str | float | None = -1
    device: int | str | float | None = None
    call_stack: str | None = msgspec.field(name="Call stack", default=None)
    name: str | int | float | None = None


class Event(msgspec.Struct, gc=False):
    """What is used of an event."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: int | str | float | None = None
    dur: int | str | float | None = None
    args: Args | None = None


class Trouble(msgspec.Struct):
    """What went wrong while reading, and did not end it."""

    unreadable_events: int = 0
    truncated: bool = False
    repaired: bool = False
    """Text that is not JSON was made so: bad UTF-8, NaN, lone backslashes."""


_DECODER = msgspec.json.Decoder(list[Event])
_ONE = msgspec.json.Decoder(Event)
_RAW = msgspec.json.Decoder(list[msgspec.Raw])
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for text that is none, is not UTF-8, or is nested too deeply."""
_BLANK = b"\xef\xbb\xbf \t\r\n"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_END = re.compile(rb'[\}\[]\s*\](?=\s*(?:,\s*"|\}|\Z))')
"""What may be the end of all events: one lies before it, or none at all, and a key or nothing after it."""
_TAIL = re.compile(rb"\]\s*(?:,[^\[\]{}]*)?\}?\s*\Z")
"""End of a file that ends as it should."""
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)-?(?:nan|inf|NaN|Infinity|Inf)\b")
_BACKSLASH = re.compile(rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|(u[dD][89a-fA-F][0-9a-fA-F]{2})|)')
"""Groups: an escape; half of a character beyond the first 65,536, good only in pairs; none where it stands alone."""
_CONTROL = re.compile(rb"[\x00-\x1f]")
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,6})')
_RANK_IN_NAME = re.compile(r"(?<![a-zA-Z])(?:rank|tp|ep)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


def read_chunks(path: Path, file: BinaryIO, trouble: Trouble) -> Iterator[bytes]:
    """The file's text in pieces, decompressed where it is gzip.

    Raises:
        TraceError: The gzip data is damaged at its start, or expands more than a trace can.
    """
    head = file.read(2)
    file.seek(0)
    if head != GZIP_MAGIC:
        while chunk := file.read(BLOCK_BYTES):
            yield chunk
        return
    packed = text = 0
    inflater, inside = zlib.decompressobj(wbits=31), False
    while raw := file.read(1 << 20):
        packed += len(raw)
        while raw:
            try:
                chunk = inflater.decompress(raw, BLOCK_BYTES)
            except zlib.error as e:
                if text == 0:
                    raise TraceError(f"{path} is no gzip file that can be read ({e}); record the trace again") from None
                trouble.truncated = True
                return
            text += len(chunk)
            if text > RATIO_FROM and text > MAX_RATIO * packed:
                raise TraceError(
                    f"{path} expands more than {MAX_RATIO}-fold, to over {text >> 20} MiB; no trace does. "
                    "Unpack it and scan the .json if it is one"
                )
            yield chunk
            raw, inside = inflater.unconsumed_tail, True
            if inflater.eof:
                raw = inflater.unused_data.lstrip(b"\0")
                inflater, inside = zlib.decompressobj(wbits=31), False
    trouble.truncated |= inside


def is_something_else(path: Path) -> bool:
    """Whether a file is whole JSON that holds no events: a report or a config beside traces, say.

    False where it may be a trace, though a damaged one, or cannot be read: what is wrong with it is for the reader to
    say. An empty file may be the trace of a rank whose disk was full.
    """
    text, trouble = bytearray(), Trouble()
    try:
        with path.open("rb") as file:
            for chunk in read_chunks(path, file, trouble):
                text += chunk
                if _holds_events(text) or len(text) > LARGEST_EVENT:
                    return False
        whole = msgspec.json.decode(text)
    except (OSError, TraceError, *NOT_JSON):
        return False
    # Traces of some tools are a list alone, which may be empty.
    return whole != [] and not trouble.truncated


def _holds_events(text: bytearray) -> bool:
    """Whether this beginning of a file is a trace's."""
    head = text.lstrip(_BLANK)
    if head[:1] == b"[":
        return re.search(rb'"ph"\s*:', head) is not None
    return _EVENTS.search(head) is not None


class TraceReader:
    """Events of one file, block by block.

    Attributes:
        rank: From the trace's `distributedInfo`, else from a name such as `rank3.json`, else None.
        trouble: What could not be read, complete once the blocks have been.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = Trouble()
        found = _RANK_IN_NAME.findall(path.name)
        self.rank: int | None = int(found[-1]) if found else None

    def blocks(self) -> Iterator[list[Event]]:
        """Lists of events, in the file's order.

        Raises:
            TraceError: The file cannot be opened, or is not a trace.
        """
        try:
            if self.path.exists() and not self.path.is_file():  # a pipe may never end, and cannot be looked at twice
                raise TraceError(f"{self.path} is no file; write the trace into one, and name that")
            with self.path.open("rb") as file:
                yield from self._blocks(read_chunks(self.path, file, self.trouble))
        except OSError as e:
            raise TraceError(f"{self.path} cannot be read: {e.strerror or e}") from None

    def _blocks(self, chunks: Iterator[bytes]) -> Iterator[list[Event]]:
        buffer = self._start(chunks)
        enough = BLOCK_BYTES
        for chunk in chunks:
            buffer += chunk
            if len(buffer) < enough:
                continue
            events, used, ended = self._take(buffer)
            if used:
                yield events
                del buffer[1 : used + 1]
            enough = BLOCK_BYTES if used else min(2 * len(buffer), LARGEST_EVENT + 1)
            if ended:
                for _ in chunks:  # a checksum stands at the very end
                    pass
                return
            if len(buffer) > LARGEST_EVENT:
                raise TraceError(
                    f"{self.path}: no end of an event within {LARGEST_EVENT >> 20} MiB; not a profiler's trace"
                )
        yield self._rest(buffer)

    def _start(self, chunks: Iterator[bytes]) -> bytearray:
        """`[` and the text after the opening bracket of the events."""
        head = bytearray()
        for chunk in chunks:
            head += chunk
            text = head.lstrip(_BLANK)
            if not text:
                continue
            if text[:1] == b"[" and bytes(text[1:64].lstrip()[:1]) in (b"", b"{", b"]"):
                return text
            if text[:1] != b"{":
                break
            key = _EVENTS.search(text)
            if key:
                rank = _RANK.search(text[: key.start()])
                self.rank = int(rank[1]) if rank else self.rank
                return text[key.end() - 1 :]
            if len(head) > LARGEST_EVENT:
                break
        if not head:
            raise TraceError(f"{self.path} is empty; record the trace again")
        raise TraceError(
            f'{self.path} is not a Kineto trace: no "traceEvents" in it. '
            'Export one with torch.profiler\'s export_chrome_trace("trace.json")'
        )

    def _take(self, buffer: bytearray) -> tuple[list[Event], int, bool]:
        """(events, bytes used after the first, whether the array ended) of as much of the buffer as is complete."""
        window = max(1, len(buffer) - (1 << 13))
        cuts = [m.end() - 1 for m in _BETWEEN.finditer(buffer, window)] or [
            m.end() - 1 for m in _BETWEEN.finditer(buffer)
        ]
        found = self._until_cut(buffer, cuts)
        if found is not None:
            return *found, False
        ended = self._until_end(buffer)
        if ended is not None:
            return ended, len(buffer) - 1, True
        if cuts:
            comma = buffer.rindex(b",", 0, cuts[-1])
            return self._repair(bytes(buffer[1:comma])), comma, False
        return [], 0, False

    def _until_cut(self, buffer: bytearray, cuts: list[int]) -> tuple[list[Event], int] | None:
        """(events up to one of the last places where an event may begin, bytes used after the first)."""
        for start_of_next in reversed(cuts[-6:]):
            comma = buffer.rindex(b",", 0, start_of_next)
            buffer[comma : comma + 1] = b"]"
            events = self._decode(memoryview(buffer)[: comma + 1])
            buffer[comma : comma + 1] = b","
            if events is not None:
                return events, comma
        return None

    def _until_end(self, buffer: bytearray) -> list[Event] | None:
        """Events up to the bracket that ends the array, if it lies in the buffer."""
        ends = [m.end() for m in _END.finditer(buffer)]
        for end in [*reversed(ends[-4:]), *ends[:4]]:
            events = self._decode(memoryview(buffer)[:end])
            if events is not None:
                return events
        return None

    def _rest(self, buffer: bytearray) -> list[Event]:
        """The last events; a file that ends before its bracket is marked as truncated."""
        events = self._until_end(buffer)
        if events is not None:
            return events
        body = bytes(buffer[1:])
        tail = _TAIL.search(body)
        if tail:
            return self._repair(body[: tail.start()])
        self.trouble.truncated = True
        events = self._decode(b"[" + body.rstrip(b", \t\r\n") + b"]")
        if events is not None:
            return events
        cuts = [m.end() - 1 for m in _BETWEEN.finditer(buffer)]
        if not cuts:
            return []
        found = self._until_cut(buffer, cuts)
        return found[0] if found else self._repair(body[: cuts[-1] - 1].rstrip(b", \t\r\n"))

    def _decode(self, text: bytes | memoryview) -> list[Event] | None:
        """Events of a complete array; None where the text is not one."""
        try:
            return _DECODER.decode(text)
        except msgspec.ValidationError:
            return self._one_by_one(text)
        except NOT_JSON:
            return None

    def _one_by_one(self, text: bytes | memoryview) -> list[Event] | None:
        """The events of an array that have the types they should; the others are counted."""
        try:
            parts = _RAW.decode(text)
        except NOT_JSON:
            return None
        events = []
        for part in parts:
            try:
                events.append(_ONE.decode(part))
            except NOT_JSON:
                self.trouble.unreadable_events += 1
        return events

    def _repair(self, body: bytes) -> list[Event]:
        """What can be saved of text between two events that is not JSON."""
        self.trouble.repaired = True
        body = body.decode("utf-8", errors="replace").encode()
        body = _NOT_A_NUMBER.sub(rb"\1null", _BACKSLASH.sub(_escaped, _CONTROL.sub(b" ", body)))
        events = self._decode(b"[" + body + b"]")
        if events is not None:
            return events
        events, part = [], b""
        for piece in _BETWEEN.split(body.strip().removeprefix(b"{").removesuffix(b"}")):
            text = part + b"},{" + piece if part else piece
            event = self._event(text)
            if event is None and part:  # what is broken before it must not take a good event along
                event = self._event(piece)
                event = event if event is not None and event.ph else None
                self.trouble.unreadable_events += event is not None
            if event is not None:
                events.append(event)
            elif text.count(b"},{") >= PIECES:
                self.trouble.unreadable_events += 1
                text = b""
            part = b"" if event is not None else text
        self.trouble.unreadable_events += bool(part.strip())
        return events

    def _event(self, inner: bytes) -> Event | None:
        """The event with this text between its brackets; None where it is not JSON."""
        try:
            return _ONE.decode(b"{" + inner + b"}")
        except msgspec.ValidationError:
            self.trouble.unreadable_events += 1
            return Event()
        except NOT_JSON:
            return None


def _escaped(found: re.Match[bytes]) -> bytes:
    """A backslash that JSON allows as it is, a lone one doubled, half a character as a replacement character."""
    return found[0] if found[1] else b"\\ufffd" if found[2] else b"\\\\"
