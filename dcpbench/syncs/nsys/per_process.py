"""Turn the tables of an nsys export into the columns of the scanner: one set for each process that used a GPU.

Ids of calls and work are those of a process, so that processes must not be mixed; each is a separate trace, as a rank is.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcpbench.errors import TraceError
from dcpbench.records.garbage_collection import stop_garbage_collector
from dcpbench.syncs.nsys import parquet_export, schema, sqlite_export
from dcpbench.syncs.nsys.backtraces import format_samples, read_chains, read_sample
from dcpbench.syncs.nsys.json_lines_export import HEAD, JsonLinesExport
from dcpbench.syncs.nsys.parquet_export import ParquetExport
from dcpbench.syncs.nsys.schema import ABSENT
from dcpbench.syncs.nsys.sqlite_export import SqliteExport
from dcpbench.syncs.traces.blocking import SYNCHRONISE, get_wait_kind
from dcpbench.syncs.traces.columns import NONE, Columns
from dcpbench.syncs.traces.intervals import find_containing, match_keys
from dcpbench.syncs.traces.other_formats import GZIP_MAGIC, explain_database
from dcpbench.syncs.traces.reading import ReadProblems, read_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from dcpbench.syncs.nsys.schema import Block, Export, Ints

_HEAD_BYTES = 1 << 12
_LAUNCHES = ("Launch", "Memcpy", "Memset")
_NO_KERNEL = re.compile("Memcpy|Memset")
_NS_PER_US = 1000.0
_MAX_TABLE = 1 << 16  # range of ids up to which a table of all numbers is faster than sorting
_STREAM_BITS = 32


def is_export(path: Path) -> bool:
    """Return whether a file or folder is an nsys export, whole or damaged, or another SQLite database."""
    if path.is_dir():
        return parquet_export.is_folder(path)
    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if head.startswith(GZIP_MAGIC):
                file.seek(0)
                head = next(read_chunks(path, file, ReadProblems()), b"")
    except (OSError, TraceError):  # the reader of traces reports it
        return False
    return head.startswith(sqlite_export.MAGIC) or HEAD.match(head) is not None


def read_export(path: Path, progress: Callable[[int], None] | None = None) -> list[tuple[str, Columns]]:
    """Return the columns of each process that used a GPU, with its name; one set without a name if none or one did.

    Raises:
        TraceError: The file cannot be opened, or is no export of nsys.
    """
    problems = ReadProblems()
    try:
        with stop_garbage_collector(), contextlib.ExitStack() as opened:
            found = _Reader(_open(path, problems, progress, opened), problems, progress).read()
    except OSError as e:
        raise TraceError(f"{path} cannot be read: {e.strerror or e}") from None
    if not found:
        raise TraceError(f"{path} holds no event of an nsys export; record with nsys profile --trace=cuda,nvtx")
    return found


def _open(
    path: Path, problems: ReadProblems, progress: Callable[[int], None] | None, opened: contextlib.ExitStack
) -> Export:
    if path.is_dir():
        return ParquetExport(path, problems)
    with path.open("rb") as file:
        is_database = file.read(len(sqlite_export.MAGIC)) == sqlite_export.MAGIC
    if not is_database:
        return JsonLinesExport(path, problems, progress)
    export = opened.enter_context(contextlib.closing(SqliteExport(path, problems)))
    if not export.tables & {*schema.EVENTS, schema.STRINGS}:
        raise TraceError(explain_database(path, export.tables))
    return export


class _Process:
    """Hold what was read of one process."""

    def __init__(self, problems: ReadProblems) -> None:
        self.columns = Columns(problems, recorder="nsys")
        self.calls: list[Block] = []
        self.backtraces: list[Ints] = []  # rows (thread, correlation, call chain)
        self.ranges: list[Block] = []
        self.end = -np.inf  # end of the last call or work, where ranges end that nothing closed
        self.names: dict[int, int] = {}  # number in `columns` of each id of a string
        self._ranges: dict[str | bytes | None, tuple[int, bool]] = {}

    def number_range(self, text: str | bytes | None) -> tuple[int, bool]:
        """Return the number of an NVTX range's name, and whether the range is an operator."""
        found = self._ranges.get(text)
        if found is None:
            name, kind = schema.parse_range(_decode(text))
            found = self._ranges[text] = self.columns.name_ids[name or "(no name)"], kind == "ops"
        return found


