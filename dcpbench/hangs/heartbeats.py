"""Heartbeats of a rank: a memory-mapped file that other processes read while the rank hangs and after it has ended.

    record_phase(name), record_layer(n)   where the host is in a step
    record_step(what)                     a step is launched on the device: `replay` of a graph, or `launch` kernel by kernel
    record_collective(op, x, group)       a collective begins; its context exits when the collective has returned

These functions do nothing before `start_heartbeats` is called. After that, each one writes a few bytes to the mapped memory,
without a system call, a lock or any work on the device. The kernel keeps the written bytes when the process is killed.

The file is little endian. It holds a header, the names of phases, a table of collective descriptions (each stored
once), and a ring of the most recent collectives, which refer to a description by its number. When the table slot of a
description has been reused since, the call is reported as unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.points.layout import MAX_RANKS
from dcpbench.records.lines import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from contextlib import AbstractContextManager

MAGIC = b"dcpbeat1"
HEAD = struct.Struct("<8sIIII")  # magic, rank, ranks, process id, 1 if the host waits for the end of collectives
ORDER, STEPS, LAYER, TIME = struct.Struct("<Q"), struct.Struct("<QI"), struct.Struct("<h"), struct.Struct("<q")
ORDER_AT, STEPS_AT, LAYER_AT, PHASE_AT = 64, 72, 84, 86  # collectives begun; steps launched and last name; layer; phase
NAMES_AT, NAMES, NAME_BYTES = 128, 64, 32
TEXT = struct.Struct("<II")  # number of the text that lies here, and its bytes
TEXTS_AT, TEXTS, TEXT_BYTES = NAMES_AT + NAMES * NAME_BYTES, 1024, 384
EVENT = struct.Struct("<QQIhBBqq")  # numbers in rank, group, texts; layer, phase, state; start and return (Unix ns)
RING_AT, RING = TEXTS_AT + TEXTS * TEXT_BYTES, 1024
STATE_AT, ENDED_AT = 23, 32
INSIDE, RETURNED, RAISED = range(3)
SIZE = RING_AT + RING * EVENT.size
NO_LAYER = -1
REPLAY, LAUNCH = "replay", "launch"
_NOTHING = contextlib.nullcontext()


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A collective at a place in the program."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    group: str  # name of the process group, unique within torch.distributed
    ranks: str  # members of the group as `0-3,6`; empty if they are too many to be stored
    at: str  # `file.py:12 in function`: the line that called the collective
    above: str = ""  # the caller of that function, in the same form

    @property
    def description(self) -> str:
        """Return the collective as `all_reduce of float32 [2, 64]`."""
        return f"{self.op} of {self.dtype} {list(self.shape)}" if self.dtype else self.op

    @property
    def signature(self) -> tuple[str, str, tuple[int, ...]]:
        """Return what all ranks of the group must agree on: (op, dtype, shape)."""
        return self.op, self.dtype, self.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveEvent:
    """A collective that a rank began."""

    order: int
    number: int  # number of the collective within its group, from 1
    call: Call | None  # description of the collective; None if the file no longer holds it
    phase: str
    layer: int | None
    state: int  # INSIDE, RETURNED, or RAISED: it was left with an exception
    began_ns: int
    ended_ns: int = 0  # Unix time in ns of the collective's return; 0 if it has not returned or is not recorded

    @property
    def known_call(self) -> Call:
        """Return the description, which the file must hold."""
        assert self.call is not None
        return self.call


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankHeartbeats:
    """Heartbeats read from the file of one rank."""

    rank: int
    ranks: int
    pid: int
    waits: bool  # True if the host waits for each collective's end; else a return only means that it was launched
    steps: int
    step: str  # how the last step was launched on the device (`replay` or `launch`); empty if no step was launched
    phase: str  # the last that the host entered
    layer: int | None
    collectives: list[CollectiveEvent]  # the last collectives, oldest first

    @property
    def last(self) -> CollectiveEvent | None:
        """Return the last collective that the rank began."""
        return self.collectives[-1] if self.collectives else None


class HeartbeatWriter:
    """A rank's file, as the rank writes it."""

    def __init__(
        self,
        path: Path,
        rank: int,
        ranks: int,
        *,
        waits: bool,
        members: Callable[[Any], tuple[str, Iterable[int]]],
        through: Iterable[str] = (),
    ) -> None:
        """Create the file at `path` and map it.

        `members` returns the name and the ranks of a process group. `through` lists source files that are skipped when
        the caller of a collective is looked up.
        """
        with path.open("wb+") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        HEAD.pack_into(self._map, 0, MAGIC, rank, ranks, os.getpid(), waits)
        self._members, self._through = members, {__file__, *through}
        self._order = self._steps = self._made = 0
        self._numbers: dict[Hashable, int] = {}
        self._texts: dict[Hashable, int] = {}
        self._in_place: list[Hashable] = [None] * TEXTS
        self._codes: set[object] = set()  # keeps code objects alive, as keys use their ids: hashing is slow
        self._names = {"": 0}
        self._phase, self._at = 0, RING_AT
        self.set_layer(NO_LAYER)

    def set_phase(self, name: str) -> None:
        """Record the phase that begins."""
        self._phase = self._map[PHASE_AT] = self._names[name] if name in self._names else self._add_name(name)

    def set_layer(self, number: int) -> None:
        """Record the layer that begins."""
        self._layer = number
        LAYER.pack_into(self._map, LAYER_AT, number)

    def record_step(self, what: str) -> None:
        """Record that a step is launched on the device, and how."""
        self._steps += 1
        self.set_phase("")
        self.set_layer(NO_LAYER)
        STEPS.pack_into(
            self._map, STEPS_AT, self._steps, self._names[what] if what in self._names else self._add_name(what)
        )

    def start_collective(self, op: str, x: Any, group: Any) -> Self:  # noqa: ANN401 -- a tensor or None, a process group
        """Record that a collective begins."""
        frame = sys._getframe(1)  # noqa: SLF001 -- the module inspect reads sources
        while frame.f_code.co_filename in self._through and frame.f_back is not None:
            frame = frame.f_back
        above = frame.f_back or frame
        of = None if x is None else (x.dtype, x.shape)
        key = (op, of, group, id(frame.f_code), frame.f_lasti, id(above.f_code), above.f_lasti)
        text = self._texts.get(key) or self._add_text(key, op, x, group, (frame, above))
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        self._at = at = RING_AT + self._order % RING * EVENT.size
        self._order += 1
        EVENT.pack_into(self._map, at, self._order, number, text, self._layer, self._phase, INSIDE, time.time_ns(), 0)
        ORDER.pack_into(self._map, ORDER_AT, self._order)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        TIME.pack_into(self._map, self._at + ENDED_AT, time.time_ns())
        self._map[self._at + STATE_AT] = RETURNED if kind is None else RAISED

    def _add_name(self, name: str) -> int:
        number = len(self._names)
        if number == NAMES:
            return 0
        start, text = NAMES_AT + number * NAME_BYTES, name.encode()[:NAME_BYTES]
        self._map[start : start + len(text)] = text
        self._names[name] = number
        return number

    def _add_text(self, key: Hashable, op: str, x: Any, group: Any, frames: tuple[Any, Any]) -> int:  # noqa: ANN401
        self._codes |= {frame.f_code for frame in frames}
        at = [_format_frame(frame) for frame in frames]
        name, ranks = self._members(group)
        dtype, shape = ("", ()) if x is None else (str(x.dtype).removeprefix("torch."), tuple(x.shape))
        most = TEXT_BYTES - TEXT.size
        members, short = format_ranks(ranks), (name[:40], at[0][-100:])
        for call in (  # the list of members is stored whole or not at all: a truncated number would name another rank
            Call(op, dtype, shape, name, members, *at),
            Call(op, dtype, shape, short[0], members, short[1]),
            Call(op, dtype, shape, short[0], "", short[1]),
        ):
            text = msgspec.json.encode(call)
            if len(text) <= most:
                break
        self._made += 1
        place = self._made % TEXTS
        self._texts.pop(self._in_place[place], None)
        self._texts[key], self._in_place[place] = self._made, key
        start = TEXTS_AT + place * TEXT_BYTES
        TEXT.pack_into(self._map, start, self._made, min(len(text), most))
        self._map[start + TEXT.size : start + TEXT.size + min(len(text), most)] = text[:most]
        return self._made


