"""Compute an upper bound of the GPU idle time that a synchronisation caused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcpbench.syncs.traces.intervals import match_keys, merge_intervals, sum_covered_time, take_known

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcpbench.syncs.traces.blocking import BlockingCalls
    from dcpbench.syncs.traces.columns import Columns, Table
    from dcpbench.syncs.traces.intervals import Bools, Floats, Ints


def compute_busy_and_idle(columns: Columns) -> tuple[float, float]:
    """Return (microseconds in which a stream had work, microseconds between first and last work in which none had)."""
    start, end = merge_intervals(columns.tables["gpu"].start, columns.tables["gpu"].end)
    busy = float((end - start).sum())
    return busy, float(end[-1] - start[0]) - busy if len(start) else 0.0


def compute_bubbles(columns: Columns, blocking: BlockingCalls) -> Floats:
    """Return the maximum GPU idle time in microseconds that removing each blocking call would save.

    Idle time is the time between the first and the last GPU work in which no stream has any work. Removing a call lets
    the host continue immediately: its later work is earlier by the call's own time, until the next wait, and every
    other wait still waits for the same. In a program of one host thread, removing any one call saves at most the idle
    time of its bubble. On one stream this is also the saving from end to end; with several streams work may overlap
    better, so that the end is earlier by more than the idle time, but by at most the call's own time. Removing several
    calls may save more than the sum of their bubbles, because a remaining call waits for work that another call no
    longer waits for.

    A bubble is the idle time after the call's start that ends with work launched after the call on its thread, and
    launched late, up to the next wait there; it is at most the call's own time. A call is therefore not blamed for a
    long gap around it if the GPU was idle and nothing was queued when the call began.
    """
    found = np.zeros(len(blocking))
    gaps = _find_late_gaps(columns)
    waits = _find_wait_targets(columns, blocking)
    for thread in np.intersect1d(gaps.thread, blocking.thread):
        calls = np.flatnonzero(blocking.thread == thread)
        found[calls] = _compute_thread_bubbles(columns, blocking, calls, gaps.take(gaps.thread == thread), waits)
    return np.minimum(found, _compute_max_loss(columns, blocking))


def _compute_max_loss(columns: Columns, blocking: BlockingCalls) -> Floats:
    """Return how much of each call's own time the GPU can lose by it: idle time meanwhile, and work left when it began.

    It is all of the time on a GPU that one host thread feeds, and 0 before the first work.
    """
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    start, end = blocking.start, blocking.end
    if not len(gpu):
        return np.zeros(len(blocking))
    busy = merge_intervals(gpu.start, gpu.end)
    gaps = busy[1][:-1], busy[0][1:]
    launched = take_known(calls.start, match_keys(calls.correlation, gpu.correlation), -np.inf)
    order = np.argsort(launched, kind="stable")
    done = np.append(-np.inf, np.maximum.accumulate(gpu.end[order]))
    left = np.clip(done[np.searchsorted(launched[order], start, "right")] - start, 0.0, end - start)
    return np.minimum(sum_covered_time(*gaps, end) - sum_covered_time(*gaps, start) + left, end - start)


class _Gaps(NamedTuple):
    """Hold idle times that end with work which the host launched late, in order."""

    start: Floats
    end: Floats
    launched: Floats  # time when the host began to launch that work
    thread: Ints

    def take(self, which: NDArray[Any]) -> _Gaps:
        """Return the gaps that a mask selects."""
        return _Gaps(*(column[which] for column in self))


def _find_late_gaps(columns: Columns) -> _Gaps:
    """Return the gaps before work that was not in the queue when the GPU became idle."""
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    start, end = merge_intervals(gpu.start, gpu.end)
    dry, wet = end[:-1], start[1:]
    by_start = np.argsort(gpu.start, kind="stable")
    following = by_start[np.searchsorted(gpu.start[by_start], wet)]
    launch = match_keys(calls.correlation, gpu.correlation[following])
    known = np.flatnonzero(launch >= 0)
    late = known[calls.end[launch[known]] > dry[known] - MIN_LAUNCH_AGE_US]
    return _Gaps(dry[late], wet[late], calls.start[launch[late]], calls.thread[launch[late]])


class _WaitTargets(NamedTuple):
    """Hold what calls wait for, as masks over all calls."""

    everything: Bools
    streams: dict[int, Bools]  # stream -> calls that may have waited for it
    start: Floats  # start of each call

    @property
    def known(self) -> Bools:
        """Return a mask of calls for which something is known."""
        known: Bools = np.any([self.everything, *self.streams.values()], axis=0)
        return known


def _find_wait_targets(columns: Columns, blocking: BlockingCalls) -> _WaitTargets:
    """Return what each call waits for; a trace names no stream or event.

    The stream of a copy is known, and a long call waited for what ended meanwhile. Nothing is known about a short call,
    which may have waited for another stream or for none, nor about a call that may not block.
    """
    gpu = columns.tables["gpu"]
    blocks = ~blocking.may_block
    of_copy = take_known(gpu.thread, blocking.copied, -1)
    long = (blocking.copied < 0) & (blocking.end - blocking.start > MAX_NO_WAIT_US)
    streams = {}
    for stream in np.unique(gpu.thread).tolist():
        ends = np.sort(gpu.end[gpu.thread == stream])
        ended = np.searchsorted(ends, blocking.end, "right") > np.searchsorted(ends, blocking.start, "right")
        streams[stream] = blocks & ((of_copy == stream) | long & ended)
    everything = np.array([call.kind in ("device", "free") for call in blocking.calls], bool)
    return _WaitTargets(blocks & everything, streams, blocking.start)


def _compute_thread_bubbles(
    columns: Columns, blocking: BlockingCalls, calls: Ints, gaps: _Gaps, waits: _WaitTargets
) -> Floats:
    """Return the idle time after these calls of a thread, in gaps that end with its launches, up to its next wait."""
    start, end = blocking.start[calls], blocking.end[calls]
    idle = np.concatenate([[0.0], np.cumsum(gaps.end - gaps.start)])
    first = np.searchsorted(np.maximum.accumulate(gaps.launched), end)
    before = np.maximum(sum_covered_time(gaps.start, gaps.end, start), idle[first])
    behind: Floats = idle[-1] - before
    order = np.lexsort((end, before))
    waiting = np.flatnonzero(waits.known[calls[order]])
    at = np.searchsorted(waiting, np.arange(len(order)), "right")
    followed = at < len(waiting)
    one, following = order[followed], order[waiting[at[followed]]]
    until = (
        before[following]
        - before[one]
        + _compute_unseen_time(columns, waits, calls[following], start[one], end[following])
    )
    behind[one] = np.minimum(behind[one], until)
    return behind


def _compute_unseen_time(columns: Columns, waits: _WaitTargets, calls: Ints, start: Floats, end: Floats) -> Floats:
    """Return the time from start to end in which only streams had work for which each of these calls does not wait.

    The host may still be ahead by this time after the call, without any gap on the GPU. Where the call waits for work that
    itself waited for another stream, such as a copy of what a kernel computed, the time of that stream's work counts as well.
    """
    gpu = columns.tables["gpu"]
    most = np.zeros(len(calls))
    if len(waits.streams) < 2:  # noqa: PLR2004 - a stream and another one
        return most
    busy = merge_intervals(gpu.start, gpu.end)
    of_stream = {stream: merge_intervals(*_take_stream(gpu, stream)) for stream in waits.streams}
    prerequisites = _find_prerequisites(columns)
    for stream, waiting in waits.streams.items():
        at = np.flatnonzero(waiting[calls] & ~waits.everything[calls])
        total = sum_covered_time(*busy, end[at]) - sum_covered_time(*busy, start[at])
        its = of_stream[stream]
        held = sum_covered_time(*its, end[at]) - sum_covered_time(*its, start[at])
        rows = _find_only_ended(gpu, stream, waits.start[calls[at]], end[at])
        for other in np.unique(prerequisites[rows[rows >= 0]]):
            chosen = np.flatnonzero((rows >= 0) & (prerequisites[rows] == other))
            if other < 0 or not len(chosen):
                continue
            begin = np.maximum(gpu.start[rows[chosen]], start[at[chosen]])
            before = sum_covered_time(*of_stream[other], begin) - sum_covered_time(*of_stream[other], start[at[chosen]])
            behind = sum_covered_time(*its, end[at[chosen]]) - sum_covered_time(*its, begin)
            held[chosen] = np.maximum(held[chosen], before + behind)
        most[at] = np.maximum(most[at], total - held)
    return most


def _take_stream(gpu: Table, stream: int) -> tuple[Floats, Floats]:
    """Return start and end of the work of a stream."""
    rows = np.flatnonzero(gpu.thread == stream)
    return gpu.start[rows], gpu.end[rows]


def _find_only_ended(gpu: Table, stream: int, start: Floats, end: Floats) -> Ints:
    """Return the row of the only work of a stream that ended from `start` to `end`; -1 if several or none did."""
    rows = np.flatnonzero(gpu.thread == stream)
    rows = rows[np.argsort(gpu.end[rows], kind="stable")]
    first, behind = (np.searchsorted(gpu.end[rows], moment, "right") for moment in (start, end))
    return np.where(behind - first == 1, rows[np.minimum(first, len(rows) - 1)], -1)


def _find_prerequisites(columns: Columns) -> Ints:
    """Return for each GPU work the other stream for which it waited, as a copy does that follows a kernel; else -1.

    Such work was in the queue and the work before it on its stream had ended for longer than a launch takes, and it
    began as work of exactly one other stream ended.
    """
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    launched = take_known(calls.end, match_keys(calls.correlation, gpu.correlation), np.inf)
    order = np.lexsort((gpu.start, gpu.thread))
    same = gpu.thread[order[1:]] == gpu.thread[order[:-1]]
    ready = launched.copy()
    ready[order[1:]] = np.maximum(ready[order[1:]], np.where(same, gpu.end[order[:-1]], -np.inf))
    ended: Ints = np.full(len(gpu), -1)
    count = np.zeros(len(gpu), np.int64)
    for stream in np.unique(gpu.thread).tolist():
        ends = np.sort(_take_stream(gpu, stream)[1])
        just = np.searchsorted(ends, gpu.start, "right") > np.searchsorted(ends, gpu.start - MIN_LAUNCH_AGE_US)
        just &= gpu.thread != stream
        ended[just] = stream
        count += just
    return np.where((gpu.start - ready > MIN_LAUNCH_AGE_US) & (count == 1), ended, -1)


def find_waited_work(columns: Columns, blocking: BlockingCalls) -> list[str]:
    """Return the name of the last kernel that ended while each call blocked, or of the last copy without a kernel."""
    gpu = columns.tables["gpu"]
    order = np.argsort(gpu.end, kind="stable")
    by_end = gpu.name[order].tolist()
    copies = {n for n, name in enumerate(columns.names) if name.startswith(("Memcpy", "Memset"))}
    first = np.searchsorted(gpu.end[order], blocking.start, "right").tolist()
    last = np.searchsorted(gpu.end[order], blocking.end, "right").tolist()
    names = []
    for begin, end in zip(first, last, strict=True):
        ended = by_end[max(begin, end - MAX_LOOK_BACK) : end][::-1]
        found = next((n for n in ended if n not in copies), ended[0] if ended else None)
        names.append("" if found is None else columns.names[found])
    return names


MAX_LOOK_BACK = 64  # maximum number of GPU events that are searched for a kernel before a copy is named
MIN_LAUNCH_AGE_US = 10.0  # minimum age in µs of a launch when the GPU idles, for its work to count as queued
MAX_NO_WAIT_US = 10.0  # maximum duration in µs of a call that finds nothing to wait for
