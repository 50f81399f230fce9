"""Simulate a host and the streams of a GPU in virtual microseconds: a program runs unchanged, or without some of its
waits.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np

from dcpbench.syncs.traces.intervals import merge_intervals
from tests.unit.trace_builder import PINNED, Trace

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

LAUNCH, LATENCY, RETURN = 2, 3, 2
"""Times of the simulation: the host needs LAUNCH for a launch, work begins no earlier than LATENCY after it, and the host continues
RETURN after the end of a wait."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Describe one action of the host.

    work: other work of duration `length`. launch: a kernel of this length on a stream, after all work of the stream
    `behind` if it is given. item: a copy on a stream, and a wait for it. stream, device: a wait for a stream, or for all
    streams. event: a wait for work after which `length` further kernels were launched.
    """

    do: Literal["work", "launch", "item", "stream", "device", "event"]
    length: int = 0
    stream: int = 0
    behind: int | None = None


@dataclasses.dataclass
class Run:
    """Hold the events of a program; times are (start, end)."""

    waits: dict[int, tuple[int, int]]  # start and end of each waiting call, by step
    dry: dict[int, bool]  # by step: True if the GPU had no work at the begin of the call
    launches: list[tuple[int, int]]
    work: list[tuple[int, int]]  # work of each launch, in the same order

    @property
    def idle(self) -> float:
        """Return the time between the first and the last work in which no stream was busy."""
        if not self.work:
            return 0.0
        start, end = merge_intervals(*np.array(self.work, float).T)
        return float(end[-1] - start[0] - (end - start).sum())

    @property
    def length(self) -> int:
        """Return the time from the first work to the end of the last."""
        return max(end for _, end in self.work) - min(start for start, _ in self.work) if self.work else 0


def run_program(program: Sequence[Step], *, without: Collection[int] = ()) -> Run:
    """Run the program; the host does not wait in the steps `without`."""
    now = 0
    done = Run({}, {}, [], [])
    streams: dict[int, int] = {}
    for number, step in enumerate(program):
        if step.do == "work":
            now += step.length
            continue
        if step.do in ("launch", "item"):
            ready = max(now + LAUNCH + LATENCY, streams.get(step.stream, 0), streams.get(step.behind or -1, 0))
            done.launches.append((now, now + LAUNCH))
            now += LAUNCH
            streams[step.stream] = ready + max(1, step.length)
            done.work.append((ready, streams[step.stream]))
        if step.do != "launch" and number not in without:
            until = max([now, *_list_ends(step, streams, done)]) + RETURN
            done.waits[number] = (now, until)
            done.dry[number] = all(end <= now for _, end in done.work)
            now = until
    return done


def _list_ends(step: Step, streams: dict[int, int], done: Run) -> list[int]:
    """Return the end times of the work that a step waits for."""
    if step.do == "device":
        return list(streams.values())
    if step.do == "event":
        return [end for _, end in done.work[: len(done.work) - step.length][-1:]]
    return [streams.get(step.stream, 0)]


CALLS = {
    "item": "cudaStreamSynchronize",
    "stream": "cudaStreamSynchronize",
    "device": "cudaDeviceSynchronize",
    "event": "cudaEventSynchronize",
}


def make_trace(program: Sequence[Step], done: Run) -> Trace:
    """Return the trace that a profiler would write; waits are in the order of `done.waits`."""
    trace = Trace()
    pieces = iter(zip(done.launches, done.work, strict=True))
    for number, step in enumerate(program):
        if step.do in ("launch", "item"):
            (begin, end), work = next(pieces)
            copied = step.do == "item"
            if copied:
                trace.op("aten::item", begin, done.waits[number][1] + 1)
            correlation = trace.call("cudaMemcpyAsync" if copied else "cudaLaunchKernel", begin, end)
            name, category = (PINNED, "gpu_memcpy") if copied else ("gemm", "kernel")
            trace.gpu(name, *work, correlation, stream=step.stream, cat=category)
        if number in done.waits:
            trace.call(CALLS[step.do], *done.waits[number])
    return trace
