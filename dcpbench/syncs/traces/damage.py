"""What of a trace is missing or cannot be true, so that it must not be called clean."""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dcpbench.show.text import counted
from dcpbench.syncs.traces.blocking import API_NAMES, SYNC_EVENTS, direction_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from dcpbench.syncs.traces.columns import Columns

LINKED_SHARE = 0.75
"""Share of the GPU events whose call must be known. What was queued before the profiler began has none: up to an eighth
in public traces."""
NAMED = 3
"""Examples that a sentence names."""
_COPIES = tuple(
    f"Memcpy {to} ({a} -> {b})"
    for host in ("Pageable", "Pinned")
    for to, a, b in (("DtoH", "Device", host), ("HtoD", host, "Device"))
)
STEP = "ProfilerStep#"
_STEP = re.compile(r"(.*\D)\d+", re.DOTALL)


def damages(columns: Columns) -> list[str]:
    """Clauses that go on from the name of the trace; each says what to type."""
    trouble = columns.trouble
    said = []
    if trouble.truncated:
        said.append("ends early, so that syncs may be missing: record it again, with fewer steps")
    if trouble.unreadable_events:
        events = counted(trouble.unreadable_events, "event")
        said.append(f"holds {events} that could not be read, so that syncs may be missing: record it again")
    if trouble.untimed_events:
        events = counted(trouble.untimed_events, "event")
        said.append(
            f"holds {events} of calls or GPU work without a duration that can be, so that bubbles are not known: "
            "record it again"
        )
    if trouble.repaired:
        said.append(
            f"holds text that is not JSON and was repaired ({_listed(trouble.repaired)}), so that calls may not be "
            "known by their names: record it again"
        )
    if trouble.behind:
        said.append(f"goes on with {trouble.behind}, which was not read: scan each trace from a file of its own")
    wrong = sorted(filter(_is_damaged, _names_read(columns)))
    if wrong:
        said.append(
            f"holds names that are one bit away from names that would be read ({_listed(wrong)}): it was damaged, so "
            "record or copy it again"
        )
    return [*said, *_unlinked(columns)]


def _listed(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, NAMED + 1))
    return ", ".join(f"'{name}'" for name in first[:NAMED]) + (", …" if len(first) > NAMED else "")


def _names_read(columns: Columns) -> list[str]:
    """Names that a rule looks at, each once."""
    numbers = [np.unique(columns.tables[kind].name) for kind in ("calls", "gpu", "syncs", "ranges")]
    return [columns.names[n] for n in np.unique(np.concatenate(numbers)).tolist()]


@functools.lru_cache(maxsize=1 << 12)
def _is_damaged(name: str) -> bool:
    """Whether a name that says nothing would be one that does, were a single bit another."""
    if kind_of(name) or name in SYNC_EVENTS:
        return False
    step = _STEP.fullmatch(name)
    return (
        one_bit_off(name, API_NAMES)
        or one_bit_off(name, SYNC_EVENTS)
        or (name not in _COPIES and one_bit_off(name, _COPIES))
        or (step is not None and one_bit_off(step[1], (STEP,)))
    )


def one_bit_off(word: str, known: Iterable[str]) -> bool:
    """Whether a word and one of those that are known differ in exactly one bit."""
    bits = word.encode("utf-8", "surrogatepass")
    number = int.from_bytes(bits)
    return any(
        len(other) == len(bits) and (number ^ int.from_bytes(other.encode())).bit_count() == 1 for other in known
    )


def _unlinked(columns: Columns) -> list[str]:
    """What is wrong with the links of GPU work to the calls that caused it.

    Ids that several calls share, one after the other, link nothing: runtime calls share theirs only with calls within.
    A launch of one kernel copies nothing.
    """
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    if not len(gpu) or not len(calls):
        return []
    order = np.argsort(calls.correlation, kind="stable")
    ids = calls.correlation[order]
    at = np.minimum(np.searchsorted(ids, gpu.correlation), len(ids) - 1)
    linked = (ids[at] == gpu.correlation) & (gpu.correlation != -1)
    shared = _shared(calls.start[order], calls.end[order], ids)
    if len(shared):
        linked &= ~np.isin(gpu.correlation, shared)
    launches = _names_with(columns, calls.name, lambda name: "LaunchKernel" in name)
    copies = _names_with(columns, gpu.name, lambda name: bool(direction_of(name)))
    linked &= ~(launches[calls.name[order[at]]] & copies[gpu.name])
    said = []
    alone = int((~linked).sum())
    if alone > (1 - LINKED_SHARE) * len(gpu):
        said.append(
            f"does not tell of {alone:,} of its {len(gpu):,} GPU events which call caused them, so that copies that "
            "wait are not known: record it again, and one process in each trace"
        )
    waiting = _names_with(columns, gpu.name, lambda name: "pageable" in direction_of(name))
    lost = int((waiting[gpu.name] & ~linked).sum())
    if lost and not said:
        said.append(
            f"does not tell which calls made {lost:,} of its copies from or to pageable memory, and they may have "
            "waited: record it again"
        )
    return said


def _names_with(columns: Columns, used: NDArray[Any], test: Callable[[str], bool]) -> NDArray[np.bool_]:
    """For each name by number whether it passes, where it is used at all."""
    passes = np.zeros(len(columns.names), bool)
    for number in np.unique(used).tolist():
        passes[number] = test(columns.names[number])
    return passes


def _shared(start: NDArray[Any], end: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """Ids that belong to several calls of which none lies within the other; `ids` are in order."""
    again = np.flatnonzero((ids[1:] == ids[:-1]) & (ids[1:] != -1))
    apart = (start[again + 1] >= end[again]) | (start[again] >= end[again + 1])
    return np.unique(ids[again[apart]])
