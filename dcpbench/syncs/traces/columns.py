"""Store a trace in columns: one NumPy array per field and kind of event, with names as numbers. 30 to 50 bytes per event."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dcpbench.records.garbage_collection import stop_garbage_collector
from dcpbench.syncs.steps import STEP
from dcpbench.syncs.traces.coverage import is_one_bit_off
from dcpbench.syncs.traces.reading import Args, Event, ReadProblems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

MAX_TIME_US = 1e20  # times beyond are no times; nanoseconds since 1970 taken for microseconds still are
NONE = -1  # number of what is not there
_CATEGORIES = {
    "ops": "cpu_op operator",
    "python": "python_function",
    "ranges": "user_annotation",
    "calls": "cuda_runtime cuda_driver runtime hip_runtime xpu_runtime xpu_driver privateuse1_runtime",
    "gpu": "kernel gpu_memcpy gpu_memset memcpy memset concurrent_kernel",
    "syncs": "cuda_sync xpu_sync",
}
CATEGORIES = {name: table for table, names in _CATEGORIES.items() for name in names.split()}  # lower-case category
TIMED = ("calls", "gpu", "syncs")  # kinds of events with durations from which costs are computed
CAUSES = ("calls", "gpu", "syncs", "ranges")  # tables with waits, objects or steps; no event may be lost silently
ACCELERATORS = re.compile(  # categories of other accelerators' events
    r"(?:async_)?(?:mtia|glow|hpu|npu|tpu|xla|xpu|neuron|musa|mlu|gcu|privateuse1)(?:_|$)", re.IGNORECASE
)
DRIVER = frozenset({"cuda_driver", "xpu_driver"})
Recorder = Literal["torch.profiler", "nsys"]
_NO_ARGS = Args()


class Ids(dict[Any, int]):
    """Number things in the order in which they are first seen."""

    def __missing__(self, key: object) -> int:
        number = self[key] = len(self)
        return number


class Threads(dict[tuple[object, object], int]):
    """Number pairs (pid, tid); a string of digits is the same as its number, as traces of 2021 hold both."""

    def __init__(self) -> None:
        self.numbers = Ids()

    def __missing__(self, key: tuple[object, object]) -> int:
        plain = tuple(int(v) if isinstance(v, str) and v.isdecimal() else v for v in key)
        number = self[key] = self.numbers[plain]
        return number


class CallStacks(Ids):
    """Number call stacks; NONE for a stack without frames."""

    def __missing__(self, key: object) -> int:
        return super().__missing__(key) if str(key).strip("; ") else NONE


@dataclasses.dataclass
class Table:
    """Hold events of one kind.

    Times are microseconds on the trace's clock; columns that a kind does not use are empty. `thread` numbers (pid,
    tid), which for GPU work is its stream; `external`, `correlation` and `bytes` are -1 if the event has none.
    """

    start: Floats
    end: Floats
    name: Ints
    thread: Ints
    external: Ints
    correlation: Ints
    bytes: Ints
    stack: Ints  # call stack of an op, and of a call where the recorder has it: a number in `Columns.stacks`

    def __len__(self) -> int:
        return len(self.start)

    def take(self, which: NDArray[Any]) -> Table:
        """Return the rows that a mask or an index array selects."""
        columns = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Table(**{name: c[which] if len(c) else c for name, c in columns.items()})


FIELDS = {  # columns of each table besides start and end
    "ops": ("name", "thread", "external", "stack"),
    "python": ("name", "thread"),
    "ranges": ("name", "thread"),
    "calls": ("name", "thread", "external", "correlation"),
    "gpu": ("name", "thread", "correlation", "bytes"),
    "syncs": ("name", "external", "correlation"),
}


class Columns:
    """Hold all that a scan needs of a trace, after `add` has seen every block and `close` was called."""

    tables: dict[str, Table]
    names: list[str]  # names of events by number
    stacks: list[str]  # call stacks of ops and calls by number, innermost frame first, parted by `;`
    thread_names: list[str]  # names of threads and streams by number
    repeated: int  # events that stood in the file once more, and are left out
    driver_calls: int  # calls of the driver API

    def __init__(self, problems: ReadProblems, recorder: Recorder = "torch.profiler") -> None:
        self.problems, self.recorder = problems, recorder
        self.driver_names: set[int] = set()  # numbers of the names of calls of the driver API
        self.warnings: list[str] = []  # sentences of the recorder about the recording
        self._begun = False
        self.devices: set[object] = set()  # GPUs that had work
        self.foreign: set[str] = set()  # categories of events of other accelerators
        self.name_ids, self.stack_ids, self.thread_ids, self._odd_ids = Ids(), CallStacks(), Threads(), Ids()
        self.labels: dict[int, str] = {}  # names of threads, by their numbers
        self.parts: dict[str, list[dict[str, NDArray[Any]]]] = {kind: [] for kind in FIELDS}

    def add_events(self, events: list[Event]) -> None:
        """Take what is needed of a block. An empty first event is none: RPD, a profiler of ROCm, begins its files so."""
        if not self._begun:
            self._begun, events = True, events[events[:1] == [Event()] :]
        groups: defaultdict[str | None, list[Event]] = defaultdict(list)
        for event in events:
            groups[event.cat].append(event)
        for category, group in groups.items():
            kind = CATEGORIES.get((category or "").lower())
            if kind:
                timed = [e for e in group if e.ph == "X"]
                self._add_columns(kind, timed)
                self.driver_names |= {self.name_ids[e.name] for e in timed} if category in DRIVER else set()
                self.problems.unreadable_events += len(group) - len(timed) if kind in CAUSES else 0
            elif not category:
                self._read_labels(group)
            elif ACCELERATORS.match(category):
                self.foreign.add(category)
            elif _is_damaged(category):
                self.problems.unreadable_events += len(group)

    def _read_labels(self, events: Iterable[Event]) -> None:
        """Read thread names from metadata events, and count calls, GPU work and steps that have lost their category."""
        for e in events:
            if e.ph == "M":
                if e.name == "thread_name" and e.args is not None:
                    self.labels[self.thread_ids[e.pid, e.tid]] = str(e.args.name)
            elif not e.ph or e.name.startswith(STEP) or (e.args is not None and e.args.correlation != NONE):
                self.problems.unreadable_events += 1

    def _add_columns(self, kind: str, events: list[Event]) -> None:
        if not events:
            return
        start, ok = _convert_numbers([e.ts for e in events], np.float64, _parse_odd_time)
        length, _ = _convert_numbers([e.dur for e in events], np.float64, _parse_odd_time)
        if not ok:
            fine = np.abs(start) < MAX_TIME_US
            self.problems.unreadable_events += int((~fine).sum())
            events = [e for e, is_fine in zip(events, fine, strict=True) if is_fine]
            start, length = start[fine], length[fine]
        args = [e.args or _NO_ARGS for e in events]
        fields = {field: self._build_column(field, events, args) for field in FIELDS[kind]}
        self.add_rows(kind, start, length, **fields)
        if kind == "gpu":
            self.devices |= {a.device for a in args} - {None}

    def add_rows(self, kind: str, start: Floats, length: Floats, **fields: NDArray[Any]) -> None:
        """Take events of a kind as columns: times in microseconds, the columns of FIELDS, names by number."""
        if kind in TIMED:
            self.problems.untimed_events += int((~((length >= 0) & (length < MAX_TIME_US))).sum())
        length = np.where(np.abs(length) < MAX_TIME_US, length, 0.0).clip(min=0)
        if kind in CAUSES and "" in self.name_ids:
            self.problems.unreadable_events += int((fields["name"] == self.name_ids[""]).sum())
        self.parts[kind].append({"start": start, "end": start + length, **fields})

    def _build_column(self, field: str, events: list[Event], args: list[Args]) -> NDArray[Any]:
        name, thread, stack = self.name_ids, self.thread_ids, self.stack_ids
        if field == "name":
            return np.array([name[e.name] for e in events], np.int32)
        if field == "thread":
            return np.array([thread[e.pid, e.tid] for e in events], np.int32)
        if field == "stack":
            return np.array([NONE if (s := a.call_stack) is None else stack[s] for a in args], np.int32)
        if field == "external":
            raw = [a.external if a.external != NONE else a.external_2021 for a in args]
        else:
            raw = [getattr(a, field) for a in args]
        column = _convert_numbers(raw, np.int64, self._convert_odd_id)[0]
        if field != "bytes":
            column[column == 0] = NONE  # ids count from 1; 0 says that there is none
        return column

    def _convert_odd_id(self, value: object) -> int:
        """Return an id that is not a 64-bit integer: the number in a string, or a new number below -1."""
        if value is None:
            return NONE
        try:
            number = int(value)  # type: ignore[call-overload]
        except (TypeError, ValueError, OverflowError):
            number = -(1 << 63)
        return number if NONE <= number < 1 << 62 else -2 - self._odd_ids[value]

    def match_names(self, test: Callable[[str], object]) -> NDArray[np.bool_]:
        """Return for each name, by its number, whether it passes the test."""
        return np.array([bool(test(name)) for name in self.name_ids], bool)

    def list_ranges(self) -> list[str]:
        """Return the name of each annotation; after `close`."""
        return [self.names[n] for n in self.tables["ranges"].name.tolist()]

    def close(self) -> Columns:
        """Return these columns after all blocks were added."""
        self.names, self.stacks = list(self.name_ids), list(self.stack_ids)
        self.thread_names = [self._format_thread_name(n, tid) for n, (_, tid) in enumerate(self.thread_ids.numbers)]
        self.tables, self.repeated = _drop_repeats({kind: _join_parts(parts) for kind, parts in self.parts.items()})
        self.driver_calls = int(np.isin(self.tables["calls"].name, list(self.driver_names)).sum())
        return self

    def _format_thread_name(self, number: int, tid: object) -> str:
        """Format `thread 4242 (python3)`; kineto's own label repeats the number."""
        label = self.labels.get(number, "").removeprefix("thread ").strip()
        return f"thread {label}" if str(tid) in label else f"thread {tid}" + (f" ({label})" if label else "")


