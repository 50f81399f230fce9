"""A trace as columns: one NumPy array per field and kind of event, names as numbers. 30 to 50 bytes an event."""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from dcpbench.syncs.traces.reading import Args, Event, Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

LATEST_US = 1e20
"""Times beyond are no times; nanoseconds since 1970 taken for microseconds still are."""
NONE = -1
"""Number of what is not there."""
CATEGORIES = {
    "cpu_op": "ops", "operator": "ops",
    "python_function": "python",
    "user_annotation": "ranges",
    "cuda_runtime": "calls", "cuda_driver": "calls", "runtime": "calls", "hip_runtime": "calls",
    "xpu_runtime": "calls", "xpu_driver": "calls", "privateuse1_runtime": "calls",
    "kernel": "gpu", "gpu_memcpy": "gpu", "gpu_memset": "gpu", "memcpy": "gpu", "memset": "gpu",
    "concurrent_kernel": "gpu",
    "cuda_sync": "syncs", "xpu_sync": "syncs",
}  # fmt: skip
"""Category of an event, in lower case, to the table it goes to. Names with a capital are those of 2021."""
DRIVER = frozenset({"cuda_driver", "xpu_driver"})
_NO_ARGS = Args()


class Ids(dict[Any, int]):
    """Numbers for things, in the order in which they are first seen."""

    def __missing__(self, key: object) -> int:
        number = self[key] = len(self)
        return number


class Threads(dict[tuple[object, object], int]):
    """Numbers for (pid, tid); text that says a number is that number, as traces of 2021 have both."""

    def __init__(self) -> None:
        self.numbers = Ids()

    def __missing__(self, key: tuple[object, object]) -> int:
        plain = tuple(int(v) if isinstance(v, str) and v.isdecimal() else v for v in key)
        number = self[key] = self.numbers[plain]
        return number


