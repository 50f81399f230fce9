"""Read the JSON lines of nsys: `nsys export --type jsonlines`, an event or a list of strings on each line.

Its keys are not documented. They are those that public readers use: `TraceProcessEvent` for calls, `CudaEvent` with `kernel`,
`memcpy`, `memset` or `sync`, `NvtxEvent`, and `data` for the strings, which have their places in the list as ids.
"""

from __future__ import annotations

import base64
import binascii
import html
import re
from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.errors import TraceError
from dcpbench.records.lines import UNREADABLE
from dcpbench.syncs.nsys import schema
from dcpbench.syncs.nsys.schema import ABSENT, BLOCK_ROWS
from dcpbench.syncs.traces.reading import MAX_EVENT_BYTES, read_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dcpbench.syncs.nsys.schema import Block, Ints
    from dcpbench.syncs.traces.reading import ReadProblems

HEAD = re.compile(rb'\s*\{\s*"(?:Type|data|(?:TraceProcess|Cuda|Nvtx)Event)"\s*:')  # new versions write strings first
AGAIN = "export it again with `nsys export --type jsonlines`"
_TYPES = {  # types of lines that must hold an event of their kind
    48: schema.CALLS,
    59: schema.RANGES,
    60: schema.RANGES,
    79: schema.KERNELS,
    80: schema.COPIES,
    106: schema.SYNCS,
}


class _Call(msgspec.Struct, frozen=True, gc=False):
    start: int | None = msgspec.field(name="startNs", default=None)
    end: int | None = msgspec.field(name="endNs", default=None)
    correlation: int | None = msgspec.field(name="correlationId", default=None)
    event_class: int | None = msgspec.field(name="eventClass", default=None)
    name: int | None = None
    thread: int | None = msgspec.field(name="globalTid", default=None)


class _Kernel(msgspec.Struct, frozen=True, gc=False):
    name: int | None = msgspec.field(name="demangledName", default=None)


class _Copy(msgspec.Struct, frozen=True, gc=False):
    bytes: int | None = msgspec.field(name="sizebytes", default=None)
    kind: int | None = msgspec.field(name="copyKind", default=None)
    source: int | None = msgspec.field(name="srcKind", default=None)
    target: int | None = msgspec.field(name="dstKind", default=None)


class _Fill(msgspec.Struct, frozen=True, gc=False):
    bytes: int | None = msgspec.field(name="sizebytes", default=None)
    kind: int | None = msgspec.field(name="memKind", default=None)


class _Sync(msgspec.Struct, frozen=True, gc=False):
    kind: int | str | None = msgspec.field(name="syncType", default=None)
    event: int | None = msgspec.field(name="eventId", default=None)


class _Work(msgspec.Struct, frozen=True, gc=False):
    start: int | None = msgspec.field(name="startNs", default=None)
    end: int | None = msgspec.field(name="endNs", default=None)
    correlation: int | None = msgspec.field(name="correlationId", default=None)
    device: int | None = msgspec.field(name="deviceId", default=None)
    stream: int | None = msgspec.field(name="streamId", default=None)
    process: int | None = msgspec.field(name="globalPid", default=None)
    kernel: _Kernel | None = None
    memcpy: _Copy | None = None
    memset: _Fill | None = None
    sync: _Sync | None = None
    graph: dict[str, msgspec.Raw] | None = None


class _Blob(msgspec.Struct, frozen=True, gc=False):
    data: str | None = msgspec.field(name="Data", default=None)


class _Payload(msgspec.Struct, frozen=True, gc=False):
    blobs: list[_Blob] = msgspec.field(name="BinaryData", default_factory=list)


class _Range(msgspec.Struct, frozen=True, gc=False):
    kind: int | None = msgspec.field(name="Type", default=None)
    start: int | None = msgspec.field(name="Timestamp", default=None)
    end: int | None = msgspec.field(name="EndTimestamp", default=None)
    thread: int | None = msgspec.field(name="GlobalTid", default=None)
    domain: int | None = msgspec.field(name="DomainId", default=None)
    text: str | None = msgspec.field(name="Text", default=None)
    text_id: int | None = msgspec.field(name="TextId", default=None)
    payload: _Payload | None = msgspec.field(name="Payload", default=None)


class _Line(msgspec.Struct, frozen=True, gc=False):
    type: int | str | None = msgspec.field(name="Type", default=None)
    call: _Call | None = msgspec.field(name="TraceProcessEvent", default=None)
    work: _Work | None = msgspec.field(name="CudaEvent", default=None)
    range: _Range | None = msgspec.field(name="NvtxEvent", default=None)
    strings: list[str] | None = msgspec.field(name="data", default=None)


_DECODER = msgspec.json.Decoder(_Line, strict=False)


