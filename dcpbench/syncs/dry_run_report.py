"""Makes the report of a dry run: steps and ranges of each wait, sites, and what a dry run cannot know."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.syncs.model import Coverage, Report, TraceSummary, order, totals
from dcpbench.syncs.sites import sites_of
from dcpbench.syncs.steps import find_steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.syncs.sites import Sync
    from dcpbench.syncs.steps import Range, Steps

NOTES = (
    "A dry run has no GPU: kernels, waits and bubbles are unknown, and every time and cost is left out.",
    "Libraries and C++ or CUDA extensions that call CUDA by themselves are not seen; their operators run on the CPU.",
    "Device memory is not limited here, so waits of a caching allocator that runs out of it are not seen.",
    "Which operators wait was measured with torch 2.11 on an H200; other versions and GPUs may differ in detail.",
    "torch.compile is left out: compiled functions ran eagerly.",
    "Child processes are not seen, and of threads that ran before only operators on device tensors.",
)
ASSUMED = "Tensors made without a device were taken to be on the GPU; making them counts as no copy."


def report_of(
    syncs: Sequence[Sync],
    ranges: Sequence[Range],
    *,
    ops: int,
    program: str,
    assume_device: bool,
    step_range: str | None = None,
    root: Path | None = None,
) -> Report:
    """The report; its verdict is still open.

    Args:
        syncs: Waits, each with the ranges around it.
        ranges: All `record_function` ranges of the run.
        ops: Operators on device tensors.
        program: Name of what ran.
        assume_device: Whether tensors without a device counted as the GPU's.
        step_range: Regular expression of the names that mark steps; by default as for a trace.
        root: Repository to which files are made relative; by default the working directory.
    """
    steps = find_steps(ranges, step_range)
    placed = [_place(sync, steps) for sync in syncs]
    sites = sorted(sites_of(placed, steps=len(steps), trace=program, root=root), key=order)
    coverage = Coverage(
        detector="dry-run",
        ops=ops,
        stacks="frames",
        steps_from=steps.marked_by,
        notes=[*NOTES, ASSUMED] if assume_device else list(NOTES),
    )
    summary = TraceSummary(path=program, steps=len(steps) or None, coverage=coverage)
    return Report(traces=[summary], sites=sites, totals=totals(sites))


def _place(sync: Sync, steps: Steps) -> Sync:
    """Says which step and which other range a wait is in."""
    step = steps.of([sync.at])[0] if sync.at is not None and len(steps) else None
    inner = next((name for name in reversed(sync.ranges) if not _is_step(name, steps)), "")
    return dataclasses.replace(sync, step=step, range=inner)


def _is_step(name: str, steps: Steps) -> bool:
    return bool(steps.marked_by) and name.startswith(steps.marked_by) and name[len(steps.marked_by) :].isdigit()