class _Sample(NamedTuple):
    time: int
    thread: int
    frames: list[tuple[int, int, int]]


class _Reader:
    def __init__(self, export: Export, problems: ReadProblems, progress: Callable[[int], None] | None) -> None:
        self.export, self.problems = export, problems
        self.progress = progress if not isinstance(export, JsonLinesExport) else None
        self.processes: dict[int, _Process] = {}
        self.strings: dict[int, str] = {}

    def read(self) -> list[tuple[str, Columns]]:
        for block in self._read_blocks(schema.CALLS):
            self._add_calls(block)
        for table in (schema.KERNELS, schema.COPIES, schema.FILLS, schema.GRAPHS):
            for block in self._read_blocks(table):
                self._add_work(table, block)
        for block in self._read_blocks(schema.SYNCS):
            self._add_syncs(block)
        samples = self._read_ranges()
        self._label_threads()
        self._note_warnings()
        for process in self.processes.values():
            if process.calls:
                _add_calls(self.export, process, samples)
        kept = {key: p for key, p in self.processes.items() if _uses_gpu(p)} or self._take_first()
        named = len(kept) > 1
        return [(f"process {key & schema.ID_MASK}" if named else "", _finish(p)) for key, p in sorted(kept.items())]

    def _take_first(self) -> dict[int, _Process]:
        """Return the process with most calls, where none used a GPU: it says what is missing."""
        most = max(self.processes, key=lambda key: len(self.processes[key].calls), default=None)
        return {} if most is None else {most: self.processes[most]}

    def _read_blocks(self, table: str, texts: tuple[str, ...] = ()) -> Iterator[Block]:
        for block in self.export.read_blocks(table, texts):
            if self.progress:
                self.progress(len(block["start"]))
            yield block

    def _split(self, block: Block, ids: Ints) -> Iterator[tuple[_Process, Block]]:
        """Yield the rows of each process. Work without one belongs to the only process there is."""
        keys = schema.get_process(ids)
        if len(self.processes) == 1:
            keys = np.where(keys == ABSENT, next(iter(self.processes)), keys)
        first = int(keys[0])
        for key in [first] if (keys == first).all() else np.unique(keys).tolist():
            if key not in self.processes:
                self.processes[key] = _Process(self.problems)
            rows = np.flatnonzero(keys == key)
            yield self.processes[key], block if len(rows) == len(keys) else _take_rows(block, rows)

    def _take_timed(self, block: Block) -> Block:
        """Return the rows with a start; others are counted as unreadable."""
        missing = block["start"] == ABSENT
        if not missing.any():
            return block
        self.problems.unreadable_events += int(missing.sum())
        return _take_rows(block, np.flatnonzero(~missing))

    def _number_names(self, process: _Process, ids: Ints, convert: Callable[[str], str]) -> NDArray[np.int32]:
        """Return the numbers of names by the ids of their strings; an event without its string is unreadable."""
        known = process.names

        def number(unique: list[int]) -> list[int]:
            new = [i for i in unique if i not in known]
            missing = np.array([i for i in new if i not in self.strings], np.int64)
            if len(missing):
                self.strings |= self.export.read_strings(missing)
            for i in new:
                known[i] = process.columns.name_ids[convert(self.strings.get(i, ""))]
            return [known[i] for i in unique]

        return _map_ids(ids, number)

    def _add_calls(self, block: Block) -> None:
        block = self._take_timed(block)
        if not len(block["start"]):
            return
        classes = block["eventClass"]
        calls = np.isin(classes, (ABSENT, schema.RUNTIME, schema.DRIVER, schema.CUDA_API))
        other = ~calls & ~np.isin(classes, (schema.BACKTRACE, *schema.OTHER_CLASSES))
        self.problems.unreadable_events += int(other.sum())
        for process, part in self._split(block, block["globalTid"]):
            is_call = np.isin(part["eventClass"], (ABSENT, schema.RUNTIME, schema.DRIVER, schema.CUDA_API))
            traced = np.flatnonzero(part["eventClass"] == schema.BACKTRACE)
            if len(traced):
                keys = [part[name][traced] for name in ("globalTid", "correlationId", "callchainId")]
                process.backtraces.append(np.stack(keys, 1))
            rows = part if is_call.all() else {name: column[is_call] for name, column in part.items()}
            if not len(rows["start"]):
                continue
            name = self._number_names(process, rows["nameId"], self._convert_call)
            process.columns.driver_names |= set(np.unique(name[rows["eventClass"] == schema.DRIVER]).tolist())
            process.end = max(process.end, float(rows["end"].max()) / _NS_PER_US)
            process.calls.append(
                {
                    "start": rows["start"] / _NS_PER_US,
                    "length": _compute_length(rows),
                    "name": name,
                    "thread": self._number_threads(process, rows["globalTid"]),
                    "correlation": _clean_ids(rows["correlationId"]),
                    "chain": _clean_ids(rows["callchainId"]),
                    "globalTid": rows["globalTid"],
                }
            )

    def _convert_call(self, name: str) -> str:
        plain = schema.normalise_call(name)
        if schema.is_damaged_call(plain):
            self.problems.unreadable_events += 1
        return plain

    def _number_threads(self, process: _Process, ids: Ints) -> NDArray[np.int32]:
        columns = process.columns
        return _map_ids(ids, lambda unique: [columns.thread_ids[_parse_thread(i)] for i in unique])

    def _add_work(self, table: str, block: Block) -> None:
        block = self._take_timed(block)
        if table == schema.COPIES:
            block = _take_rows(block, np.flatnonzero(~np.isin(block["copyKind"], schema.MIGRATIONS)))
        if not len(block["start"]):
            return
        for process, rows in self._split(block, block["globalPid"]):
            if table == schema.KERNELS:
                name = self._number_names(process, rows["demangledName"], str)
            else:
                name = _number_rows(process.columns, rows, table)
            columns = process.columns
            columns.devices |= set(np.unique(rows["deviceId"]).tolist()) - {ABSENT}
            process.end = max(process.end, float(rows["end"].max()) / _NS_PER_US)
            count = len(rows["start"])
            columns.add_rows(
                "gpu",
                rows["start"] / _NS_PER_US,
                _compute_length(rows),
                name=name,
                thread=_number_streams(columns, rows["deviceId"], rows["streamId"]),
                correlation=_clean_ids(rows["correlationId"]),
                bytes=np.where(rows["bytes"] < 0, NONE, rows["bytes"]) if "bytes" in rows else np.full(count, NONE),
            )

    def _add_syncs(self, block: Block) -> None:
        block = self._take_timed(block)
        if not len(block["start"]):
            return
        for process, rows in self._split(block, block["globalPid"]):
            kinds = rows["syncType"]
            alone = (kinds == schema.STREAM_WAIT) & (rows["eventId"] == schema.NO_EVENT)
            rows["syncType"] = np.where(alone, schema.STREAM_SYNC, kinds)
            process.columns.add_rows(
                "syncs",
                rows["start"] / _NS_PER_US,
                _compute_length(rows),
                name=_number_rows(process.columns, rows, schema.SYNCS),
                external=np.full(len(kinds), NONE),
                correlation=_clean_ids(rows["correlationId"]),
            )

    def _read_ranges(self) -> list[_Sample]:
        """Read NVTX ranges, and return the samples of Python stacks."""
        domains: dict[tuple[int, int], str] = {}
        for block in self._read_blocks(schema.RANGES, ("text",)):
            self._note_domains(block, domains)
            timed = self._take_timed(block)
            kinds = timed["eventType"]
            ranges = np.isin(kinds, (schema.PUSH_POP, schema.START_END))
            near = [kind ^ (1 << bit) for kind in (schema.PUSH_POP, schema.START_END) for bit in range(7)]
            damaged = ~ranges & np.isin(kinds, near) & ~np.isin(kinds, (schema.MARK, schema.DOMAIN, *schema.OTHER_NVTX))
            self.problems.unreadable_events += int(damaged.sum())
            rows = np.flatnonzero(ranges)
            if not len(rows):
                continue
            of_ranges = _take_rows(timed, rows)
            for process, part in self._split(of_ranges, of_ranges["globalTid"]):
                process.ranges.append(self._make_ranges(process, part))
        own = {key for key, name in domains.items() if name in schema.OWN_DOMAINS}
        for key, process in self.processes.items():
            _add_ranges(process, {domain for of, domain in own if of == key})
        sampled = {key for key, name in domains.items() if name == schema.SAMPLING_DOMAIN}
        return self._read_samples(sampled) if sampled else []

    def _note_domains(self, block: Block, domains: dict[tuple[int, int], str]) -> None:
        for row in np.flatnonzero(block["eventType"] == schema.DOMAIN).tolist():
            text = block["text"][row]
            if text is None and block["textId"][row] != ABSENT:
                number = int(block["textId"][row])
                text = self.export.read_strings(np.array([number])).get(number)
            process = int(schema.get_process(block["globalTid"][row : row + 1])[0])
            domains[process, int(block["domainId"][row])] = _decode(text)

    def _make_ranges(self, process: _Process, rows: Block) -> Block:
        """Return the columns of some ranges, their names still as texts, because only their domain shows if they count."""
        ids = rows["textId"]
        lacking = [i for i, text in zip(ids.tolist(), rows["text"], strict=True) if text is None and i != ABSENT]
        missing = np.array(sorted({i for i in lacking if i not in self.strings}), np.int64)
        if len(missing):
            self.strings |= self.export.read_strings(missing)
        texts = [
            self.strings.get(i) if text is None else text for text, i in zip(rows["text"], ids.tolist(), strict=True)
        ]
        nameless = sum(i != ABSENT and i not in self.strings for i in lacking)
        self.problems.unreadable_events += nameless
        numbers = [process.number_range(text) for text in texts]
        return {
            "start": rows["start"] / _NS_PER_US,
            "end": np.where(rows["end"] == ABSENT, np.nan, rows["end"] / _NS_PER_US),
            "name": np.array([number for number, _ in numbers], np.int32),
            "thread": self._number_threads(process, rows["globalTid"]),
            "domain": rows["domainId"],
            "is_op": np.array([is_op for _, is_op in numbers], bool),
        }

    def _read_samples(self, domains: set[tuple[int, int]]) -> list[_Sample]:
        found = []
        for block in self.export.read_blocks(schema.RANGES, ("binaryData",)):
            keys = zip(schema.get_process(block["globalTid"]).tolist(), block["domainId"].tolist(), strict=True)
            marks = (block["eventType"] == schema.MARK).tolist()
            for row, (key, is_mark) in enumerate(zip(keys, marks, strict=True)):
                if is_mark and key in domains and (frames := read_sample(block["binaryData"][row])):
                    found.append(_Sample(int(block["start"][row]), int(block["globalTid"][row]), frames))
        return found

    def _note_warnings(self) -> None:
        for block in self.export.read_blocks(schema.DIAGNOSTICS, ("text",)):
            for key, text in zip(schema.get_process(block["globalPid"]).tolist(), block["text"], strict=True):
                process = self.processes.get(key)
                if process and schema.INCOMPLETE in _decode(text):
                    process.columns.warnings = [f"nsys warns of this recording: {schema.INCOMPLETE}."]

    def _label_threads(self) -> None:
        for block in self.export.read_blocks(schema.THREAD_NAMES):
            names = self.export.read_strings(np.unique(block["nameId"]))
            for thread, name in zip(block["globalTid"].tolist(), block["nameId"].tolist(), strict=True):
                process = self.processes.get(thread >> schema.PROCESS_SHIFT)
                if process and name in names:
                    columns = process.columns
                    columns.labels[columns.thread_ids[_parse_thread(thread)]] = names[name]


