"""Compute the coverage of a trace: what it cannot show, and lost or contradictory parts, with which it is never clean."""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcpbench.show.text import format_count
from dcpbench.syncs.steps import HOW_TO_MARK, STEP, format_ranges
from dcpbench.syncs.sync_report import Coverage
from dcpbench.syncs.traces.blocking import API_NAMES, RUNTIMES, SYNC_EVENTS, get_wait_kind, parse_direction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from dcpbench.syncs.steps import Steps
    from dcpbench.syncs.traces.columns import Columns, Recorder
    from dcpbench.syncs.traces.python_lines import Stacks

MAX_CALLS = 3  # calls that are named where none is known
MIN_LINKED_SHARE = 0.75  # share of GPU events with a known call; up to 1/8 was queued before profiling (public traces)
MAX_NAMES = 3  # examples that a sentence names
_COPIES = tuple(
    f"Memcpy {to} ({a} -> {b})"
    for host in ("Pageable", "Pinned")
    for to, a, b in (("DtoH", "Device", host), ("HtoD", host, "Device"))
)


class _Advice(NamedTuple):
    """Hold how a recorder records what a trace lacks."""

    gpu: str
    syncs: str
    stacks: str
    ops: str
    steps: str


_ADVICE: dict[Recorder, _Advice] = {
    "torch.profiler": _Advice(
        gpu="Profile with ProfilerActivity.CUDA.",
        syncs="No cuda_sync events: waits through the driver API and inside libraries are not seen. Record them with "
        "experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True).",
        stacks="Record them with with_stack=True.",
        ops="No operators (cpu_op): kinds of synchronisation are known by their runtime call alone.",
        steps=HOW_TO_MARK,
    ),
    "nsys": _Advice(
        gpu="Profile with nsys profile --trace=cuda,nvtx, and export all tables.",
        syncs="No synchronisation activities: waits inside libraries are not seen unless their calls are recorded.",
        stacks="Record them with nsys profile --python-backtrace=cuda or --python-sampling=true.",
        ops="No operators: kinds of synchronisation are known by their call alone. Record them with nsys profile "
        "--pytorch=autograd-nvtx, or in the program with torch.autograd.profiler.emit_nvtx().",
        steps="Wrap each step in torch.cuda.nvtx.range(f\"step {n}\") and give --step-range '^step '.",
    ),
}
_STEP = re.compile(r"(.*\D)\d+", re.DOTALL)


def compute_coverage(columns: Columns, steps: Steps, stacks: Stacks) -> Coverage:
    """Return what is in a trace and what therefore cannot be seen."""
    tables, problems = columns.tables, columns.problems
    calls = len(tables["calls"])
    lost, foreign = list_damage(columns), _find_foreign(columns)
    return Coverage(
        detector="scan",
        gpu_events=len(tables["gpu"]),
        runtime_events=calls - columns.driver_calls,
        driver_events=columns.driver_calls,
        sync_events=len(tables["syncs"]),
        ops=len(tables["ops"]),
        stacks=stacks,
        steps_from=steps.marked_by,
        steps_by_phase=steps.count_phases(),
        steps_share=steps.share,
        steps_guessed=steps.is_guessed,
        unreadable_events=problems.unreadable_events,
        complete=not lost,
        damage=lost,
        foreign=foreign,
        notes=[
            *(f"The file {clause}." for clause in lost),
            *columns.warnings,
            *_list_repairs(columns),
            *_list_missing(columns, steps, stacks),
        ],
    )


def _find_foreign(columns: Columns) -> list[str]:
    """Return event categories or calls of an unknown accelerator; nothing if a known runtime did the work."""
    calls = [columns.names[n] for n in np.unique(columns.tables["calls"].name).tolist()]
    known = any(name.startswith(RUNTIMES) for name in calls)
    if known and len(columns.tables["gpu"]):
        return []
    return [*sorted(columns.foreign), *([] if known else calls[:MAX_CALLS])]


def _list_repairs(columns: Columns) -> list[str]:
    """Return notes on what was repaired or left out without loss."""
    notes = []
    if columns.problems.not_numbers:
        notes.append("The file holds NaN or infinity, which JSON does not have; they were read as no number.")
    if columns.repeated:
        notes.append(
            f"Of {format_count(columns.repeated, 'event')} that stand in the file once more, one each was counted."
        )
    return notes


def _list_missing(columns: Columns, steps: Steps, stacks: Stacks) -> list[str]:
    tables, advice = columns.tables, _ADVICE[columns.recorder]
    notes = []
    if columns.foreign:
        notes.append(
            f"Work of another accelerator ({', '.join(sorted(columns.foreign))}): its waits are not known to scan."
        )
    elif not len(tables["gpu"]):
        notes.append(f"No GPU events: without them there is no answer. {advice.gpu}")
    if not len(tables["calls"]) and not columns.foreign:
        notes.append(f"No calls of the CUDA or HIP runtime: without them there is no answer. {advice.gpu}")
    if not len(tables["syncs"]):
        notes.append(advice.syncs)
    if stacks == "none":
        notes.append(f"No Python stacks: sites are named by operator. {advice.stacks}")
    if stacks == "python_function":
        notes.append("Line numbers are those where a function begins; the trace does not hold the line of a call.")
    if not len(tables["ops"]):
        notes.append(advice.ops)
    if not len(steps):
        names = ", ".join(f"'{name}N'" for name in steps.rejected[:MAX_NAMES])
        rejected = f"Numbered ranges ({names}) cover less than half of the work and are not taken for steps. "
        notes.append(
            "No steps are marked: counts per step and warm-up are unknown. Name the range around a step with "
            f"--step-range. {rejected if names else ''}{advice.steps} {format_ranges(columns.list_ranges())}"
        )
    if len(columns.devices) > 1:
        notes.append("Several GPUs have work in this trace: a bubble is time in which none of them had.")
    return notes


