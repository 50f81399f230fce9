"""Find calls that block the host: which ones, with which copy, for how long."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dcpbench.syncs import rules
from dcpbench.syncs.traces.intervals import find_chains, find_containing, match_keys, take_known

if TYPE_CHECKING:
    from dcpbench.syncs.rules import Rule
    from dcpbench.syncs.traces.columns import Columns, Table
    from dcpbench.syncs.traces.intervals import Bools, Floats, Ints

WaitKind = Literal["stream", "event", "device", "copy", "async copy", "free", "pin"]

_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds|_spt|_internal)+$")
_NAMES: dict[WaitKind, str] = {  # without cuda/cu/hip and version suffix; `free` waits, `pin` does not (H200)
    "stream": "StreamSynchronize",
    "event": "EventSynchronize",
    "device": "DeviceSynchronize CtxSynchronize ThreadSynchronize",
    "copy": "Memcpy Memcpy2D Memcpy3D MemcpyPeer MemcpyToSymbol MemcpyFromSymbol MemcpyWithStream MemcpyDtoH MemcpyHtoD",
    "async copy": "MemcpyAsync Memcpy2DAsync Memcpy3DAsync MemcpyDtoHAsync MemcpyHtoDAsync MemcpyToSymbolAsync "
    "MemcpyFromSymbolAsync",
    "free": "Free MemFree FreeArray",
    "pin": "HostAlloc MallocHost HostMalloc MemAllocHost MemHostAlloc FreeHost HostFree MemFreeHost HostRegister "
    "HostUnregister",
}
_KINDS: dict[str, WaitKind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_XPU: dict[str, WaitKind] = {
    "urEventWait": "event",
    "urQueueFinish": "stream",
    "zeEventHostSynchronize": "event",
    "zeCommandQueueSynchronize": "stream",
    "zeCommandListHostSynchronize": "stream",
    "zeFenceHostSynchronize": "event",
}
SYNC_EVENTS: dict[str, WaitKind] = {  # `cuda_sync` events that block the host; `Stream Wait Event` does not
    "Stream Sync": "stream",
    "Stream Synchronize": "stream",
    "Event Sync": "event",
    "Event Synchronize": "event",
    "Context Sync": "device",
    "Context Synchronize": "device",
    "Device Sync": "device",
}
API_NAMES = frozenset(  # names of all relevant calls, with the usual suffixes
    prefix + name + version
    for prefix in ("cuda", "hip", "cu")
    for name in _KINDS
    for version in ("", "_v2", "_ptsz", "_ptds", "_spt")
) | frozenset(_XPU)
RUNTIMES = ("cuda", "cu", "hip", "ur", "ze")  # prefixes of calls that can be classified; `ur` and `ze` are XPU's
SYNCHRONISE = ("stream", "event", "device")
MAX_ADJACENT_US = 50.0  # longest gap in µs between a copy and its synchronisation outside any operator
MAX_QUERY_US = 50.0  # no query takes longer, nor a call that finds nothing to wait for
_ELAPSED = re.compile("^(?:cuda|hip|cu)EventElapsedTime")
_ALLOCATES = re.compile("^(?:cuda|hip)Malloc(?:Managed|Pitch)?$|^cuMemAlloc(?:_v2)?$")
MIN_FREES = 20  # frees in a trace from which their cause is searched; a working caching allocator has few
_HARMLESS = re.compile("Query|Captur|Attribute|LastError|GetDevice|Occupancy")  # calls between a copy and its sync


class BlockingCall(NamedTuple):
    """Describe one call that blocked the host."""

    start: float
    end: float
    wait: float  # microseconds in which the host was blocked: of the synchronisation, and of a pageable copy before it
    thread: int  # thread; -1 if only a `cuda_sync` event outside any operator shows the wait
    external: int  # `External id`, -1 without one
    call: str  # runtime or driver call; name of the `cuda_sync` event where there is no call
    kind: WaitKind | None
    copied: int = -1  # row in the GPU table of the copy that it waited for, or -1
    copy_waited: bool = False  # a synchronisation followed the copy; False where the copy itself blocked
    may_block: bool = False
    timed: bool = False  # the next call of the thread reads the time between two events
    stack: int = -1  # call stack of the call, or of its copy: a number in `Columns.stacks`; -1 without one


class BlockingCalls:
    """Hold the blocking calls of a trace by thread and time, then those only in `cuda_sync` events, also as arrays."""

    def __init__(self, calls: list[BlockingCall]) -> None:
        self.calls = calls
        self.start = np.array([c.start for c in calls], np.float64)
        self.end = np.array([c.end for c in calls], np.float64)
        self.thread: Ints = np.array([c.thread for c in calls], np.int64)
        self.external: Ints = np.array([c.external for c in calls], np.int64)
        self.copied: Ints = np.array([c.copied for c in calls], np.int64)
        self.may_block = np.array([c.may_block for c in calls], bool)

    def __len__(self) -> int:
        return len(self.calls)


def get_wait_kind(name: str) -> WaitKind | None:
    """Return what a runtime or driver call waits for; None for a call that is irrelevant here."""
    if name in _XPU:
        return _XPU[name]
    for prefix in ("cuda", "hip", "cu"):
        if name.startswith(prefix):
            return _KINDS.get(_SUFFIX.sub("", name[len(prefix) :]))
    return None


def parse_direction(name: str) -> str:
    """Return `DtoH pageable` for `Memcpy DtoH (Device -> Pageable)`; empty if the name has no direction."""
    found = re.search(r"([DHP]to[DHP])", name)
    if found is None:
        known = {"DeviceToHost": "DtoH", "HostToDevice": "HtoD", "DeviceToDevice": "DtoD"}
        return next((short for long, short in known.items() if long in name), "")
    memory = next((m.lower() for m in ("Pageable", "Pinned") if m in name), "")
    return f"{found[1]} {memory}".strip()


def find_rule(call: BlockingCall, op_chain: tuple[str, ...], direction: str) -> Rule:
    """Return the rule of a blocking call within these operators, outermost first, and with a copy in that direction."""
    copies = call.copied >= 0 or call.kind in ("copy", "async copy")
    if call.kind in ("free", "pin"):
        return rules.ALLOCATION
    if copies:
        return rules.find_copy_rule(op_chain, direction, waited=call.copy_waited or call.kind == "copy")
    known = rules.find_op_rule(op_chain)
    if known:
        return known
    if call.thread < 0:
        return rules.DRIVER
    if call.timed:
        return rules.TIMING
    if call.copy_waited and call.kind == "stream":
        return rules.COPY
    return {"stream": rules.STREAM, "event": rules.EVENT}.get(call.kind or "", rules.DEVICE)


def explain_frees(columns: Columns) -> str:
    """Return why much memory is freed, as far as the calls show; empty if little is freed, or nothing is allocated
    besides.
    """
    calls = columns.tables["calls"]
    freed = int(columns.match_names(lambda name: get_wait_kind(name) == "free")[calls.name].sum())
    allocated = int(columns.match_names(_ALLOCATES.match)[calls.name].sum())
    if freed < MIN_FREES or 2 * allocated < freed:
        return ""
    return (
        f"{freed:,} frees and {allocated:,} allocations in one trace: PyTorch's caching allocator is off "
        "(PYTORCH_NO_CUDA_MEMORY_CACHING=1 in the environment), or memory is so full that it frees to allocate."
    )


def find_blocking_calls(columns: Columns) -> BlockingCalls:
    """Return all calls that block the host, each copy merged with the synchronisation that waits for it."""
    calls, gpu = columns.tables["calls"], columns.tables["gpu"]
    kinds = [get_wait_kind(name) for name in columns.names]
    harmless = columns.match_names(_HARMLESS.search)
    rows = np.flatnonzero(~harmless[calls.name])
    rows = rows[np.lexsort((calls.start[rows], calls.thread[rows]))]
    calls = calls.take(rows)
    directions = [parse_direction(name) for name in columns.names]
    copied = _match_copies(calls, gpu, columns.match_names(parse_direction))
    direction = [""] * len(calls)
    for i in np.flatnonzero(copied >= 0).tolist():
        direction[i] = directions[gpu.name[copied[i]]]
    at = np.flatnonzero(columns.match_names(get_wait_kind)[calls.name]).tolist()
    kind = {i: kinds[calls.name[i]] for i in at}
    partner = _match_previous_copies(columns, calls, kind, direction)
    counted = set(partner.values())
    held = _find_held_calls(gpu, calls, copied, direction)
    links, timed = _get_external_ids(calls), _find_timed_calls(columns, calls)
    stacks: list[int] = calls.stack.tolist() or [-1] * len(calls)
    found: list[BlockingCall] = []
    for i in at:
        first = copy = i
        wait = float(calls.end[i] - calls.start[i])
        waits = kind[i] in SYNCHRONISE
        if waits:
            copy = partner.get(i, -1)
            if copy >= 0 and "pinned" not in direction[copy]:  # the copy blocked, too
                first = copy
                wait += float(calls.end[copy] - calls.start[copy])
        elif i in counted or not _can_block(kind[i], direction[i], columns.names[calls.name[i]], held[i]):
            continue
        counted |= {first, i}
        found.append(
            BlockingCall(
                start=float(calls.start[first]),
                end=float(calls.end[i]),
                wait=wait,
                thread=int(calls.thread[i]),
                external=int(links[i]),
                call=columns.names[calls.name[i]],
                kind=kind[i],
                copied=int(copied[copy]) if copy >= 0 else -1,
                copy_waited=waits and copy >= 0,
                may_block=kind[i] == "pin"
                or (kind[i] == "async copy" and direction[i] == "HtoD pageable" and not held[i]),
                timed=bool(timed[i]),
                stack=stacks[i] if stacks[i] >= 0 else stacks[first],
            )
        )
    explains = harmless[columns.tables["calls"].name]
    explains[rows[list(counted)]] = True
    return BlockingCalls(found + _find_in_sync_events(columns, explains))


def _match_copies(calls: Table, gpu: Table, is_copy: Bools) -> Ints:
    """Return the row in the GPU table of each call's copy, or -1; other GPU work with the same id, of another process,
    is none.
    """
    copies = np.flatnonzero(is_copy[gpu.name])
    return take_known(copies, match_keys(gpu.correlation[copies], calls.correlation), -1)


def _get_external_ids(table: Table) -> Ints:
    """Return `External id` of operators; older traces give a call without operator its own correlation instead."""
    return np.where(table.external == table.correlation, -1, table.external)


def _find_timed_calls(columns: Columns, calls: Table) -> Bools:
    """Return a mask of calls after which the same thread reads the time between two events before it does anything
    else.
    """
    reads = columns.match_names(_ELAPSED.match)
    timed = np.zeros(len(calls), bool)
    timed[:-1] = reads[calls.name[1:]] & (calls.thread[1:] == calls.thread[:-1])
    return timed


def _match_previous_copies(
    columns: Columns, calls: Table, kind: dict[int, WaitKind | None], direction: list[str]
) -> dict[int, int]:
    """Map each synchronisation to the copy that it waits for: the previous call on its thread, in the same operator.

    The host does not wait for a copy from GPU to GPU, so that after one the synchronisation itself was intended.
    """
    pairs = [
        (i, i - 1)
        for i, what in kind.items()
        if what in SYNCHRONISE
        and kind.get(i - 1) == "async copy"
        and calls.thread[i] == calls.thread[i - 1]
        and not direction[i - 1].startswith("DtoD")
    ]
    if not pairs:
        return {}
    moments = np.array(pairs).ravel()
    inner = [
        chain[-1] if len(chain) else -1
        for chain in find_chains(columns.tables["ops"], calls.start[moments], calls.thread[moments])
    ]
    return {
        sync: copy
        for (sync, copy), op_of_sync, op_of_copy in zip(pairs, inner[::2], inner[1::2], strict=True)
        if op_of_sync == op_of_copy and (op_of_sync >= 0 or calls.start[sync] - calls.end[copy] < MAX_ADJACENT_US)
    }


def _find_held_calls(gpu: Table, calls: Table, copied: Ints, direction: list[str]) -> Bools:
    """Return a mask of calls that did not return until the GPU had finished the work before their copy on its stream.

    HIP puts copies on streams of their own, and names no memory; there work of any stream counts.
    """
    held = np.zeros(len(calls), bool)
    has = np.flatnonzero(copied >= 0)
    if not len(has):
        return held
    in_order = np.lexsort((gpu.start, gpu.thread))
    before = np.full(len(gpu), -1)
    same = gpu.thread[in_order[1:]] == gpu.thread[in_order[:-1]]
    before[in_order[1:]] = np.where(same, in_order[:-1], -1)
    previous = before[copied[has]]
    called, begun = calls.start[has], gpu.start[copied[has]]
    waited = (previous >= 0) & (gpu.end[previous] > called)
    ends = np.sort(gpu.end)
    hip = np.array([direction[i] in ("DtoH", "HtoD") for i in has.tolist()])
    waited |= hip & (np.searchsorted(ends, called, "right") < np.searchsorted(ends, begun, "right"))
    held[has] = waited & (calls.end[has] > begun)
    return held


def _can_block(kind: WaitKind | None, direction: str, name: str, held: bool) -> bool:
    """Return True if a copy or a change of memory can block the host."""
    if kind == "copy":
        return not direction.startswith("DtoD") or "WithStream" in name
    if kind == "async copy":
        return "pageable" in direction or (direction in ("DtoH", "HtoD") and held)
    return kind in ("free", "pin")


def _find_in_sync_events(columns: Columns, explains: Bools) -> list[BlockingCall]:
    """Return the waits that only `cuda_sync` events show: through the driver API, in libraries, or of calls without a
    name.

    A short `Event Sync` without a call may be a mere query, for which CUPTI writes the same event; it only may block.
    `explains` marks the calls that account for an event: those that are counted, or are known not to wait.
    """
    events, calls, ops = columns.tables["syncs"], columns.tables["calls"], columns.tables["ops"]
    kinds = [SYNC_EVENTS.get(name) for name in columns.names]
    waits = columns.match_names(SYNC_EVENTS.get)
    alone = np.flatnonzero(waits[events.name])
    alone = alone[~_find_explained_events(events.take(alone), calls.take(np.flatnonzero(explains)))]
    if not len(alone):
        return []
    events = events.take(alone)
    call = match_keys(calls.correlation, events.correlation)
    if len(calls):  # an id that two processes share leads to a call of another time
        call = np.where(
            (calls.start[call] <= _compute_midpoints(events)) & (_compute_midpoints(events) <= calls.end[call]),
            call,
            -1,
        )
    linked = _get_external_ids(events)
    thread = take_known(ops.thread, match_keys(ops.external, linked), -1)
    thread = take_known(calls.thread, call, thread)
    found = []
    rows = (column.tolist() for column in (events.start, events.end, events.name, thread, linked))
    for start, end, name, by, link in zip(*rows, strict=True):
        kind = kinds[name]
        query = kind == "event" and end - start < MAX_QUERY_US
        found.append(BlockingCall(start, end, end - start, by, link, columns.names[name], kind, may_block=query))
    return found


def _compute_midpoints(table: Table) -> Floats:
    middle: Floats = (table.start + table.end) / 2
    return middle


def _find_explained_events(events: Table, calls: Table) -> Bools:
    """Return a mask of `cuda_sync` events that belong to one of these calls: by id, or, if either has none, by time.

    Calls of several threads may contain an event, so that each event goes to the call with the most similar start and end.
    """
    known = match_keys(calls.correlation, events.correlation) >= 0
    free = np.flatnonzero(match_keys(events.correlation, calls.correlation) < 0)
    left = np.flatnonzero(~known)
    moment, at = find_containing(calls.start[free], calls.end[free], _compute_midpoints(events)[left])
    pairs = left[moment], free[at]
    apart = np.abs(events.start[pairs[0]] - calls.start[pairs[1]]) + np.abs(events.end[pairs[0]] - calls.end[pairs[1]])
    nearest_first = np.argsort(apart, kind="stable")
    taken: set[int] = set()
    for event, call in zip(*(rows[nearest_first].tolist() for rows in pairs), strict=True):
        without = events.correlation[event] == -1 or calls.correlation[call] == -1
        if without and not known[event] and call not in taken:
            known[event] = True
            taken.add(call)
    return known
