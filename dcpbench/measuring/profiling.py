"""Attribute the time of a step to phases, and detect host waits in it: a separate profiled pass, never mixed with
timing.

A replayed graph has no ranges: `record_function` ran when it was captured. So the step is profiled twice: eagerly,
where each kernel's launch lies in a range, and replayed, where each kernel has its true time. Both launch the same
kernels in the same order, so the i-th kernel of a replay belongs to the range of the i-th eager one.
"""

from __future__ import annotations

import difflib
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig

from dcpbench.measuring.ranges import PHASES
from dcpbench.records.record import Phases
from dcpbench.syncs.recorded import build_sync_sites
from dcpbench.syncs.scan import scan_columns
from dcpbench.syncs.traces.columns import read_columns
from dcpbench.syncs.traces.intervals import match_keys
from dcpbench.syncs.traces.python_lines import Repository
from dcpbench.syncs.traces.reading import TraceReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.records.record import SyncSite
    from dcpbench.syncs.sync_report import Site
    from dcpbench.syncs.traces.columns import Columns

STEP_RANGE = "dcpbench_step"
OTHER = "other"  # kernels that no range claims, as index building before the first layer
EAGER_STEPS = 3  # number of eager steps; the scanner treats the first as warm-up


class Kernel(NamedTuple):
    """GPU work of a step, and the moment and thread of its launch. Microseconds."""

    name: str
    ts: float
    dur: float
    launched: float
    thread: int


class HostRange(NamedTuple):
    """A range of the host."""

    name: str
    start: float
    end: float
    thread: int

    def has_launched(self, kernel: Kernel) -> bool:
        """Return True if a kernel was launched inside the range."""
        return self.thread == kernel.thread and self.start <= kernel.launched <= self.end


class Kernels:
    """GPU work of profiled steps, in the order in which it ran, and the ranges that it was launched in."""

    def __init__(self, columns: Columns) -> None:
        gpu, calls, ranges = (columns.tables[name] for name in ("gpu", "calls", "ranges"))
        launch = match_keys(calls.correlation, gpu.correlation)
        work = sorted(
            (
                Kernel(columns.names[name], start, end - start, float(calls.start[row]), int(calls.thread[row]))
                for name, start, end, row in zip(gpu.name, gpu.start.tolist(), gpu.end.tolist(), launch, strict=True)
                if row >= 0
            ),
            key=lambda k: k.ts,
        )
        names = [columns.names[name] for name in ranges.name]
        is_phase = np.isin(names, PHASES)
        self.phases, self.names = ranges.take(is_phase), list(itertools.compress(names, is_phase))
        around = [
            HostRange(*r)
            for r in zip(names, ranges.start, ranges.end, ranges.thread, strict=True)
            if r[0] == STEP_RANGE
        ]
        steps = sorted(around, key=lambda r: r.start)
        self.steps = [[k for k in work if step.has_launched(k)] for step in steps]

    def find_phase(self, kernel: Kernel) -> str:
        """Return the range that contains the kernel's launch."""
        ranges, at = self.phases, kernel.launched
        (around,) = np.nonzero((ranges.start <= at) & (ranges.end >= at) & (ranges.thread == kernel.thread))
        return self.names[around[0]] if len(around) else OTHER


class Pass(NamedTuple):
    """A profiled pass: its kernels, and the source lines where the host waited."""

    kernels: Kernels
    sites: list[Site]


def record_steps(step: Callable[[], object], steps: int, *, enabled: bool, stacks: bool) -> Pass | None:
    """Profile `steps` steps on this rank; ranks that are not `enabled` only run them.

    Args:
        step: One step.
        steps: How often it runs.
        enabled: Whether this rank records.
        stacks: Python stacks, which name the line of a synchronisation and slow the host down.
    """
    if not enabled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(
        activities=activities, with_stack=stacks, experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True)
    ) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function(STEP_RANGE):
                step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_pass(path)


def read_pass(path: Path) -> Pass:
    """Return a profiled pass from its trace."""
    reader = TraceReader(path)
    columns = read_columns(reader.read_blocks(), reader.problems)
    _, sites = scan_columns(columns, path.name, Repository(Path.cwd()), step_range=f"^{STEP_RANGE}$")
    return Pass(Kernels(columns), sites)