def _add_calls(export: Export, process: _Process, samples: list[_Sample]) -> None:
    """Add the calls of a process, those that may wait with their Python frames."""
    columns, parts = process.columns, process.calls
    calls = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    parts[1:] = []
    chains = _find_chains(process, calls)
    may_wait = columns.match_names(get_wait_kind)[calls["name"]]
    traced = np.flatnonzero(may_wait & (chains != NONE))
    texts = read_chains(export, np.unique(chains[traced])) if len(traced) else {}
    stack = np.full(len(may_wait), NONE, np.int32)
    stack[traced] = [columns.stack_ids[texts.get(chain, "")] for chain in chains[traced].tolist()]
    alone = np.flatnonzero(may_wait & (stack == NONE))
    for call, text in _find_sampled(export, calls, alone, samples).items():
        stack[call] = columns.stack_ids[text]
    columns.add_rows(
        "calls",
        calls["start"],
        calls["length"],
        name=calls["name"],
        thread=calls["thread"],
        external=np.full(len(stack), NONE),
        correlation=calls["correlation"],
        **({"stack": stack} if (stack != NONE).any() else {}),
    )


def _find_chains(process: _Process, calls: Block) -> Ints:
    """Return the call chain of each call, its own or that of the row that repeats it, or NONE."""
    chains: Ints = calls["chain"]
    if process.backtraces:
        rows = np.concatenate(process.backtraces)
        threads, ids = rows[:, 0] & schema.ID_MASK, rows[:, 1]
        at = match_keys(_pair(threads, ids), _pair(calls["globalTid"] & schema.ID_MASK, calls["correlation"]))
        chains = np.where((chains == NONE) & (at >= 0), _clean_ids(rows[:, 2])[at], chains)
    return chains


