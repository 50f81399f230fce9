"""Read trace files as blocks of typed events: plain or gzip, damaged or not, of any size, in bounded memory.

A block ends where cutting the text gives a complete JSON array, so no tokenizer of ours is needed: text that is cut
inside a string or a nested object does not decode, and the next place is tried.
"""

from __future__ import annotations

import codecs
import re
import zlib
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from dcpbench.errors import TraceError
from dcpbench.records.lines import UNREADABLE
from dcpbench.syncs.trace_ranks import parse_file_name
from dcpbench.syncs.traces.other_formats import GZIP_MAGIC, HEAD_BYTES, explain_other_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK_BYTES = 512 << 10
MAX_EVENT_BYTES = 64 << 20  # an event larger than this is not a profiler's
MAX_RATIO = 200  # text per byte of gzip. Profilers' traces reach 10 to 40.
MIN_RATIO_BYTES = 256 << 20  # text from which the ratio is looked at
MAX_EVENT_PIECES = 8  # places that look like the end of an event, and are within one, before it is given up


class Args(msgspec.Struct, gc=False):
    """Hold the fields of an event's `args` that are used; -1 means a missing number."""

    correlation: int | str | float | None = -1
    external: int | str | float | None = msgspec.field(name="External id", default=-1)
    external_2021: int | str | float | None = msgspec.field(name="external id", default=-1)
    bytes: int | str | float | None = -1
    device: int | str | float | None = None
    call_stack: str | None = msgspec.field(name="Call stack", default=None)
    name: str | int | float | None = None


class Event(msgspec.Struct, gc=False):
    """Hold the fields of an event that are used."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: int | str | float | None = None
    dur: int | str | float | None = None
    args: Args | None = None


class ReadProblems(msgspec.Struct):
    """Hold problems found while reading that did not end it."""

    unreadable_events: int = 0
    truncated: bool = False
    not_numbers: bool = False  # NaN and infinities, which JSON does not have, were read as no number
    repaired: list[str] = []  # first few strings that were made JSON: bad UTF-8, half characters, lone backslashes
    untimed_events: int = 0  # calls and GPU work without a duration that can be; read as 0
    behind: str = ""  # description of the text behind the end of the trace, which was not read
    lost: list[str] = []  # clauses on other parts that are damaged or missing, each with what to type


_DECODER = msgspec.json.Decoder(list[Event])
_ONE = msgspec.json.Decoder(Event)
_RAW = msgspec.json.Decoder(list[msgspec.Raw])
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BLANK = b"\xef\xbb\xbf \t\r\n"
_HAS_EVENTS = re.compile(rb'"ph"\s*:\s*"[A-Z]"[^{}]*"cat"\s*:|"cat"\s*:[^{}]*"ph"\s*:\s*"[A-Z]"')
_A_PHASE = re.compile(rb'"ph"\s*:')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_ENDED = re.compile(r"trailing characters \(byte (\d+)\)")  # message of msgspec if text follows the end of an array
_COMMA = re.compile(r"trailing comma in array \(byte (\d+)\)")  # message of msgspec for an array's trailing comma
CUT = "truncated"  # message of msgspec for text that ends too early
MAX_TRAILING_COMMAS = 4  # trailing commas that are skipped: one after all events, a few in neighbouring events
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
MAX_REPAIRED = 3  # repaired strings that are kept as examples
SHOWN_BYTES = 40  # bytes on each side of a place that is shown
_TAIL = re.compile(rb"\]\s*(?:,[^\[\]{}]*)?\}?\s*\Z")  # end of a file that ends as it should
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)-?(?:nan|inf|NaN|Infinity|Inf)\b")
_BACKSLASH = re.compile(  # groups: escape or two of one character, half of such a pair, or none (lone backslash)
    rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|)"
)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_ODD_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # control characters that are no blanks
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,6})\b')
_WORLD_SIZE = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"world_size"\s*:\s*(\d{1,6})\b')


def read_chunks(path: Path, file: BinaryIO, problems: ReadProblems) -> Iterator[bytes]:
    """Yield the file's text in pieces, decompressed if it is gzip with one or more members.

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
                if inside:
                    problems.truncated = True
                else:
                    size = len(raw) + sum(len(more) for more in iter(lambda: file.read(1 << 20), b""))
                    problems.behind = problems.behind or f"{size:,} bytes that are no gzip, behind its gzip data"
                return
            text += len(chunk)
            if text > MIN_RATIO_BYTES and text > MAX_RATIO * packed:
                raise TraceError(
                    f"{path} expands more than {MAX_RATIO}-fold, to over {text >> 20} MiB; no trace does. "
                    "Unpack it and scan the .json if it is one"
                )
            yield chunk
            raw, inside = inflater.unconsumed_tail, True
            if inflater.eof:
                raw = inflater.unused_data.lstrip(b"\0")
                inflater, inside = zlib.decompressobj(wbits=31), False
    problems.truncated |= inside


