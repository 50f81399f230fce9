"""What a trace cannot show, in sentences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.show.text import counted
from dcpbench.syncs.model import Coverage
from dcpbench.syncs.traces.blocking import RUNTIMES
from dcpbench.syncs.traces.damage import damages

if TYPE_CHECKING:
    from dcpbench.syncs.steps import Steps
    from dcpbench.syncs.traces.attribution import Stacks
    from dcpbench.syncs.traces.columns import Columns

CALLS = 3
"""Calls that are named where none is known."""
RANGES = 5
"""Ranges that are listed where none marks a step."""


def coverage(columns: Columns, steps: Steps, stacks: Stacks) -> Coverage:
    """What is in a trace, and what therefore cannot be seen."""
    tables, trouble = columns.tables, columns.trouble
    calls = len(tables["calls"])
    lost, foreign = damages(columns), _foreign(columns)
    return Coverage(
        detector="scan",
        gpu_events=len(tables["gpu"]),
        runtime_events=calls - columns.driver_calls,
        driver_events=columns.driver_calls,
        sync_events=len(tables["syncs"]),
        ops=len(tables["ops"]),
        stacks=stacks,
        steps_from=steps.marked_by,
        unreadable_events=trouble.unreadable_events,
        complete=not lost,
        damage=lost,
        foreign=foreign,
        notes=[*(f"The file {clause}." for clause in lost), *_read(columns), *_missing(columns, steps, stacks)],
    )


def _foreign(columns: Columns) -> list[str]:
    """What another accelerator left where no runtime that is known had work: categories of events, or calls."""
    calls = [columns.names[n] for n in np.unique(columns.tables["calls"].name).tolist()]
    known = any(name.startswith(RUNTIMES) for name in calls)
    if known and len(columns.tables["gpu"]):
        return []
    return [*columns.foreign, *([] if known else calls[:CALLS])]


def _read(columns: Columns) -> list[str]:
    """What was read otherwise than it stands there, without loss."""
    notes = []
    if columns.trouble.not_numbers:
        notes.append("The file holds NaN or infinity, which JSON does not have; they were read as no number.")
    if columns.repeated:
        notes.append(f"Of {counted(columns.repeated, 'event')} that stand in the file once more, one each was counted.")
    return notes


def _missing(columns: Columns, steps: Steps, stacks: Stacks) -> list[str]:
    tables = columns.tables
    notes = []
    if columns.foreign:
        notes.append(f"Work of another accelerator ({', '.join(columns.foreign)}): its waits are not known to scan.")
    elif not len(tables["gpu"]):
        notes.append("No GPU events: without them nothing can be said. Profile with ProfilerActivity.CUDA.")
    if not len(tables["calls"]) and not columns.foreign:
        notes.append(
            "No calls of the CUDA or HIP runtime: without them nothing can be said. Profile with ProfilerActivity.CUDA."
        )
    if not len(tables["syncs"]):
        notes.append(
            "No cuda_sync events: waits through the driver API and inside libraries are not seen. Record them with "
            "experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)."
        )
    if stacks == "none":
        notes.append("No Python stacks: sites are named by operator. Record them with with_stack=True.")
    if stacks == "python_function":
        notes.append("Line numbers are those where a function begins; the trace does not hold the line of a call.")
    if not len(tables["ops"]):
        notes.append("No operators (cpu_op): kinds of synchronisation are known by their runtime call alone.")
    if not len(steps):
        notes.append(
            "No steps are marked: counts per step and warm-up are unknown. Call profiler.step() after each, or name "
            f"the range with --step-range. {_ranges(columns)}"
        )
    if columns.devices > 1:
        notes.append("Several GPUs have work in this trace: a bubble is time in which none of them had.")
    return notes


def _ranges(columns: Columns) -> str:
    """The annotations that could be steps, the most frequent first."""
    found = Counter(columns.names[n] for n in columns.tables["ranges"].name.tolist())
    if not found:
        return "There are no ranges in this trace."
    listed = [f"{name!r} ({times})" for name, times in found.most_common(RANGES)]
    return f"Ranges in this trace: {', '.join(listed)}{', …' if len(found) > RANGES else ''}."
