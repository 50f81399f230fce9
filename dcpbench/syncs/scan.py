"""Turn traces into a report: read, find blocking calls, attribute them to code, price them, group them into sites."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.syncs.nsys.per_process import is_export, read_export
from dcpbench.syncs.sites import Sync, group_trace_sites, merge_sites
from dcpbench.syncs.steps import PROFILER_STEP, LaunchedWork, Range, Steps, check_step_range, find_steps, format_ranges
from dcpbench.syncs.sync_report import Report, Site, TraceSummary, build_report
from dcpbench.syncs.trace_ranks import is_front_end, parse_file_name
from dcpbench.syncs.traces.allowed_regions import find_allowed_reasons
from dcpbench.syncs.traces.blocking import (
    MAX_QUERY_US,
    SYNCHRONISE,
    explain_frees,
    find_blocking_calls,
    find_rule,
    parse_direction,
)
from dcpbench.syncs.traces.bubbles import compute_bubbles, compute_busy_and_idle, find_waited_work
from dcpbench.syncs.traces.columns import Columns, read_columns
from dcpbench.syncs.traces.coverage import compute_coverage, has_known_bubbles
from dcpbench.syncs.traces.intervals import ANY_THREAD, find_chains, match_keys, take_known
from dcpbench.syncs.traces.python_lines import Attribution, Repository
from dcpbench.syncs.traces.reading import TraceReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dcpbench.syncs.traces.blocking import BlockingCalls
    from dcpbench.syncs.traces.columns import Table
    from dcpbench.syncs.traces.intervals import Floats, Ints
    from dcpbench.syncs.traces.python_lines import Line, Stacks


_NUMBERS = re.compile(r"\d+")


def scan_traces(
    paths: Sequence[Path], *, root: Path, step_range: str | None = None, progress: Callable[[str], None] | None = None
) -> Report:
    """Report all host-blocking synchronisation in traces; the verdict is left to the gate.

    Args:
        paths: Trace files, one per rank or more.
        root: Repository to which paths in the traces are made relative.
        step_range: Regular expression for annotations that mark steps; None finds them by itself.
        progress: Called with the file and the number of events so far.

    Raises:
        TraceError: A file cannot be read, or is no trace.
        UsageError: The expression is not one, or matches no annotation of any trace.
    """
    check_step_range(step_range)
    repository = Repository(root)
    scanned = [of_trace for path in paths for of_trace in _scan_file(path, repository, step_range, progress)]
    summaries = [summary for summary, _, _ in scanned]
    if step_range is not None and not any(s.steps for s in summaries):
        ranges = next((ranges for _, _, ranges in scanned), "")
        raise UsageError(f"no annotation matches --step-range {step_range!r}. {ranges}")
    return build_report(summaries, merge_sites([sites for _, sites, _ in scanned]))


def _scan_file(
    path: Path, repository: Repository, step_range: str | None, progress: Callable[[str], None] | None
) -> Iterator[tuple[TraceSummary, list[Site], str]]:
    """Yield the summary and the sites of each trace in a file and, if it has no steps, a sentence about its ranges."""
    for trace in read_traces(path, progress):
        columns = trace.columns
        summary, sites = scan_columns(columns, trace.name, repository, step_range=step_range)
        summary.rank, summary.world_size = trace.rank, trace.world_size
        summary.dp_rank, summary.pp_rank = parse_file_name(path.name).group
        seen = summary.coverage
        summary.front_end = is_front_end(path.name) and not (seen.gpu_events or seen.runtime_events)
        if summary.front_end:
            seen.notes = []
        yield summary, sites, "" if summary.steps else format_ranges(columns.list_ranges())


class Trace(NamedTuple):
    """Hold what was read of one process."""

    name: str  # name of the file, and of the process if the file holds several
    columns: Columns
    rank: int | None = None
    world_size: int | None = None


def read_traces(path: Path, progress: Callable[[str], None] | None = None) -> list[Trace]:
    """Read a trace of torch.profiler, or an nsys export, which may hold several processes.

    Args:
        path: File, or folder of an export.
        progress: Called with the number of events so far.

    Raises:
        TraceError: It is none of them.
    """
    events = 0

    def count_events(more: int) -> None:
        nonlocal events
        events += more
        if progress:
            progress(f"{path.name}: {events:,} events")

    if is_export(path):
        processes = read_export(path, count_events)
        rank = parse_file_name(path.name).rank if len(processes) == 1 else None
        return [Trace(f"{path} ({name})" if name else str(path), columns, rank) for name, columns in processes]
    reader = TraceReader(path)
    columns = read_columns(reader.read_blocks(), reader.problems, count_events)
    return [Trace(str(path), columns, reader.rank, reader.world_size)]


def scan_columns(
    columns: Columns, name: str, repository: Repository, *, step_range: str | None = None
) -> tuple[TraceSummary, list[Site]]:
    """Return the summary and the sites of a trace that was read."""
    blocking = find_blocking_calls(columns)
    stacks: Stacks = "python_function" if len(columns.tables["python"]) else "call stack" if columns.stacks else "none"
    placed = _find_places(columns, blocking, repository, stacks)
    ranges, total = _find_ranges(columns, blocking.start[~placed.own])
    steps = find_steps(ranges, total, step_range)
    found = _build_syncs(columns, blocking, placed, steps)
    busy, idle = compute_busy_and_idle(columns)
    has_gpu = bool(len(columns.tables["gpu"]))
    tables = [t for t in columns.tables.values() if len(t)]
    summary = TraceSummary(
        path=name,
        steps=len(steps) or None,
        span_us=float(max(t.end.max() for t in tables) - min(t.start.min() for t in tables)) if tables else None,
        gpu_busy_us=busy if has_gpu else None,
        gpu_idle_us=idle if has_gpu else None,
        coverage=compute_coverage(columns, steps, stacks),
    )
    return summary, group_trace_sites(name, found, steps)


def find_trace_steps(columns: Columns, step_range: str | None = None) -> Steps:
    """Return the steps of a trace. GPU work that prepares a step but runs during the previous one is counted for the previous one."""
    ranges, total = _find_ranges(columns, find_blocking_calls(columns).start)
    return dataclasses.replace(find_steps(ranges, total, step_range), prepared=None)


def _find_ranges(columns: Columns, waits: Floats) -> tuple[list[Range], LaunchedWork]:
    """Return the annotations with the work that was launched in each, and all work; traces of 2021 have steps as operators.

    An annotation is empty if no work was launched in it and none of `waits` began in it.
    """
    ranges, ops = columns.tables["ranges"], columns.tables["ops"]
    step = columns.match_names(PROFILER_STEP.match)
    marks = [ranges]
    if step.any() and not step[ranges.name].any():
        marks.append(ops.take(step[ops.name]))
    launched, gpu_us = _find_work(columns, step)
    waits, sums = np.sort(waits), np.concatenate([[0.0], np.cumsum(gpu_us)])
    found = []
    for table in marks:
        first, behind = np.searchsorted(launched, table.start), np.searchsorted(launched, table.end, "right")
        waited = np.searchsorted(waits, table.start) != np.searchsorted(waits, table.end, "right")
        launches = behind - first
        empty = (launches == 0) & ~waited
        columns_of_rows = (table.name, table.start, table.end, empty, launches, sums[behind] - sums[first])
        found += [
            Range(columns.names[name], start, end, is_empty, LaunchedWork(count, us))
            for name, start, end, is_empty, count, us in zip(*(c.tolist() for c in columns_of_rows), strict=True)
        ]
    return found, LaunchedWork(len(launched), float(sums[-1]))


def _find_work(columns: Columns, step: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return when each piece of GPU work was launched, in order, and how long it took.

    Where no call is known, it is when the work began. In a trace without a GPU operators stand for the work.
    """
    gpu, calls, ops = columns.tables["gpu"], columns.tables["calls"], columns.tables["ops"]
    if not len(gpu):
        moments = np.sort(ops.start[~step[ops.name]])
        return moments, np.zeros(len(moments))
    moments = take_known(calls.start, match_keys(calls.correlation, gpu.correlation), gpu.start)
    order = np.argsort(moments, kind="stable")
    return moments[order], (gpu.end - gpu.start)[order]