@functools.lru_cache(maxsize=1 << 12)
def _is_damaged(category: str) -> bool:
    """Return whether a category is one bit away from one that is read."""
    return any(is_one_bit_off(word, CATEGORIES) for word in (category, category.lower()))


def _parse_odd_time(value: object) -> float:
    """Parse a time that is not a number: a string of digits, or else NaN."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _convert_numbers(raw: list[Any], kind: type, odd: Callable[[object], Any]) -> tuple[NDArray[Any], bool]:
    """Return an array and whether every value was a number of that kind."""
    try:
        column: NDArray[Any] = np.array(raw, kind)
    except (TypeError, ValueError, OverflowError):
        column = np.array([odd(value) for value in raw], kind)
        return column, False
    return column, kind is not np.float64 or bool((np.abs(column) < MAX_TIME_US).all())


def _join_parts(parts: list[dict[str, NDArray[Any]]]) -> Table:
    """Join the parts of all blocks into one table."""
    fields = [f.name for f in dataclasses.fields(Table)]
    empty = np.zeros(0, np.int64)
    if not parts:
        return Table(np.zeros(0), np.zeros(0), *([empty] * (len(fields) - 2)))
    columns: list[NDArray[Any]] = [np.concatenate([p[f] for p in parts]) if f in parts[0] else empty for f in fields]
    parts.clear()
    return Table(*columns)


def _drop_repeats(tables: dict[str, Table]) -> tuple[dict[str, Table], int]:
    """Return the tables without repeated events, and the number of these.

    If no call and no GPU work is repeated, no event is, and the larger tables are left as they are.
    """
    first = {kind: _find_repeats(tables[kind]) for kind in CAUSES}
    if not any(len(rows) for rows in first.values()):
        return tables, 0
    rest = {kind: _find_repeats(table) for kind, table in tables.items() if kind not in CAUSES}
    again = {**first, **rest}
    kept = {kind: table.take(np.delete(np.arange(len(table)), again[kind])) for kind, table in tables.items()}
    return kept, sum(len(rows) for rows in again.values())


def _find_repeats(table: Table) -> NDArray[Any]:
    """Return the rows that equal an earlier one in every column."""
    order = np.argsort(table.start, kind="stable")
    start = table.start[order]
    together = np.flatnonzero(start[1:] == start[:-1])
    rows = np.unique(np.concatenate([order[together], order[together + 1]]))
    fields = [getattr(table, f.name) for f in dataclasses.fields(table)]
    columns = [column[rows] for column in fields if len(column)]
    if not len(rows):
        return rows
    by = np.lexsort(columns)
    same = np.logical_and.reduce([column[by[1:]] == column[by[:-1]] for column in columns])
    repeats: NDArray[Any] = rows[by[1:][same]]
    return repeats


def read_columns(
    blocks: Iterable[list[Event]], problems: ReadProblems, progress: Callable[[int], None] | None = None
) -> Columns:
    """Read all blocks."""
    columns = Columns(problems)
    with stop_garbage_collector():
        for events in blocks:
            columns.add_events(events)
            if progress:
                progress(len(events))
    return columns.close()
