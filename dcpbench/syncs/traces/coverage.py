"""What a trace cannot show, in sentences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dcpbench.syncs.model import Coverage

if TYPE_CHECKING:
    from dcpbench.syncs.steps import Steps
    from dcpbench.syncs.traces.attribution import Stacks
    from dcpbench.syncs.traces.columns import Columns

RANGES = 5
"""Ranges that are listed where none marks a step."""


def coverage(columns: Columns, steps: Steps, stacks: Stacks) -> Coverage:
    """What is in a trace, and what therefore cannot be seen."""
    tables, trouble = columns.tables, columns.trouble
    calls = len(tables["calls"])
    return Coverage(
        detector="scan", gpu_events=len(tables["gpu"]), runtime_events=calls - columns.driver_calls,
        driver_events=columns.driver_calls, sync_events=len(tables["syncs"]), ops=len(tables["ops"]), stacks=stacks,
        steps_from=steps.marked_by, unreadable_events=trouble.unreadable_events,
        complete=not (trouble.truncated or trouble.unreadable_events),
        notes=[*_damage(columns), *_missing(columns, steps, stacks)],
    )  # fmt: skip


def _damage(columns: Columns) -> list[str]:
    trouble = columns.trouble
    notes = []
    if trouble.truncated:
        notes.append("The file ends early: what came after is missing.")
    if trouble.unreadable_events:
        notes.append(f"{trouble.unreadable_events:,} events could not be read, and were left out.")
    if trouble.repaired:
        notes.append("Parts of the file are not JSON (bad UTF-8, NaN, lone backslashes) and were repaired.")
    return notes


def _missing(columns: Columns, steps: Steps, stacks: Stacks) -> list[str]:
    tables = columns.tables
    notes = []
    if not len(tables["gpu"]):
        notes.append("No GPU events: without them nothing can be said. Profile with ProfilerActivity.CUDA.")
    if not len(tables["calls"]):
        notes.append("No calls of the CUDA or HIP runtime: without them nothing can be said. Profile with "
                     "ProfilerActivity.CUDA.")  # fmt: skip
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