class JsonLinesExport:
    """Read the whole file, and give its tables: times and ids in arrays, 8 bytes each."""

    def __init__(self, path: Path, problems: ReadProblems, progress: Callable[[int], None] | None = None) -> None:
        self.path, self.problems = path, problems
        self._columns = {table: [array("q") for _ in schema.COLUMNS[table]] for table in schema.EVENTS}
        self._texts: list[str | None] = []
        self._payloads: list[bytes | None] = []
        self._strings: list[str] | None = None
        self._known: dict[str, str] = {}
        for lines in self._read_lines():
            for line in lines:
                self._add(line)
            if progress:
                progress(len(lines))
        if self._strings is None:
            problems.lost.append(f"holds no list of strings, so that it ends early and calls have no names: {AGAIN}")

    def _read_lines(self) -> Iterator[list[_Line]]:
        rest = b""
        with self.path.open("rb") as file:
            for chunk in read_chunks(self.path, file, self.problems):
                text = rest + chunk
                end = text.rfind(b"\n") + 1
                if end:
                    yield self._decode(text[:end])
                rest = text[end:]
                if len(rest) > MAX_EVENT_BYTES:
                    raise TraceError(
                        f"{self.path}: no end of a line within {MAX_EVENT_BYTES >> 20} MiB; not an export of nsys"
                    )
        if rest.strip():
            if not _is_json(rest):
                self.problems.truncated = True
            else:
                yield self._decode(rest)

    def _decode(self, text: bytes) -> list[_Line]:
        try:
            return _DECODER.decode_lines(text)
        except UNREADABLE:
            found = []
            for line in text.splitlines():
                try:
                    found += [_DECODER.decode(line)] if line.strip() else []
                except UNREADABLE:
                    self.problems.unreadable_events += 1
            return found

    def _add(self, line: _Line) -> None:
        if line.call is not None:
            call = line.call
            self._append(
                schema.CALLS, call.start, call.end, call.event_class, call.thread, call.correlation, call.name, None
            )
        elif line.work is not None:
            self._add_work(line.work)
        elif line.range is not None:
            self._add_range(line.range)
        elif line.strings is not None:
            self._strings = [*(self._strings or ()), *line.strings]
        elif line.type in _TYPES:
            self.problems.unreadable_events += 1

    def _append(self, table: str, *values: int | None) -> None:
        try:
            for column, value in zip(self._columns[table], values, strict=True):
                column.append(ABSENT if value is None else value)
        except OverflowError:
            self.problems.unreadable_events += 1
            rows = min(map(len, self._columns[table]))
            for column in self._columns[table]:
                del column[rows:]

    def _add_work(self, work: _Work) -> None:
        shared = (work.start, work.end, work.device, work.stream, work.correlation, work.process)
        if work.kernel is not None:
            self._append(schema.KERNELS, *shared, work.kernel.name)
        elif work.memcpy is not None:
            copy = work.memcpy
            self._append(schema.COPIES, *shared, copy.bytes, copy.kind, copy.source, copy.target)
        elif work.memset is not None:
            self._append(schema.FILLS, *shared, work.memset.bytes, work.memset.kind)
        elif work.sync is not None:
            kind = _find_sync_type(work.sync.kind)
            self._append(schema.SYNCS, work.start, work.end, work.correlation, work.process, kind, work.sync.event)
        elif work.graph is not None:
            self._append(schema.GRAPHS, *shared)

    def _add_range(self, found: _Range) -> None:
        blob = found.payload.blobs[0].data if found.payload and found.payload.blobs else None
        self._append(schema.RANGES, found.start, found.end, found.kind, found.thread, found.domain, found.text_id)
        if len(self._columns[schema.RANGES][0]) > len(self._texts):
            text = None if found.text is None else html.unescape(found.text)
            self._texts.append(text if text is None else self._known.setdefault(text, text))
            self._payloads.append(_decode_blob(blob))

    def read_blocks(self, table: str, texts: Sequence[str] = ()) -> Iterator[Block]:
        """Yield the rows of a table, its COLUMNS and columns of texts or bytes; nothing if it is not there."""
        columns = [np.frombuffer(column, np.int64) for column in self._columns.get(table, ()) if len(column)]
        for first in range(0, len(columns[0]) if columns else 0, BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            block: Block = {name: column[rows] for name, column in zip(schema.COLUMNS[table], columns, strict=True)}
            for name in texts:
                block[name] = (self._texts if name == "text" else self._payloads)[rows]
            yield block

    def read_strings(self, ids: Ints) -> dict[int, str]:
        """Return the strings with these ids, as far as they are there."""
        strings = self._strings or []
        return {i: html.unescape(strings[i]) for i in ids.tolist() if 0 <= i < len(strings)}


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True


def _find_sync_type(name: int | str | None) -> int | None:
    """Return the number of a type of synchronisation, which the export names or numbers."""
    if not isinstance(name, str):
        return name
    ends = ("UNKNOWN", "EVENT_SYNCHRONIZE", "STREAM_WAIT_EVENT", "STREAM_SYNCHRONIZE", "CONTEXT_SYNCHRONIZE")
    return next((number for number, end in enumerate(ends) if name.endswith(end)), None)


def _decode_blob(text: str | None) -> bytes | None:
    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
