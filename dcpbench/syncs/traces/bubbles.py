"""What the GPU lost: idle time that a synchronisation caused, at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dcpbench.syncs.traces.intervals import match, union

if TYPE_CHECKING:
    from dcpbench.syncs.traces.blocking import Blocking
    from dcpbench.syncs.traces.columns import Columns
    from dcpbench.syncs.traces.intervals import Floats


def busy_and_idle(columns: Columns) -> tuple[float, float]:
    """(microseconds in which a stream had work, those between first and last work in which none had)."""
    start, end = union(columns.tables["gpu"].start, columns.tables["gpu"].end)
    busy = float((end - start).sum())
    return busy, float(end[-1] - start[0]) - busy if len(start) else 0.0


def bubbles(columns: Columns, blocking: Blocking) -> Floats:
    """Microseconds of GPU idle time charged to each blocking call.

    A call is charged the gap that is open when it returns: from the moment the GPU ran dry, but no earlier than the
    call's start, to the next start of GPU work, if that work was launched after the call returned and on its thread. A
    gap is charged once, to the first call in it that blocks, and to one that only may block where there is no other.
    This is an upper bound: the host may have had other things to do.
    """
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    charged = np.zeros(len(blocking))
    if len(gpu) < 2 or not len(blocking):  # noqa: PLR2004 - a gap lies between two
        return charged
    start, end = union(gpu.start, gpu.end)
    dry, wet = end[:-1], start[1:]
    gap = np.searchsorted(dry, blocking.end, "right") - 1
    inside = (gap >= 0) & (blocking.end < wet[np.maximum(gap, 0)]) if len(dry) else np.zeros(len(blocking), bool)
    by_start = np.argsort(gpu.start, kind="stable")
    following = by_start[np.searchsorted(gpu.start[by_start], wet)]
    launch = match(calls.correlation, gpu.correlation[following])
    known = launch >= 0
    launched = np.where(known, calls.start[launch] if len(calls) else 0.0, -np.inf)
    thread = np.where(known, calls.thread[launch] if len(calls) else -1, -1)
    taken: set[int] = set()
    for i in np.lexsort((blocking.start, blocking.may_block)).tolist():
        g = int(gap[i])
        if inside[i] and g not in taken and launched[g] >= blocking.end[i] and thread[g] == blocking.thread[i]:
            charged[i] = wet[g] - max(dry[g], blocking.start[i])
            taken.add(g)
    return charged


def waited_for(columns: Columns, blocking: Blocking) -> list[str]:
    """Name of the last kernel that ended while each call blocked; of the last copy where there was no kernel."""
    gpu = columns.tables["gpu"]
    order = np.argsort(gpu.end, kind="stable")
    by_end = gpu.name[order].tolist()
    copies = {n for n, name in enumerate(columns.names) if name.startswith(("Memcpy", "Memset"))}
    first = np.searchsorted(gpu.end[order], blocking.start, "right").tolist()
    last = np.searchsorted(gpu.end[order], blocking.end, "right").tolist()
    names = []
    for begin, end in zip(first, last, strict=True):
        ended = by_end[max(begin, end - LOOK_BACK) : end][::-1]
        found = next((n for n in ended if n not in copies), ended[0] if ended else None)
        names.append("" if found is None else columns.names[found])
    return names


LOOK_BACK = 64
"""GPU events to look at for a kernel before a copy is named."""