def profile_step(
    eager: Callable[[], None],
    replay: Callable[[], None],
    steps: int = 3,
    *,
    enabled: bool,
    agree: Callable[[bool], bool],
) -> tuple[Phases, list[SyncSite]] | None:
    """Return (phases, source lines where the host waited in a step) of this rank, or None if it is not `enabled`.

    Stacks, which take longer to record than all other data, are recorded only if the host waited: they give the source
    line, and identify the profiler's own waits. `agree` returns True on every rank if any rank passes True.

    The first profiled step of each pass is left out, because it contains the profiler's own start-up, and so is the
    last replay for the phases, because no other follows it: a step lasts until the next one's first kernel.
    """
    launched = record_steps(eager, EAGER_STEPS, enabled=enabled, stacks=False)
    replayed = record_steps(replay, steps + 2, enabled=enabled, stacks=False)
    waits = launched is not None and bool(build_sync_sites(launched.sites, "eager"))
    named = record_steps(eager, EAGER_STEPS, enabled=enabled, stacks=True) if agree(waits) else launched
    if launched is None or replayed is None or named is None:
        return None
    pattern = [(k.name, launched.kernels.find_phase(k)) for k in launched.kernels.steps[-1]]
    sums: dict[str, float] = {}
    for kernels, following in itertools.pairwise(replayed.kernels.steps[1:]):
        for name, us in _split_time(kernels, _match_phases(kernels, pattern), following[0].ts).items():
            sums[name] = sums.get(name, 0.0) + us / steps
    idle = sums.pop("idle")
    step_us = idle + sum(sums.values())
    order = {name: i for i, name in enumerate((*PHASES, OTHER))}
    phases = Phases(
        step_us=step_us,
        phase_us=dict(sorted(sums.items(), key=lambda item: order[item[0]])),
        idle_us=idle,
        idle_fraction=idle / step_us if step_us else 0.0,
        kernels=len(replayed.kernels.steps[-1]),
        steps=steps,
    )
    return phases, build_sync_sites(named.sites, "eager") + build_sync_sites(replayed.sites, "replay")


def _match_phases(kernels: list[Kernel], pattern: list[tuple[str, str]]) -> list[str]:
    """Return the phase of each kernel by its place in the eager pass; `other` for kernels without a match."""
    names = [e.name for e in kernels]
    expected = [name for name, _ in pattern]
    if names == expected:
        return [phase for _, phase in pattern]
    labels = [OTHER] * len(names)
    for block in difflib.SequenceMatcher(None, expected, names, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            labels[block.b + i] = pattern[block.a + i][1]
    return labels


def _split_time(kernels: list[Kernel], labels: list[str], end_of_step: float) -> dict[str, float]:
    """Assign every microsecond until `end_of_step` to one phase or to `idle`; for overlapping kernels, to the earlier
    one.
    """
    sums = {"idle": 0.0}
    reached = kernels[0].ts if kernels else 0.0
    for event, label in zip(kernels, labels, strict=True):
        sums["idle"] += max(0.0, event.ts - reached)
        end = event.ts + event.dur
        sums[label] = sums.get(label, 0.0) + max(0.0, end - max(reached, event.ts))
        reached = max(reached, end)
    sums["idle"] += max(0.0, end_of_step - reached)
    return sums


def profile_cpu_step(step: Callable[[], None], steps: int = 3, *, enabled: bool) -> Phases | None:
    """Return the phases of a functional run: host time by range. It exercises the report and does not measure
    performance.
    """
    if not enabled:
        for _ in range(steps):
            step()
        return None
    with torch.autograd.profiler.profile() as profiler:  # torch.profiler's would import all of Inductor first
        for _ in range(steps):
            with torch.profiler.record_function(STEP_RANGE):
                step()
    totals = {e.key: e.cpu_time_total / steps for e in profiler.key_averages()}
    phase_us = {name: totals[name] for name in PHASES if name in totals}
    rest = totals[STEP_RANGE] - sum(phase_us.values())
    return Phases(
        step_us=totals[STEP_RANGE],
        phase_us=phase_us,
        idle_us=rest,
        idle_fraction=rest / totals[STEP_RANGE],
        kernels=0,
        steps=steps,
    )
