"""Print the GPU time of an engine's steps, for `dcpbench syncs kernels`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from dcpbench.errors import TraceError
from dcpbench.records.record import MAX_DISTURBANCE
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import ProgressLine, make_console, print_stderr
from dcpbench.show.text import format_count, make_printable
from dcpbench.syncs.files import select_traces
from dcpbench.syncs.kernel_time import StepTime, measure_steps
from dcpbench.syncs.steps import check_step_range
from dcpbench.syncs.trace_ranks import is_front_end

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_SHOWN_US = 0.05  # shorter times are shown as 0.0


def run_kernels(names: Sequence[str], step_range: str | None, top: int, *, as_json: bool) -> int:
    """Print the steps of all traces. Traces of vLLM's front end are left out, as they have no GPU work.

    Raises TraceError if a trace of a rank cannot be used.
    """
    check_step_range(step_range)
    paths = select_traces(names)
    ranks = [path for path in paths if not is_front_end(path.name)]
    for path in paths:
        if path not in ranks:
            print_stderr(f"note: {make_printable(str(path))} is left out: it is the trace of vLLM's front end.")
    if not ranks:
        raise TraceError("there is no trace of a rank; give the traces of the server's workers.")
    with ProgressLine() as line:
        found = [step for path in ranks for step in measure_steps(path, step_range=step_range, progress=line)]
    for clause in dict.fromkeys(f"{step.path} {clause}" for step in found for clause in step.damage):
        print_stderr(f"warning: {make_printable(clause)}.")
    if as_json:
        rows = [msgspec.to_builtins(step) | {"part_us": step.part_us} for step in found]
        write_json(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return 0
    console = make_console()
    for step in found:
        sys.stdout.write(f"{format_heading(step)}\n{format_typical_step(step)}\n")
        console.print(_make_part_table(step))
        if top:
            console.print(_make_kernel_table(step, top))
    return 0


def format_heading(step: StepTime) -> str:
    """Return what a table shows: the file, the kind and number of steps, and the time of a step."""
    kind = f"{step.kind} step" if step.kind else "step"
    return (
        f"{make_printable(step.path)}: {kind}, mean of {format_count(step.steps, 'step')}: {step.step_us:,.1f} µs, of which "
        f"no kernel runs for {step.idle_us:,.1f} µs"
    )


def format_typical_step(step: StepTime) -> str:
    """Return the median step, and how many steps the profiler disturbed."""
    typical = step.typical
    waits = f", and the GPU waits for the host's launches for a further {typical.host_wait_us:,.1f} µs"
    return (
        f"Median step without waits for the host: {typical.step_us:,.1f} µs, of which no kernel runs for {typical.idle_us:,.1f} µs"
        f"{waits if typical.host_wait_us >= MIN_SHOWN_US else ''}. {typical.count_disturbed(typical.step_us):,} of "
        f"{format_count(step.steps, 'step')} last more than {MAX_DISTURBANCE * 100:g} % longer than that."
    )


def _make_part_table(step: StepTime) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("part", "µs", "share of step"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    rows = step.part_us | {"no kernel": step.idle_us}
    if step.overlap_us >= MIN_SHOWN_US:
        rows["overlap of streams, subtracted"] = -step.overlap_us
    for part, us in rows.items():
        table.add_row(part, f"{us:,.1f}", f"{us / step.step_us:.1%}" if step.step_us else "")
    return table


def _make_kernel_table(step: StepTime, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("kernel", "part", "per step", "µs"):
        table.add_column(heading, justify="right" if heading in ("per step", "µs") else "left", overflow="fold")
    for kernel in step.kernels[:top]:
        table.add_row(make_printable(kernel.name), kernel.part, f"{kernel.per_step:,.1f}", f"{kernel.us:,.1f}")
    return table