class _CallPlaces(NamedTuple):
    """Hold the place of each blocking call in the program."""

    op_chains: list[Ints]
    lines: list[Line]
    own: NDArray[np.bool_]  # the profiler's


def _find_places(columns: Columns, blocking: BlockingCalls, repository: Repository, stacks: Stacks) -> _CallPlaces:
    op_chains = _add_linked_ops(columns, blocking, find_chains(columns.tables["ops"], blocking.start, blocking.thread))
    frames = find_chains(columns.tables["python"], blocking.start, blocking.thread)
    attribute = Attribution(columns, repository, stacks)
    stacks_of_calls = [call.stack for call in blocking.calls]
    lines = [attribute.find_line(*of_call) for of_call in zip(frames, op_chains, stacks_of_calls, strict=True)]
    edges = _find_window_edges(columns, blocking, op_chains)
    own = [line.profiler or (edge and not line.stack) for line, edge in zip(lines, edges, strict=True)]
    return _CallPlaces(op_chains, lines, np.array(own, bool))


def _build_syncs(columns: Columns, blocking: BlockingCalls, placed: _CallPlaces, steps: Steps) -> list[Sync]:
    """Return each blocking call with all that the trace holds about it."""
    ops, gpu, ranges = (columns.tables[name] for name in ("ops", "gpu", "ranges"))
    # On a thread that has no annotation at all, those open on any other count.
    alone = ~np.isin(blocking.thread, ranges.thread)
    inside = find_chains(ranges, blocking.start, np.where(alone, ANY_THREAD, blocking.thread))
    priced = compute_bubbles(columns, blocking) if has_known_bubbles(columns) else None
    untimed = bool(columns.problems.untimed_events)
    names, reasons = columns.names, find_waited_work(columns, blocking)
    step_starts = set(steps.start.tolist())
    of_step = steps.find_indices(blocking.start)
    directions = [parse_direction(name) for name in names]
    frees = explain_frees(columns)
    allowed = find_allowed_reasons(columns, blocking)
    chains: dict[bytes, tuple[str, ...]] = {}
    found = []
    for i, blocked in enumerate(blocking.calls):
        own, where = bool(placed.own[i]), placed.lines[i]
        in_ops = ops.name[placed.op_chains[i]]
        chain = chains.get(key := in_ops.tobytes())
        if chain is None:
            chain = chains[key] = tuple(names[n] for n in in_ops if not PROFILER_STEP.match(names[n]))
        copied = blocked.copied
        direction = directions[gpu.name[copied]] if copied >= 0 else ""
        size = int(gpu.bytes[copied]) if copied >= 0 else -1
        inner = (names[ranges.name[row]] for row in inside[i][::-1] if ranges.start[row] not in step_starts)
        within = "" if own else next(inner, "")
        found.append(
            Sync(
                rule=find_rule(blocked, chain, direction).id,
                op=chain[-1] if chain else "",
                op_chain=chain,
                stack=where.stack,
                user=where.user,
                line_is=where.line_is,
                called_from=where.called_from,
                thread=columns.thread_names[blocked.thread] if blocked.thread >= 0 else "",
                explicit=blocked.kind in SYNCHRONISE and copied < 0 and not chain and where.calls_synchronize,
                direction=direction,
                call=blocked.call,
                bytes=size if size >= 0 else None,
                may_block=blocked.may_block,
                own=own,
                allowed="" if own else allowed[i],
                range=within,
                within="" if where.user and where.user.function else _NUMBERS.sub("#", within),
                step=of_step[i],
                at=blocked.start,
                wait=None if untimed and blocked.wait == 0 else blocked.wait,
                bubble=None if priced is None else float(priced[i]),
                waited=None if untimed or not len(gpu) else bool(reasons[i]) or blocked.wait > MAX_QUERY_US,
                waited_for=reasons[i],
                cause=frees if blocked.kind == "free" else "",
            )
        )
    return found