def _pair(threads: Ints, ids: Ints) -> Ints:
    """Return a key of a thread and the correlation of a call; NONE without one."""
    return np.where((ids <= 0) | (ids >= 1 << 38), NONE, (threads << 38) | ids)


def _find_sampled(export: Export, calls: Block, rows: Ints, samples: list[_Sample]) -> dict[int, str]:
    """Return the frames of the calls, of these rows, during which their thread was sampled."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    by_thread: defaultdict[int, list[_Sample]] = defaultdict(list)
    for sample in samples:
        by_thread[sample.thread].append(sample)
    for thread, of_thread in by_thread.items():
        mine = rows[calls["globalTid"][rows] == thread]
        moments = np.array([sample.time for sample in of_thread]) / _NS_PER_US
        start, length = calls["start"][mine], calls["length"][mine]
        moment, row = find_containing(start, start + length, moments)
        for sample, call in zip(moment.tolist(), mine[row].tolist(), strict=True):
            found.setdefault(call, of_thread[sample].frames)
    return format_samples(export, found)


def _add_ranges(process: _Process, left_out: set[int]) -> None:
    """Add the ranges to the columns, without those of these domains; a range that nothing closed ends with the recording."""
    for part in process.ranges:
        for kind, chosen in (("ops", part["is_op"]), ("ranges", ~part["is_op"])):
            rows = np.flatnonzero(chosen & ~np.isin(part["domain"], list(left_out)))
            if not len(rows):
                continue
            start, end = part["start"][rows], part["end"][rows]
            end = np.where(np.isnan(end), np.maximum(start, process.end), end)
            nothing = {"external": np.full(len(rows), NONE), "stack": np.full(len(rows), NONE, np.int32)}
            shared = {"name": part["name"][rows], "thread": part["thread"][rows]}
            process.columns.add_rows(kind, start, end - start, **shared, **(nothing if kind == "ops" else {}))
    process.ranges.clear()


def _finish(process: _Process) -> Columns:
    columns = process.columns.close()
    lost = _list_lost_work(columns)
    columns.problems.lost += [clause for clause in lost if clause not in columns.problems.lost]
    return columns


def _uses_gpu(process: _Process) -> bool:
    """Return whether a process launched or awaited GPU work; others, such as a server's front end, only ask for devices."""
    columns = process.columns
    uses = columns.match_names(
        lambda name: any(word in name for word in _LAUNCHES) or get_wait_kind(name) in SYNCHRONISE
    )
    return bool(columns.parts["gpu"]) or any(bool(uses[part["name"]].any()) for part in process.calls)