_here: HeartbeatWriter | None = None


def start_heartbeats(writer: HeartbeatWriter) -> None:
    """Write the heartbeats of this process to this file from now on."""
    global _here  # noqa: PLW0603 -- one rank a process
    _here = writer


def record_phase(name: str) -> None:
    """Record that the host enters a phase of a step."""
    if _here is not None:
        _here.set_phase(name)


def record_layer(number: int) -> None:
    """Record that the host enters a layer, from 0."""
    if _here is not None:
        _here.set_layer(number)


def record_step(what: str) -> None:
    """Record that the host launches a step on the device: REPLAY or LAUNCH."""
    if _here is not None:
        _here.record_step(what)


def record_collective(op: str, x: Any, group: Any) -> AbstractContextManager[object]:  # noqa: ANN401 -- no torch here
    """Return a context in which this rank is in a collective `op` of tensor `x`, or of None, in a process group."""
    return _NOTHING if _here is None else _here.start_collective(op, x, group)


def read_heartbeats(path: Path) -> RankHeartbeats:
    """Return the heartbeats in a rank's file. Raise RecordsError if the file is unreadable, damaged or of another
    version.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e}.") from e
    if len(data) != SIZE or not data.startswith(MAGIC):
        raise RecordsError(f"{path} has no heartbeats of this version of dcpbench.")
    _, rank, ranks, pid, waits = HEAD.unpack_from(data)
    names = [_read_name(data, number) for number in range(NAMES)]
    (begun,), (layer_now,) = ORDER.unpack_from(data, ORDER_AT), LAYER.unpack_from(data, LAYER_AT)
    steps, step_name = STEPS.unpack_from(data, STEPS_AT)
    phase_now = data[PHASE_AT]
    if phase_now >= NAMES or step_name >= NAMES:
        raise RecordsError(f"{path} is damaged: a phase has a number that none can have.")
    collectives = []
    for order in range(max(1, begun - RING + 1), begun + 1):
        there, number, text, at_layer, at_phase, state, began, ended = EVENT.unpack_from(
            data, RING_AT + (order - 1) % RING * EVENT.size
        )
        if there == order and at_phase < NAMES and state <= RAISED:  # else it was being written, or is damaged
            collectives.append(
                CollectiveEvent(
                    order=order,
                    number=number,
                    call=_read_call(data, text),
                    phase=names[at_phase],
                    layer=None if at_layer == NO_LAYER else at_layer,
                    state=state,
                    began_ns=began,
                    ended_ns=ended,
                )
            )
    return RankHeartbeats(
        rank=rank,
        ranks=ranks,
        pid=pid,
        waits=bool(waits),
        steps=steps,
        step=names[step_name],
        phase=names[phase_now],
        layer=None if layer_now == NO_LAYER else layer_now,
        collectives=collectives,
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a compact text of ranks: `0-3,6` for 0, 1, 2, 3 and 6."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] == rank - 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return ",".join("-".join(map(str, span)) for span in found)


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in a text of `format_ranks`; none for another text, or for more ranks than a job can have."""
    try:
        ends = [[int(end) for end in span.split("-")] for span in text.split(",")]
    except ValueError:
        return []
    if sum(max(span[-1] - span[0], 0) + 1 for span in ends) > MAX_RANKS:
        return []
    return [rank for span in ends for rank in range(span[0], span[-1] + 1)]


def _read_name(data: bytes, number: int) -> str:
    start = NAMES_AT + number * NAME_BYTES
    return data[start : start + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


def _read_call(data: bytes, number: int) -> Call | None:
    start = TEXTS_AT + number % TEXTS * TEXT_BYTES
    there, length = TEXT.unpack_from(data, start)
    try:
        text = data[start + TEXT.size : start + TEXT.size + length]
        return msgspec.json.decode(text, type=Call) if there == number else None
    except UNREADABLE:
        return None


def _format_frame(frame: Any) -> str:  # noqa: ANN401 -- types.FrameType
    file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
