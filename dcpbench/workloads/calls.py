"""Measures calls that may wait for the GPU: eagerly, on the host behind queued work, and from a CUDA graph."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

import torch

from dcpbench.bench_records import Graph, Timing
from dcpbench.gpu_state import GpuSampler
from dcpbench.measure import Timer, time_chunks
from dcpbench.stats import StopRule, median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench import measure
    from dcpbench.bench_records import BenchSettings, Case
    from dcpbench.records import Gpu

    Run = Callable[[], None]

CHUNK_SECONDS = 0.04
"""Passes between two looks at the stop rule; short, as a bench has many cases."""
SPIN_CYCLES = 20_000_000
"""Some 10 ms of waiting on a GPU, to find out how long a cycle is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """A case, ready to run."""

    calls: Sequence[Run]
    """One for each layer or step; together they are a pass."""
    check: Callable[[Run], str]
    """Runs a pass and compares with the reference: empty, or what differs."""
    to_capture: Sequence[Run] | None = None
    """What a CUDA graph would hold in place of `calls`, where that is something else."""
    check_graph: Callable[[Run], str] | None = None
    """`check` for a pass of `to_capture`."""
    written_bytes: int = 0
    """Memory that a pass writes."""

    def run(self) -> None:
        """One pass, eagerly."""
        for call in self.calls:
            call()

    def run_captured(self) -> None:
        """One pass of what a graph would hold, eagerly."""
        for call in self.calls if self.to_capture is None else self.to_capture:
            call()


class Workload(Protocol):
    """What every bench has: tensors on a device, and a way to make a case of them."""

    def __init__(self, device: torch.device, seed: int) -> None: ...

    def build(self, case: Case) -> Calls:
        """A case, ready to run."""


class HostClock:
    """Host time inside calls, each behind work that keeps the GPU busy: launching is short, waiting is not.

    The one place that reads a host clock around asynchronous work: what the host does is what is measured here.
    """

    def __init__(self, calls: Sequence[Run], backlog_us: float) -> None:
        self.calls, self.cycles = calls, round(backlog_us * _cycles_per_us())

    def chunk(self, passes: int) -> tuple[list[float], float]:
        """(host time inside the calls of each pass in ms, elapsed seconds); see measure.time_chunks."""
        begin = time.perf_counter()
        return [self._pass() for _ in range(passes)], time.perf_counter() - begin

    def _pass(self) -> float:
        spent = 0.0
        for call in self.calls:
            torch.cuda._sleep(self.cycles)  # noqa: SLF001 - keeps the GPU busy and touches no memory
            begin = time.perf_counter()
            call()
            spent += time.perf_counter() - begin
        torch.cuda.synchronize()
        return spent * 1e3


def eager_time(calls: Calls, device: torch.device, settings: BenchSettings) -> tuple[Timing, Gpu | None]:
    """Time of a call, passes back to back, by CUDA events: the host's waiting and launching is in it."""
    with GpuSampler(device) as sampler:
        found = time_chunks(Timer(calls.run, device).chunk, _rule(settings), chunk_seconds=CHUNK_SECONDS)
    return _timing(found, calls), sampler.state()


def host_time(calls: Calls, settings: BenchSettings) -> Timing:
    """Host time inside a call while the GPU is `backlog_us` behind."""
    clock = HostClock(calls.calls, settings.backlog_us)
    return _timing(time_chunks(clock.chunk, _rule(settings), chunk_seconds=CHUNK_SECONDS), calls)


def graph_time(calls: Calls, device: torch.device, settings: BenchSettings) -> tuple[Graph, str]:
    """(a pass captured and replayed, how its result differs from the reference). For calls that do not wait."""
    graph = capture(calls.run_captured)
    difference = (calls.check_graph or calls.check)(graph.replay)
    found = time_chunks(Timer(graph.replay, device).chunk, _rule(settings), chunk_seconds=CHUNK_SECONDS)
    return Graph(captured=True, time=_timing(found, calls), correct=not difference), difference


def try_capture(calls: Calls) -> Graph:
    """Whether a pass can be captured at all. A refusal leaves torch's allocator in a capture: nothing may follow."""
    here = torch.cuda.current_stream()
    try:
        with torch.cuda.stream(here):  # a refused capture does not go back to the stream that it came from
            capture(calls.run_captured)
    except RuntimeError as e:
        return Graph(captured=False, reason=_first_cause(e))
    return Graph(captured=True)


def capture(run: Run) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `run`, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def waits(run: Run) -> bool:
    """Whether torch itself would wait for a stream in `run`.

    Asked before anything else is counted: the live detector's callbacks stay for good and would slow later timings.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    return False


def _timing(found: measure.Timing, calls: Calls) -> Timing:
    samples = [ms * 1e3 / len(calls.calls) for ms in found.samples_ms]
    interval = median_interval(samples)
    return Timing(
        median_us=interval.median, low_us=interval.low, high_us=interval.high, max_us=max(samples),
        samples=interval.samples, noisy=found.noisy, unsettled=found.unsettled, samples_us=samples,
    )  # fmt: skip


def _rule(settings: BenchSettings) -> StopRule:
    return StopRule(precision=settings.precision, seconds=settings.seconds)


def _cycles_per_us() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, end):  # the first spin also wakes the clocks
        torch.cuda._sleep(SPIN_CYCLES)  # noqa: SLF001 - see HostClock
        event.record()
    end.synchronize()
    return SPIN_CYCLES / (start.elapsed_time(end) * 1e3)


def _first_cause(error: BaseException) -> str:
    """First line of the error that began it; ending a broken capture raises another on top."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
