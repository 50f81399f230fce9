"""Traces into a report: read, find what blocks, attribute, price, group."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.syncs.model import Report, Site, TraceSummary, report_of
from dcpbench.syncs.sites import Sync, merge, sites_of_trace
from dcpbench.syncs.steps import PROFILER_STEP, Range, Steps, find_steps
from dcpbench.syncs.traces.blocking import QUERY_US, SYNCHRONISE, cause_of_frees, direction_of, find_blocking, rule_of
from dcpbench.syncs.traces.bubbles import bubbles, busy_and_idle, waited_for
from dcpbench.syncs.traces.columns import Columns, read_columns
from dcpbench.syncs.traces.coverage import coverage
from dcpbench.syncs.traces.intervals import ANY, chains, match
from dcpbench.syncs.traces.python_lines import Attribution, Repository
from dcpbench.syncs.traces.reading import TraceReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from dcpbench.syncs.traces.blocking import Blocking
    from dcpbench.syncs.traces.columns import Table
    from dcpbench.syncs.traces.python_lines import Stacks

    Ints = NDArray[Any]


_NUMBERS = re.compile(r"\d+")


def scan(
    paths: Sequence[Path], *, root: Path, step_range: str | None = None, progress: Callable[[str], None] | None = None
) -> Report:
    """Everything that traces show of host-blocking synchronisation; the verdict is the gate's.

    Args:
        paths: Trace files, one per rank or more.
        root: Repository to which paths in the traces are made relative.
        step_range: Regular expression for annotations that mark steps; None finds them by itself.
        progress: Told what is being read.

    Raises:
        TraceError: A file cannot be read, or is no trace.
        UsageError: The expression is not one, or matches no annotation of any trace.
    """
    try:
        re.compile(step_range or "")
    except re.error as e:
        raise UsageError(
            f"--step-range {step_range!r} is no regular expression ({e}); give one such as '^decode_step'"
        ) from None
    repository = Repository(root)
    scanned = [_scan(path, repository, step_range, progress) for path in paths]
    summaries = [summary for summary, _ in scanned]
    if step_range is not None and not any(s.steps for s in summaries):
        raise UsageError(
            f"no annotation matches --step-range {step_range!r}; leave it out to see which ranges there are"
        )
    return report_of(summaries, merge([sites for _, sites in scanned]))


def _scan(
    path: Path, repository: Repository, step_range: str | None, progress: Callable[[str], None] | None
) -> tuple[TraceSummary, list[Site]]:
    """Summary and sites of one trace."""
    reader = TraceReader(path)
    events = 0

    def count(more: int) -> None:
        nonlocal events
        events += more
        if progress:
            progress(f"{path.name}: {events:,} events")

    columns = read_columns(reader.blocks(), reader.trouble, count)
    return analyse(columns, str(path), repository, rank=reader.rank, step_range=step_range)


def analyse(
    columns: Columns, name: str, repository: Repository, *, rank: int | None = None, step_range: str | None = None
) -> tuple[TraceSummary, list[Site]]:
    """Summary and sites of what was read of one trace."""
    ranges = _ranges(columns)
    steps = find_steps(ranges, step_range)
    blocking = find_blocking(columns)
    stacks: Stacks = "python_function" if len(columns.tables["python"]) else "call stack" if columns.stacks else "none"
    found = _occurrences(columns, blocking, steps, repository, stacks)
    busy, idle = busy_and_idle(columns)
    has_gpu = bool(len(columns.tables["gpu"]))
    tables = [t for t in columns.tables.values() if len(t)]
    summary = TraceSummary(
        path=name,
        rank=rank,
        steps=len(steps) or None,
        span_us=float(max(t.end.max() for t in tables) - min(t.start.min() for t in tables)) if tables else None,
        gpu_busy_us=busy if has_gpu else None,
        gpu_idle_us=idle if has_gpu else None,
        coverage=coverage(columns, steps, stacks),
    )
    return summary, sites_of_trace(name, found, len(steps))


def _ranges(columns: Columns) -> list[Range]:
    """Annotations; in traces of 2021 steps are operators."""
    ranges, ops = columns.tables["ranges"], columns.tables["ops"]
    found = [Range(columns.names[n], s, e) for n, s, e in zip(ranges.name, ranges.start, ranges.end, strict=True)]
    steps = {n for n, name in enumerate(columns.names) if PROFILER_STEP.match(name)}
    if steps and not any(n in steps for n in ranges.name.tolist()):
        rows = np.flatnonzero(np.isin(ops.name, list(steps)))
        found += [Range(columns.names[ops.name[i]], ops.start[i], ops.end[i]) for i in rows]
    return found


def _occurrences(
    columns: Columns, blocking: Blocking, steps: Steps, repository: Repository, stacks: Stacks
) -> list[Sync]:
    """Every blocking call with everything that is known of it."""
    ops, gpu, ranges = (columns.tables[name] for name in ("ops", "gpu", "ranges"))
    op_chains = _with_linked_ops(columns, blocking, chains(ops, blocking.start, blocking.thread))
    frames = chains(columns.tables["python"], blocking.start, blocking.thread)
    # On a thread that has no annotation at all, those open on any other count.
    alone = ~np.isin(blocking.thread, ranges.thread)
    inside = chains(ranges, blocking.start, np.where(alone, ANY, blocking.thread))
    priced = bubbles(columns, blocking) if len(gpu) else None
    names, reasons = columns.names, waited_for(columns, blocking)
    step_starts = set(steps.start.tolist())
    of_step, own = steps.of(blocking.start), _window_edges(columns, blocking, op_chains)
    attribute = Attribution(columns, repository, stacks)
    directions = [direction_of(name) for name in names]
    frees = cause_of_frees(columns)
    found = []
    for i, blocked in enumerate(blocking.calls):
        chain = tuple(names[ops.name[row]] for row in op_chains[i] if not PROFILER_STEP.match(names[ops.name[row]]))
        where = attribute.line(frames[i], op_chains[i])
        copied = blocked.copied
        direction = directions[gpu.name[copied]] if copied >= 0 else ""
        size = int(gpu.bytes[copied]) if copied >= 0 else -1
        inner = (names[ranges.name[row]] for row in inside[i][::-1] if ranges.start[row] not in step_starts)
        within = next(inner, "")
        found.append(
            Sync(
                rule=rule_of(blocked, chain, direction).id,
                op=chain[-1] if chain else "",
                op_chain=chain,
                stack=where.stack,
                user=where.user,
                line_is=where.line_is,
                called_from=where.called_from,
                thread=columns.thread_names[blocked.thread] if blocked.thread >= 0 else "",
                explicit=blocked.kind in SYNCHRONISE and copied < 0 and not chain and where.asks,
                direction=direction,
                call=blocked.call,
                bytes=size if size >= 0 else None,
                may_block=blocked.may_block,
                own=where.profiler or (own[i] and not where.stack),
                range=within,
                within="" if where.user and where.user.function else _NUMBERS.sub("#", within),
                step=of_step[i],
                at=blocked.start,
                wait=blocked.wait,
                bubble=None if priced is None else float(priced[i]),
                waited=None if priced is None else bool(reasons[i]) or blocked.wait > QUERY_US,
                waited_for=reasons[i],
                cause=frees if blocked.kind == "free" else "",
            )
        )
    return found


def _with_linked_ops(columns: Columns, blocking: Blocking, found: list[Ints]) -> list[Ints]:
    """Operators by `External id` where none contains the call in time: the runtime may name its thread otherwise."""
    ops = columns.tables["ops"]
    missing = [i for i, chain in enumerate(found) if not len(chain)]
    if not missing or not len(ops):
        return found
    for i, row in zip(missing, match(ops.external, blocking.external[missing]), strict=True):
        if row >= 0:
            found[i] = np.array([row])
    return found


def _window_edges(columns: Columns, blocking: Blocking, op_chains: list[Ints]) -> list[bool]:
    """Device synchronisations outside any operator before the first or after the last work: the profiler makes them."""
    gpu, calls, ops = columns.tables["gpu"], columns.tables["calls"], columns.tables["ops"]
    step = columns.named(PROFILER_STEP.match)
    launched = match(calls.correlation, gpu.correlation)
    marks = _closed(columns, step)
    work = [(t.start, t.end) for t in (ops.take(~step[ops.name]) if len(ops) else ops, marks)]
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


def _closed(columns: Columns, step: NDArray[np.bool_]) -> Table:
    """Annotations, without steps that end behind everything else: the profiler stopped in them, and closed them so."""
    ranges = columns.tables["ranges"]
    if not len(ranges):
        return ranges
    others = [t.end[~step[t.name]] for kind, t in columns.tables.items() if len(t) and kind != "python"]
    end = max(ends.max(initial=-np.inf) for ends in others)
    return ranges.take(~(step[ranges.name] & (ranges.end >= end)))
