"""Where a step's time goes, and whether the host waits in it: a separate profiled pass, never mixed with timing.

A replayed graph has no ranges: `record_function` ran when it was captured. So the step is profiled twice: eagerly,
where each kernel's launch lies in a range, and replayed, where each kernel has its true time. Both launch the same
kernels in the same order, so the i-th kernel of a replay belongs to the range of the i-th eager one.
"""

from __future__ import annotations

import difflib
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.ranges import PHASES
from dcpbench.records import Phases

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_RANGE = "dcpbench_step"
OTHER = "other"
"""Kernels that no range claims, as index building before the first layer."""
HOST_BLOCKING = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
)  # fmt: skip
"""Runtime and driver calls that wait for the GPU."""
ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cuMemCreate", "cuMemMap", "cuMemUnmap")
"""Calls that wait, too, and that the caching allocator makes while it grows. In an eager step they say nothing of the
graph, which has its memory; in a replayed one they count."""


class Event(msgspec.Struct):
    """The fields of a Kineto trace event that are used here."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: dict[str, msgspec.Raw] = {}

    def correlation(self) -> int:
        """Number shared by a launch and what it launched."""
        return msgspec.json.decode(self.args.get("correlation", b"-1"))


class Trace(msgspec.Struct):
    """A Kineto Chrome trace."""

    traceEvents: list[Event]  # noqa: N815 - the file's name


class Kernels:
    """GPU work of profiled steps, and the host calls that launched it."""

    def __init__(self, trace: Trace) -> None:
        by_category: dict[str, list[Event]] = {}
        for event in trace.traceEvents:
            if event.ph == "X":
                by_category.setdefault(event.cat, []).append(event)
        self.calls = by_category.get("cuda_runtime", []) + by_category.get("cuda_driver", [])
        gpu = [e for cat in ("kernel", "gpu_memcpy", "gpu_memset") for e in by_category.get(cat, [])]
        ranges = by_category.get("user_annotation", [])
        self.step_ranges = sorted((e for e in ranges if e.name == STEP_RANGE), key=lambda e: e.ts)
        self.phase_ranges = [e for e in ranges if e.name in PHASES]
        self.launch = {e.correlation(): e for e in self.calls}
        self.steps = [self._step(gpu, step) for step in self.step_ranges]

    def _step(self, gpu: list[Event], step: Event) -> list[Event]:
        """GPU events launched inside one step range, in the order in which they ran."""
        mine = [e for e in gpu if (call := self.launch.get(e.correlation())) is not None and _inside(call, step)]
        return sorted(mine, key=lambda e: e.ts)

    def blocking_calls(self, step: int, names: tuple[str, ...] = HOST_BLOCKING) -> list[str]:
        """Names of host-blocking calls inside one step; pageable copies wait, too."""
        inside = [c.name for c in self.calls if c.name in names and _inside(c, self.step_ranges[step])]
        return inside + [e.name for e in self.steps[step] if "Pageable" in e.name]

    def phase_of(self, event: Event) -> str:
        """Range that the event's launch lies in."""
        call = self.launch[event.correlation()]
        return next((r.name for r in self.phase_ranges if _inside(call, r)), OTHER)


def _inside(inner: Event, outer: Event) -> bool:
    return inner.tid == outer.tid and outer.ts <= inner.ts <= outer.ts + outer.dur


def record(step: Callable[[], None], steps: int, *, enabled: bool) -> Kernels | None:
    """Profile `steps` steps on this rank; ranks that are not `enabled` only run them."""
    if not enabled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function(STEP_RANGE):
                step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Kernels(msgspec.json.decode(path.read_bytes(), type=Trace))


def profile_step(
    eager: Callable[[], None], replay: Callable[[], None], steps: int = 3, *, enabled: bool
) -> tuple[Phases, list[str]] | None:
    """(phases, names of host-blocking calls in a step) of this rank, or None where it is not `enabled`.

    The first profiled step of each pass is left out, as the profiler's own start-up falls into it, and so is the last
    replay, which no other follows: a step lasts until the next one's first kernel.
    """
    launched = record(eager, 2, enabled=enabled)
    replayed = record(replay, steps + 2, enabled=enabled)
    if launched is None or replayed is None:
        return None
    pattern = [(e.name, launched.phase_of(e)) for e in launched.steps[-1]]
    sums: dict[str, float] = {}
    for kernels, following in itertools.pairwise(replayed.steps[1:]):
        for name, us in _attribute(kernels, _label(kernels, pattern), following[0].ts).items():
            sums[name] = sums.get(name, 0.0) + us / steps
    idle = sums.pop("idle")
    step_us = idle + sum(sums.values())
    order = {name: i for i, name in enumerate((*PHASES, OTHER))}
    phases = Phases(
        step_us=step_us,
        phase_us=dict(sorted(sums.items(), key=lambda item: order[item[0]])),
        idle_us=idle,
        idle_fraction=idle / step_us if step_us else 0.0,
        kernels=len(replayed.steps[-1]),
        steps=steps,
    )
    return phases, launched.blocking_calls(-1) + replayed.blocking_calls(1, HOST_BLOCKING + ALLOCATING)


def _label(kernels: list[Event], pattern: list[tuple[str, str]]) -> list[str]:
    """Phase of each kernel by its place in the eager pass; what does not line up is `other`."""
    names = [e.name for e in kernels]
    expected = [name for name, _ in pattern]
    if names == expected:
        return [phase for _, phase in pattern]
    labels = [OTHER] * len(names)
    for block in difflib.SequenceMatcher(None, expected, names, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            labels[block.b + i] = pattern[block.a + i][1]
    return labels


def _attribute(kernels: list[Event], labels: list[str], end_of_step: float) -> dict[str, float]:
    """Every microsecond until `end_of_step` to one phase or to `idle`; where kernels overlap, to the earlier one."""
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
    """The same table for a functional run: host time by range. It exercises the report and says nothing of speed."""
    if not enabled:
        for _ in range(steps):
            step()
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function(STEP_RANGE):
                step()
    totals = {e.key: e.cpu_time_total / steps for e in profiler.key_averages()}
    phase_us = {name: totals[name] for name in PHASES if name in totals}
    rest = totals[STEP_RANGE] - sum(phase_us.values())
    return Phases(
        step_us=totals[STEP_RANGE], phase_us=phase_us, idle_us=rest, idle_fraction=rest / totals[STEP_RANGE],
        kernels=0, steps=steps,
    )  # fmt: skip