def _list_lost_work(columns: Columns) -> list[str]:
    """Return clauses about kinds of work of which calls are there and none of the work, as where a table was not exported.

    Calls while a CUDA graph is captured do no work.
    """
    calls, gpu = columns.tables["calls"], columns.tables["gpu"]
    if not len(gpu) or not len(calls):
        return []
    order = np.lexsort((calls.start, calls.thread))
    begins = columns.match_names(lambda name: "StreamBeginCapture" in name)[calls.name[order]]
    ends = columns.match_names(lambda name: "StreamEndCapture" in name)[calls.name[order]]
    captured = np.zeros(len(calls), bool)
    captured[order] = np.cumsum(begins.astype(np.int64) - ends) > 0
    clauses = []
    for what, table, word in (("copies", schema.COPIES, "Memcpy"), ("launches", schema.KERNELS, "LaunchKernel")):
        called = columns.match_names(re.compile(word).search)[calls.name] & ~captured
        copies = columns.match_names(_NO_KERNEL.match)[gpu.name]
        if called.any() and not (copies if word == "Memcpy" else ~copies).any():
            clauses.append(
                f"holds {int(called.sum()):,} calls of {what} and none of their work on the GPU, so that {table} was lost or not "
                "exported: export all tables"
            )
    return clauses


