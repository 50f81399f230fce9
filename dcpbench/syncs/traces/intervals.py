"""Find the events that contain a moment, for all moments at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcpbench.syncs.traces.columns import Table

    Floats = NDArray[np.float64]
    Ints = NDArray[Any]
    Bools = NDArray[np.bool_]

ANY_THREAD = -2  # number that matches any thread


def find_containing(start: Floats, end: Floats, moments: Floats) -> tuple[Ints, Ints]:
    """Return pairs (moment, interval) with start <= moment < end, by moment, and for each from the outermost to the
    innermost.

    Intervals may overlap and come in any order. Only intervals that contain a moment cost more than a binary search, so
    that a million operators around a hundred synchronisations are cheap.
    """
    order = np.argsort(moments, kind="stable")
    ordered = moments[order]
    first = np.searchsorted(ordered, start, "left")
    counts = np.searchsorted(ordered, end, "left") - first
    holders = np.flatnonzero(counts > 0)
    counts = counts[holders]
    interval = np.repeat(holders, counts)
    within = np.arange(len(interval)) - np.repeat(np.cumsum(counts) - counts, counts)
    moment = order[np.repeat(first[holders], counts) + within]
    by = np.lexsort((-end[interval], start[interval], moment))
    return moment[by], interval[by]


def find_chains(table: Table, moments: Floats, threads: Ints) -> list[Ints]:
    """Return for each moment, in microseconds, the rows of a table on its thread, or on ANY, that contain it, outermost
    first.
    """
    found: list[Ints] = [np.zeros(0, np.int64)] * len(moments)
    for thread in np.unique(threads):
        rows = np.arange(len(table)) if thread == ANY_THREAD else np.flatnonzero(table.thread == thread)
        mine = np.flatnonzero(threads == thread)
        moment, row = find_containing(table.start[rows], table.end[rows], moments[mine])
        first = np.flatnonzero(np.diff(moment, prepend=-1))
        last = np.append(first[1:], len(moment))[: len(first)]
        for i, begin, end in zip(mine[moment[first]], first, last, strict=True):
            found[i] = rows[row[begin:end]]
    return found


def merge_intervals(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return disjoint intervals, in order, that cover the same time."""
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    opens = np.ones(len(start), bool)
    opens[1:] = start[1:] > until[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start)) - 1
    return start[first], until[last] if len(first) else until


def sum_covered_time(start: Floats, end: Floats, moments: Floats) -> Floats:
    """Return for each moment how much time before it lies in these intervals, which are disjoint and in order."""
    if not len(start):
        return np.zeros(len(moments))
    before = np.concatenate([[0.0], np.cumsum(end - start)])
    at = np.searchsorted(start, moments, "right") - 1
    reached = np.clip(moments - start[at], 0.0, (end - start)[at])
    return np.where(at < 0, 0.0, before[at] + reached)


def match_keys(keys: Ints, wanted: Ints) -> Ints:
    """Return for each wanted key the row of the first equal one in `keys`; -1 if there is none or the key is -1."""
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    row = order[at]
    return np.where((keys[row] == wanted) & (wanted != -1), row, -1)


def take_known(values: Ints, rows: Ints, default: Ints | float) -> Ints:
    """Return the values at these rows, and `default`, which may have a value for each row, where the row is -1."""
    return np.where(rows >= 0, values[rows], default) if len(values) else np.full(len(rows), default)
