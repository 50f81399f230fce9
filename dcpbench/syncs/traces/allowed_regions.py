"""Find the regions of a trace in which vLLM allows synchronisation: `with gpu_sync_allowed():`.

`gpu_sync_allowed` of vllm/utils/gpu_sync_debug.py is a context manager. In a trace with Python stacks, the function that contains the
`with` statement has three calls as direct children: `gpu_sync_allowed`, then `__enter__` and, at the end of the region, `__exit__` of
contextlib.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcpbench.syncs.traces.intervals import find_chains, find_containing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.syncs.traces.blocking import BlockingCalls
    from dcpbench.syncs.traces.columns import Columns, Table
    from dcpbench.syncs.traces.intervals import Bools, Ints

REASON = "vLLM's gpu_sync_allowed"
_ALLOWED = re.compile(r"(?:^|/)vllm/.*\.py\(\d+\): gpu_sync_allowed$")
_ENTER = re.compile(r"(?:^|/)contextlib\.py\(\d+\): __enter__$")
_EXIT = re.compile(r"(?:^|/)contextlib\.py\(\d+\): __exit__$")


class Region(NamedTuple):
    """Hold one region of a thread, from the end of `__enter__` to the start of `__exit__`."""

    thread: int
    start: float
    end: float


def find_allowed_reasons(columns: Columns, blocking: BlockingCalls) -> list[str]:
    """Return for each blocking call the reason for which it may wait; empty for a call outside the regions."""
    regions = find_regions(columns)
    reasons = [""] * len(blocking)
    for thread in {region.thread for region in regions}:
        calls = np.flatnonzero(blocking.thread == thread)
        bounds = np.array([(region.start, region.end) for region in regions if region.thread == thread])
        inside, _ = find_containing(bounds[:, 0], bounds[:, 1], blocking.start[calls])
        for call in calls[np.unique(inside)].tolist():
            reasons[call] = REASON
    return reasons


def find_regions(columns: Columns) -> list[Region]:
    """Return the regions of a trace that holds both their `__enter__` and their `__exit__`."""
    python = columns.tables["python"]
    calls, enters, exits = (columns.match_names(pattern.search) for pattern in (_ALLOWED, _ENTER, _EXIT))
    if not len(python) or not calls[python.name].any():
        return []
    threads = np.unique(python.thread[calls[python.name]])
    rows = np.flatnonzero((calls | enters | exits)[python.name] & np.isin(python.thread, threads))
    rows = rows[np.argsort(python.start[rows], kind="stable")]
    children: dict[int, list[int]] = {}
    for row, parent in zip(rows.tolist(), _find_parents(python, rows), strict=True):
        children.setdefault(parent, []).append(row)
    children.pop(-1, None)
    return [region for family in children.values() for region in _pair_children(python, family, calls, enters)]


def _find_parents(python: Table, rows: Ints) -> list[int]:
    """Return for each Python function the row of the function that called it, or -1."""
    chains = find_chains(python, python.start[rows], python.thread[rows])
    parents = []
    for row, chain in zip(rows.tolist(), chains, strict=True):
        around = [other for other in chain.tolist() if other != row and python.end[other] >= python.end[row]]
        parents.append(around[-1] if around else -1)
    return parents


def _pair_children(python: Table, family: Iterable[int], calls: Bools, enters: Bools) -> list[Region]:
    """Return the regions among the children of one call of a function, which are in order of time."""
    found: list[Region] = []
    opened: list[int | None] = []
    announced = False
    for row in family:
        name = python.name[row]
        if calls[name]:
            announced = True
        elif enters[name]:
            opened.append(row if announced else None)
            announced = False
        elif opened and (enter := opened.pop()) is not None:
            found.append(Region(int(python.thread[row]), float(python.end[enter]), float(python.start[row])))
    return found