def _find_array_end(text: bytearray) -> int:
    """Return the bytes of the array with which a text begins; 0 if it does not end. A trailing comma is blanked."""
    for _ in range(MAX_TRAILING_COMMAS):
        try:
            _RAW.decode(text)
        except UNREADABLE as e:
            ended, comma = _ENDED.search(str(e)), _COMMA.search(str(e))
        else:
            return len(text)
        if ended:
            return text.rindex(b"]", 0, int(ended[1]) - 1) + 1
        if not comma:
            return 0
        at = text.rindex(b",", 0, int(comma[1]))
        text[at : at + 1] = b" "
    return 0


def _read_object_keys(text: bytes) -> tuple[Iterable[str] | None, bytes]:
    """Return the keys of the object with which a text begins, and what follows it.

    No keys where the text ends within the object, None where it is not JSON.
    """
    try:
        return _KEYS.decode(text), b""
    except UNREADABLE as e:
        ended = _ENDED.search(str(e))
        if not ended:
            return (() if CUT in str(e) else None), b""
        end = text.rindex(b"}", 0, int(ended[1]) - 1) + 1
    return _read_object_keys(text[:end])[0], text[end:]


def is_other_json(path: Path) -> bool:
    """Return whether a file is valid JSON without events, such as a report or a configuration.

    Return False if it may be a trace, though a damaged one, or cannot be read: the reader reports such problems. An
    empty file may be the trace of a rank with a full disk.
    """
    text, problems = bytearray(), ReadProblems()
    try:
        with path.open("rb") as file:
            for chunk in read_chunks(path, file, problems):
                text += chunk
                events = _A_PHASE if text.lstrip(_BLANK)[:1] == b"[" else _EVENTS
                if events.search(text) or len(text) > MAX_EVENT_BYTES:
                    return False
        whole = msgspec.json.decode(text)
    except (OSError, TraceError, *UNREADABLE):
        return False
    # Traces of some tools are a list alone, which may be empty; what has events under another key is a damaged one.
    return whole != [] and not problems.truncated and not _HAS_EVENTS.search(text)