def _map_ids(ids: Ints, number: Callable[[list[int]], list[int]]) -> NDArray[np.int32]:
    """Return the numbers of ids, of which each is numbered once."""
    low, high = int(ids.min()), int(ids.max())
    if high - low < _MAX_TABLE:
        unique = np.flatnonzero(np.bincount(ids - low))
        table = np.zeros(high - low + 1, np.int32)
        table[unique] = number((unique + low).tolist())
        return table[ids - low]
    unique, inverse = np.unique(ids, return_inverse=True)
    return np.array(number(unique.tolist()), np.int32)[inverse]


def _number_streams(columns: Columns, devices: Ints, streams: Ints) -> NDArray[np.int32]:
    """Return the numbers of streams; ids of streams have 32 bits."""

    def number(unique: list[int]) -> list[int]:
        return [columns.thread_ids[f"GPU {key >> _STREAM_BITS}", key & (1 << _STREAM_BITS) - 1] for key in unique]

    return _map_ids((devices << _STREAM_BITS) | (streams & (1 << _STREAM_BITS) - 1), number)


def _decode(text: str | bytes | None) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text or ""


def _take_rows(block: Block, rows: Ints) -> Block:
    """Return these rows of columns, which are arrays or lists."""
    return {
        name: [column[i] for i in rows.tolist()] if isinstance(column, list) else column[rows]
        for name, column in block.items()
    }


def _compute_length(rows: Block) -> NDArray[np.float64]:
    """Return the durations in µs, NaN for an event without an end."""
    return np.where(rows["end"] == ABSENT, np.nan, (rows["end"] - rows["start"]) / _NS_PER_US)


def _clean_ids(ids: Ints) -> Ints:
    """Return the ids, NONE for a missing one; 0 is none."""
    return np.where((ids <= 0) | (ids >= 1 << 62), NONE, ids)


def _parse_thread(global_tid: int) -> tuple[int, int]:
    """Return the process and the thread of a globalTid."""
    return global_tid >> schema.PROCESS_SHIFT & schema.ID_MASK, global_tid & schema.ID_MASK


_NAMES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {  # columns of which the name of a row is made, and how
    schema.COPIES: (("copyKind", "srcKind", "dstKind"), schema.format_copy),
    schema.FILLS: (("memKind",), schema.format_fill),
    schema.GRAPHS: (("streamId",), lambda _: "CUDA graph"),
    schema.SYNCS: (("syncType",), schema.format_sync),
}


def _number_rows(columns: Columns, rows: Block, table: str) -> NDArray[np.int32]:
    """Return the numbers of the names of these rows; unknown kinds have none, which counts as unreadable."""
    names, format_name = _NAMES[table]
    number = functools.cache(lambda *key: columns.name_ids[format_name(*key)])
    keys = zip(*(rows[name].tolist() for name in names), strict=True)
    return np.array([number(*key) for key in keys], np.int32)