@dataclasses.dataclass
class Table:
    """Events of one kind. Times are microseconds on the trace's clock; columns that a kind has no use for are empty.

    `thread` numbers (pid, tid), which for GPU work is its stream; `external`, `correlation` and `bytes` are -1 where
    the event has none.
    """

    start: Floats
    end: Floats
    name: Ints
    thread: Ints
    external: Ints
    correlation: Ints
    bytes: Ints
    stack: Ints
    """Call stack of an op, a number in `Columns.stacks`."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, which: NDArray[Any]) -> Table:
        """The rows that a mask or an index array picks."""
        columns = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Table(**{name: c[which] if len(c) else c for name, c in columns.items()})


@dataclasses.dataclass
class Columns:
    """All of a trace that scanning needs."""

    tables: dict[str, Table]
    names: list[str]
    """Names of events by number."""
    stacks: list[str]
    """Call stacks of ops by number, innermost frame first, parted by `;`."""
    thread_names: list[str]
    """Names of threads and streams by number."""
    driver_calls: int
    devices: int
    """GPUs that had work."""
    trouble: Trouble


FIELDS = {
    "ops": ("name", "thread", "external", "stack"),
    "python": ("name", "thread"),
    "ranges": ("name", "thread"),
    "calls": ("name", "thread", "external", "correlation"),
    "gpu": ("name", "thread", "correlation", "bytes"),
    "syncs": ("name", "external", "correlation"),
}
"""Columns of each table besides start and end."""


class Builder:
    """Turns blocks of events into columns, one block after the other."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        self.name, self.stack, self.odd_id, self.thread = Ids(), Ids(), Ids(), Threads()
        self.devices: set[object] = set()
        self.labels: dict[int, str] = {}
        self.driver_calls = 0
        self.parts: dict[str, list[dict[str, NDArray[Any]]]] = {kind: [] for kind in FIELDS}
        self._kind_of: dict[str | None, str | None] = {}

    def add(self, events: list[Event]) -> None:
        """Take what is needed of a block."""
        groups: defaultdict[str | None, list[Event]] = defaultdict(list)
        for event in events:
            groups[event.cat].append(event)
        for category, group in groups.items():
            kind = self._kind(category)
            if kind:
                timed = [e for e in group if e.ph == "X"]
                self._columns(kind, timed)
                self.driver_calls += len(timed) if category in DRIVER else 0
            elif not category:
                self._labels(group)

    def _kind(self, category: str | None) -> str | None:
        if category not in self._kind_of:
            self._kind_of[category] = CATEGORIES.get((category or "").lower())
        return self._kind_of[category]

    def _labels(self, events: Iterable[Event]) -> None:
        """Thread names, from metadata events."""
        for e in events:
            if e.ph == "M" and e.name == "thread_name" and e.args is not None:
                self.labels[self.thread[e.pid, e.tid]] = str(e.args.name)

    def _columns(self, kind: str, events: list[Event]) -> None:
        if not events:
            return
        start, ok = _numbers([e.ts for e in events], np.float64, self._odd_time)
        length, _ = _numbers([e.dur for e in events], np.float64, self._odd_time)
        if not ok:
            fine = np.abs(start) < LATEST_US
            self.trouble.unreadable_events += int((~fine).sum())
            events = [e for e, is_fine in zip(events, fine, strict=True) if is_fine]
            start, length = start[fine], length[fine]
        args = [e.args or _NO_ARGS for e in events]
        length = np.where(np.abs(length) < LATEST_US, length, 0.0).clip(min=0)
        part: dict[str, NDArray[Any]] = {"start": start, "end": start + length}
        for field in FIELDS[kind]:
            part[field] = self._column(field, events, args)
        self.parts[kind].append(part)
        if kind == "gpu":
            self.devices |= {a.device for a in args} - {None}

    def _column(self, field: str, events: list[Event], args: list[Args]) -> NDArray[Any]:
        if field == "name":
            name = self.name
            return np.array([name[e.name] for e in events], np.int32)
        if field == "thread":
            thread = self.thread
            return np.array([thread[e.pid, e.tid] for e in events], np.int32)
        if field == "stack":
            stack = self.stack
            return np.array([NONE if (s := a.call_stack) is None else stack[s] for a in args], np.int32)
        if field == "external":
            raw = [a.external if a.external != NONE else a.external_2021 for a in args]
        else:
            raw = [getattr(a, field) for a in args]
        column = _numbers(raw, np.int64, self._odd_number)[0]
        if field != "bytes":
            column[column == 0] = NONE  # ids count from 1; 0 says that there is none
        return column

    def _odd_time(self, value: object) -> float:
        """A time that is not a number: text that says one, or none."""
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return float("nan")

    def _odd_number(self, value: object) -> int:
        """An id that is not a 64-bit integer: text that says one, or a number of its own below -1."""
        if value is None:
            return NONE
        try:
            number = int(value)  # type: ignore[call-overload]
        except (TypeError, ValueError, OverflowError):
            number = -(1 << 63)
        return number if NONE <= number < 1 << 62 else -2 - self.odd_id[value]

    def columns(self) -> Columns:
        """Everything that was added."""
        numbered = {number: key for key, number in self.thread.numbers.items()}
        names = [self._thread_name(number, numbered[number]) for number in range(len(numbered))]
        return Columns(
            tables={kind: _join(parts) for kind, parts in self.parts.items()},
            names=list(self.name), stacks=list(self.stack), thread_names=names,
            driver_calls=self.driver_calls, devices=len(self.devices), trouble=self.trouble,
        )  # fmt: skip

    def _thread_name(self, number: int, key: tuple[object, object]) -> str:
        """`thread 4242 (python3)`; kineto's own label repeats the number."""
        label = self.labels.get(number, "").removeprefix("thread ").strip()
        return f"thread {label}" if str(key[1]) in label else f"thread {key[1]}" + (f" ({label})" if label else "")


def _numbers(raw: list[Any], kind: type, odd: Callable[[object], Any]) -> tuple[NDArray[Any], bool]:
    """(array, whether every value was a number of that kind)."""
    try:
        column: NDArray[Any] = np.array(raw, kind)
    except (TypeError, ValueError, OverflowError):
        column = np.array([odd(value) for value in raw], kind)
        return column, False
    return column, kind is not np.float64 or bool((np.abs(column) < LATEST_US).all())


def _join(parts: list[dict[str, NDArray[Any]]]) -> Table:
    """One table of the parts of all blocks."""
    fields = [f.name for f in dataclasses.fields(Table)]
    empty = np.zeros(0, np.int64)
    if not parts:
        return Table(np.zeros(0), np.zeros(0), *([empty] * (len(fields) - 2)))
    columns: list[NDArray[Any]] = [np.concatenate([p[f] for p in parts]) if f in parts[0] else empty for f in fields]
    parts.clear()
    return Table(*columns)


def read_columns(
    blocks: Iterable[list[Event]], trouble: Trouble, progress: Callable[[int], None] | None = None
) -> Columns:
    """Columns of all blocks. The collector is off meanwhile: events hold no cycles, and it would look at each again."""
    builder = Builder(trouble)
    on = gc.isenabled()
    gc.disable()
    try:
        for events in blocks:
            builder.add(events)
            if progress:
                progress(len(events))
    finally:
        if on:
            gc.enable()
    return builder.columns()