def _add_linked_ops(columns: Columns, blocking: BlockingCalls, found: list[Ints]) -> list[Ints]:
    """Fill in operators by `External id` where none contains the call: the runtime may name its thread otherwise."""
    ops = columns.tables["ops"]
    missing = [i for i, chain in enumerate(found) if not len(chain)]
    if not missing or not len(ops):
        return found
    for i, row in zip(missing, match_keys(ops.external, blocking.external[missing]), strict=True):
        if row >= 0:
            found[i] = np.array([row])
    return found


def _find_window_edges(columns: Columns, blocking: BlockingCalls, op_chains: list[Ints]) -> list[bool]:
    """Mark the profiler's own waits: device synchronisations in no operator, before the first or after the last work."""
    gpu, calls, ops = columns.tables["gpu"], columns.tables["calls"], columns.tables["ops"]
    step = columns.match_names(PROFILER_STEP.match)
    launched = match_keys(calls.correlation, gpu.correlation)
    marks = _select_closed_ranges(columns, step)
    work = [(t.start, t.end) for t in (ops.take(~step[ops.name]), marks)]
    work.append((calls.start[launched[launched >= 0]],) * 2)
    first = min(start.min(initial=np.inf) for start, _ in work)
    last = max(end.max(initial=-np.inf) for _, end in work)
    if first > last:  # nothing that a profiler could begin before
        return [False] * len(blocking)
    outside = [all(step[ops.name[row]] for row in chain) for chain in op_chains]
    devices = [i for i, call in enumerate(blocking.calls) if call.kind == "device" and outside[i]]
    ends = [i for i in devices if blocking.start[i] >= last]
    own = {i for i in devices if blocking.end[i] <= first} | set(ends[-1:])
    return [i in own for i in range(len(blocking))]


def _select_closed_ranges(columns: Columns, step: NDArray[np.bool_]) -> Table:
    """Return annotations without steps that end behind everything else, which the profiler closed as it stopped."""
    ranges = columns.tables["ranges"]
    others = (t.end[~step[t.name]] for kind, t in columns.tables.items() if kind != "python")
    end = max(ends.max(initial=-np.inf) for ends in others)
    return ranges.take(~(step[ranges.name] & (ranges.end >= end)))