class TraceReader:
    """Read the events of one file, block by block.

    Attributes:
        rank: From the trace's `distributedInfo`, else from the file's name, else None.
        world_size: From the trace's `distributedInfo`, else None.
        problems: What could not be read, complete once the blocks have been.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems = ReadProblems()
        self._in_object = False
        self.rank = parse_file_name(path.name).rank
        self.world_size: int | None = None

    def read_blocks(self) -> Iterator[list[Event]]:
        """Yield lists of events in the file's order.

        Raises:
            TraceError: The file cannot be opened, or is not a trace.
        """
        try:
            if self.path.exists() and not self.path.is_file():  # a pipe may never end, and cannot be looked at twice
                raise TraceError(f"{self.path} is no file; write the trace into one, and name that")
            with self.path.open("rb") as file:
                yield from self._split_blocks(self._check_utf8(read_chunks(self.path, file, self.problems)))
        except OSError as e:
            raise TraceError(f"{self.path} cannot be read: {e.strerror or e}") from None

    def _check_utf8(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks and note the first byte that is not UTF-8, as the decoder skips keys and unused text."""
        utf8, whole = codecs.getincrementaldecoder("utf-8")(), True
        for chunk in chunks:
            if not self.problems.repaired and not (whole and chunk.isascii()):
                try:
                    utf8.decode(chunk)
                    whole = not utf8.getstate()[0]
                except UnicodeDecodeError as e:
                    self._record_repair(e.object, e.start)
            yield chunk

    def _split_blocks(self, chunks: Iterator[bytes]) -> Iterator[list[Event]]:
        buffer = self._read_start(chunks)
        enough = BLOCK_BYTES
        for chunk in chunks:
            buffer += chunk
            if len(buffer) < enough:
                continue
            events, used, ended = self._decode_block(buffer)
            if used:
                yield events
                del buffer[1 : used + 1]
            enough = BLOCK_BYTES if used else min(2 * len(buffer), MAX_EVENT_BYTES + 1)
            if ended:
                self._read_end(buffer[1:], chunks)
                return
            if len(buffer) > MAX_EVENT_BYTES:
                raise TraceError(
                    f"{self.path}: no end of an event within {MAX_EVENT_BYTES >> 20} MiB; not a profiler's trace"
                )
        yield self._decode_rest(buffer)

    def _read_start(self, chunks: Iterator[bytes]) -> bytearray:
        """Return `[` and the text after the opening bracket of the events."""
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
                self._read_rank(text[: key.start()])
                self._in_object = True
                return text[key.end() - 1 :]
            if len(head) > MAX_EVENT_BYTES:
                break
        if not head:
            raise TraceError(f"{self.path} is empty; record the trace again")
        with self.path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
        raise TraceError(
            explain_other_format(self.path, bytes(head[:HEAD_BYTES]), packed=packed)
            or f'{self.path} is not a Kineto trace: no "traceEvents" in it. '
            'Export one with torch.profiler\'s export_chrome_trace("trace.json")'
        )

    def _read_rank(self, head: bytearray) -> None:
        rank, size = _RANK.search(head), _WORLD_SIZE.search(head)
        self.rank = int(rank[1]) if rank else self.rank
        self.world_size = int(size[1]) if size else None

    def _read_end(self, rest: bytearray, chunks: Iterable[bytes]) -> None:
        """Note what follows the end of the trace. Its other keys are of no use, except a second list of events.

        Reads to the end, where the checksum of a gzip file stands.
        """
        for chunk in chunks:
            if len(rest) <= MAX_EVENT_BYTES:
                rest += chunk
        left = bytes(rest)
        if self._in_object:
            keys, left = _read_object_keys(b'{"":0' + left)
            if keys is None:
                keys, left = _read_object_keys(b'{"":0' + self._make_valid_json(bytes(rest)))
            if keys is None:
                left = bytes(rest)
            elif not keys:
                self.problems.truncated = True
            elif "traceEvents" in keys:
                self.problems.behind = "a second list of events"
            elif len(rest) > MAX_EVENT_BYTES:
                self.problems.behind = f"more than {MAX_EVENT_BYTES >> 20} MiB behind its events"
        left = left.strip(_BLANK + b"\0")
        if left:
            begins = left[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
            self.problems.behind = f"more text behind its end, beginning {begins!r}"

    def _decode_block(self, buffer: bytearray) -> tuple[list[Event], int, bool]:
        """Return the events of the complete part of the buffer, the bytes used, and whether the array ended."""
        cuts = _find_cuts(buffer, len(buffer) - (1 << 13)) or _find_cuts(buffer)
        found = self._decode_until_cut(buffer, cuts)
        if found is not None:
            return *found, False
        ended = self._decode_until_end(buffer)
        if ended is None and cuts:
            comma = buffer.rindex(b",", 0, cuts[-1])
            mended = self._make_valid_json(bytes(buffer[1:comma]))
            buffer[1:comma] = mended
            events = self._decode_array(b"[" + mended + b"]")
            ended = self._decode_until_end(buffer) if events is None else None
            if ended is None:
                return self._decode_pieces(mended) if events is None else events, len(mended) + 1, False
        if ended is None:
            return [], 0, False
        events, end = ended
        return events, end - 1, True

    def _decode_until_cut(self, buffer: bytearray, cuts: list[int]) -> tuple[list[Event], int] | None:
        """Return the events up to one of the last places where an event may begin, and the bytes used."""
        for start_of_next in reversed(cuts[-6:]):
            comma = buffer.rindex(b",", 0, start_of_next)
            buffer[comma : comma + 1] = b"]"
            events = self._decode_array(memoryview(buffer)[: comma + 1])
            buffer[comma : comma + 1] = b","
            if events is not None:
                return events, comma
        return None

    def _decode_until_end(self, buffer: bytearray) -> tuple[list[Event], int] | None:
        """Return the events up to the end of the array and the bytes up to there; None if the buffer lacks it."""
        end = _find_array_end(buffer)
        if not end:
            return None
        events = self._decode_array(memoryview(buffer)[:end])
        if events is None:
            events = self._decode_array(self._make_valid_json(bytes(buffer[:end])))
        return None if events is None else (events, end)

    def _decode_rest(self, buffer: bytearray) -> list[Event]:
        """Return the last events; a file that ends before its bracket is marked as truncated."""
        ended = self._decode_until_end(buffer)
        if ended is None:
            buffer[1:] = self._make_valid_json(bytes(buffer[1:]))
            ended = self._decode_until_end(buffer)
        if ended is not None:
            self._read_end(buffer[ended[1] :], ())
            return ended[0]
        body = bytes(buffer[1:])
        tail = _TAIL.search(body)
        if tail:
            return self._decode_pieces(body[: tail.start()])
        self.problems.truncated = True
        events = self._decode_array(b"[" + body.rstrip(b", \t\r\n") + b"]")
        if events is not None:
            return events
        cuts = _find_cuts(buffer)
        if not cuts:
            return []
        found = self._decode_until_cut(buffer, cuts)
        return found[0] if found else self._decode_pieces(body[: cuts[-1] - 1].rstrip(b", \t\r\n"))

    def _decode_array(self, text: bytes | memoryview) -> list[Event] | None:
        """Return the events of a complete array and count those of wrong types; None if the text is no array."""
        try:
            return _DECODER.decode(text)
        except UNREADABLE as error:
            if not isinstance(error, msgspec.ValidationError):
                return None
        try:
            parts = _RAW.decode(text)
        except UNREADABLE:
            return None
        events = []
        for part in parts:
            try:
                events.append(_ONE.decode(part))
            except UNREADABLE:
                self.problems.unreadable_events += 1
        return events

    def _make_valid_json(self, text: bytes) -> bytes:
        """Return text with its strings and numbers made valid JSON; repairs in strings are noted."""
        fixed = text.decode("utf-8", errors="replace").encode()
        lone = next((m.start() for m in _BACKSLASH.finditer(fixed) if not m[1]), -1)
        if lone >= 0:
            self._record_repair(fixed, lone)
            # A backslash that JSON allows as it is, a lone one doubled, half a character as a replacement character.
            fixed = _BACKSLASH.sub(lambda m: m[0] if m[1] else b"\\ufffd" if m[2] else b"\\\\", fixed)
        if len(self.problems.repaired) < MAX_REPAIRED:
            control = _ODD_CONTROL.search(fixed)
            within = (_CONTROL.search(fixed, *string.span()) for string in _STRING.finditer(fixed))
            control = control or next(filter(None, within), None)
            if control:
                self._record_repair(fixed, control.start())
        fixed, numbers = _NOT_A_NUMBER.subn(rb"\1null", _CONTROL.sub(b" ", fixed))
        self.problems.not_numbers |= numbers > 0
        return fixed

    def _record_repair(self, text: bytes, at: int) -> None:
        """Keep the string around a byte that is not JSON as an example."""
        begin = text.rfind(b'"', max(0, at - SHOWN_BYTES), at) + 1 or max(0, at - SHOWN_BYTES)
        end = text.find(b'"', at + 1, at + SHOWN_BYTES)
        shown = text[begin : end if end > 0 else at + SHOWN_BYTES].decode("utf-8", "backslashreplace")
        if len(self.problems.repaired) < MAX_REPAIRED and shown not in self.problems.repaired:
            self.problems.repaired.append(shown)

    def _decode_pieces(self, body: bytes) -> list[Event]:
        """Return the events that can be saved from text between two events that is not JSON."""
        events, part = [], b""
        for piece in _BETWEEN.split(body.strip().removeprefix(b"{").removesuffix(b"}")):
            text = part + b"},{" + piece if part else piece
            event = self._decode_event(text)
            if event is None and part:  # what is broken before it must not take a good event along
                event = self._decode_event(piece)
                event = event if event is not None and event.ph else None
                self.problems.unreadable_events += event is not None
            if event is not None:
                events.append(event)
            elif text.count(b"},{") >= MAX_EVENT_PIECES:
                self.problems.unreadable_events += 1
                text = b""
            part = b"" if event is not None else text
        self.problems.unreadable_events += bool(part.strip())
        return events

    def _decode_event(self, inner: bytes) -> Event | None:
        """Return the event with this text between its brackets; None if it is not JSON."""
        try:
            return _ONE.decode(b"{" + inner + b"}")
        except msgspec.ValidationError:
            self.problems.unreadable_events += 1
            return Event()
        except UNREADABLE:
            return None


def _find_cuts(text: bytearray, start: int = 0) -> list[int]:
    """Return where an event may begin behind another one; text before `start` is skipped."""
    return [found.end() - 1 for found in _BETWEEN.finditer(text, start)]