def list_damage(columns: Columns) -> list[str]:
    """Return why a trace is not complete: clauses that follow its name, each with what to type."""
    problems = columns.problems
    lost = []
    if problems.truncated:
        lost.append("ends early, so that syncs may be missing: record it again, with fewer steps")
    if problems.unreadable_events:
        events = format_count(problems.unreadable_events, "event")
        lost.append(f"holds {events} that could not be read, so that syncs may be missing: record it again")
    if problems.untimed_events:
        events = format_count(problems.untimed_events, "event")
        lost.append(
            f"holds {events} of calls or GPU work without a duration that can be, so that bubbles are not known: "
            "record it again"
        )
    if problems.repaired:
        lost.append(
            f"holds text that is not JSON and was repaired ({_format_names(problems.repaired)}), so that calls may not be "
            "known by their names: record it again"
        )
    if problems.behind:
        lost.append(f"goes on with {problems.behind}, which was not read: scan each trace from a separate file")
    read = [columns.tables[kind].name for kind in ("calls", "gpu", "syncs", "ranges")]
    wrong = sorted(filter(_is_damaged, (columns.names[n] for n in np.unique(np.concatenate(read)).tolist())))
    if wrong:
        lost.append(
            f"holds names that are one bit away from names that would be read ({_format_names(wrong)}): it was damaged, so "
            "record or copy it again"
        )
    return [*lost, *dict.fromkeys(problems.lost), *_explain_unlinked(columns)]


def _format_names(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, MAX_NAMES + 1))
    return ", ".join(f"'{name}'" for name in first[:MAX_NAMES]) + (", …" if len(first) > MAX_NAMES else "")


@functools.lru_cache(maxsize=1 << 12)
def _is_damaged(name: str) -> bool:
    """Return whether a name is one bit away from a name that would be read."""
    if get_wait_kind(name) or name in SYNC_EVENTS:
        return False
    step = _STEP.fullmatch(name)
    return (
        is_one_bit_off(name, API_NAMES)
        or is_one_bit_off(name, SYNC_EVENTS)
        or (name not in _COPIES and is_one_bit_off(name, _COPIES))
        or (step is not None and is_one_bit_off(step[1], (STEP,)))
    )


def is_one_bit_off(word: str, known: Iterable[str]) -> bool:
    """Return whether a word differs from one of the known words in exactly one bit."""
    bits = word.encode("utf-8", "surrogatepass")
    number = int.from_bytes(bits)
    return any((number ^ other).bit_count() == 1 for other in _group_by_length(frozenset(known)).get(len(bits), ()))


@functools.lru_cache(maxsize=16)
def _group_by_length(words: frozenset[str]) -> dict[int, list[int]]:
    """Return the bits of words by their number of bytes."""
    groups: dict[int, list[int]] = {}
    for word in words:
        bits = word.encode()
        groups.setdefault(len(bits), []).append(int.from_bytes(bits))
    return groups


def has_known_bubbles(columns: Columns) -> bool:
    """Return whether GPU work has durations and known calls, without which idle time has no meaning."""
    linked = _find_linked(columns)
    return not columns.problems.untimed_events and bool(linked.sum() >= max(MIN_LINKED_SHARE * len(linked), 1))


def _find_linked(columns: Columns) -> NDArray[np.bool_]:
    """Mark GPU work with a known call.

    Ids that several calls share, one after the other, link nothing: runtime calls share theirs only with calls within.
    A launch of one kernel copies nothing.
    """
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    if not len(gpu) or not len(calls):
        return np.zeros(len(gpu), bool)
    order = np.argsort(calls.correlation, kind="stable")
    ids = calls.correlation[order]
    at = np.minimum(np.searchsorted(ids, gpu.correlation), len(ids) - 1)
    linked: NDArray[np.bool_] = (ids[at] == gpu.correlation) & (gpu.correlation != -1)
    shared = _find_shared_ids(calls.start[order], calls.end[order], ids)
    if len(shared):
        linked &= ~np.isin(gpu.correlation, shared)
    launches, copies = columns.match_names(lambda name: "LaunchKernel" in name), columns.match_names(parse_direction)
    linked &= ~(launches[calls.name[order[at]]] & copies[gpu.name])
    return linked


def _explain_unlinked(columns: Columns) -> list[str]:
    """Return clauses about GPU work without a known call."""
    gpu = columns.tables["gpu"]
    if not len(gpu) or not len(columns.tables["calls"]):
        return []
    linked, clauses = _find_linked(columns), []
    alone = int((~linked).sum())
    if alone > (1 - MIN_LINKED_SHARE) * len(gpu):
        clauses.append(
            f"does not tell of {alone:,} of its {len(gpu):,} GPU events which call caused them, so that bubbles "
            "and copies that wait are not known: record it again, and one process in each trace"
        )
    waiting = columns.match_names(lambda name: "pageable" in parse_direction(name))
    copies = int((waiting[gpu.name] & ~linked).sum())
    if copies and not clauses:
        clauses.append(
            f"does not tell which calls made {copies:,} of its copies from or to pageable memory, and they may have "
            "waited: record it again"
        )
    return clauses


def _find_shared_ids(start: NDArray[Any], end: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """Return ids of several calls that do not contain each other; `ids` are in order."""
    again = np.flatnonzero((ids[1:] == ids[:-1]) & (ids[1:] != -1))
    apart = (start[again + 1] >= end[again]) | (start[again] >= end[again + 1])
    return np.unique(ids[again[apart]])
