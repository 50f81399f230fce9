"""Measures calls that may wait for the GPU: eagerly, on the host behind queued work, and from a CUDA graph."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Protocol

import torch

from dcpbench.bench.record import Graph, Syncs, SyncSite, Timing
from dcpbench.measuring.gpu_state import GpuSampler
from dcpbench.measuring.timing import Timer, time_chunks, time_in_turns
from dcpbench.records.stats import StopRule, median_interval
from dcpbench.syncs.sites import sites_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from dcpbench.bench.record import BenchSettings, Case, Overwritten
    from dcpbench.measuring import timing
    from dcpbench.points.floors import Work
    from dcpbench.records.record import Gpu
    from dcpbench.syncs.sites import Sync

    Run = Callable[[], None]
    Tensors = tuple[torch.Tensor, ...]

CHUNK_SECONDS = 0.04
"""Passes between two looks at the stop rule; short, as a bench has many cases."""
REFUSALS = (RuntimeError, SystemError)
"""What torch raises for a wait within a capture or where it is an error. Once the live detector has been used, a
condition on a tensor loses its exception on the way through torch's callbacks, and is a SystemError (2.11)."""
HOST_CALLS = 16
"""Calls of a pass whose host time is taken; behind a backlog each, 61 would take long and tell no more."""
COLD = 4
"""Times the L2 cache that a pass goes through at the least; one that does not is marked `l2_warm`."""
FRESH_CALLS = 16
"""Calls of a pass of inputs that were just written in an engine, too, where none are asked for; a multiple of every
number of buffers that an exchange takes turns with."""
MOST_SETS = 256
CPU_SETS = 2
SPIN_CYCLES = 20_000_000
"""Some 10 ms of waiting on a GPU, to find out how long a cycle is."""

_tried: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture was refused; torch's allocator still asks them which allocations are theirs."""


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
    """Memory that a pass goes through, so that what it began with has left the L2 cache: written, or read."""
    error: Callable[[], float] | None = None
    """‖x − ref‖ / ‖ref‖ of what the last pass left, where results are not equal bit by bit."""
    work: Work | None = None
    """The least that one call must do; None where no limit is approached."""
    overwritten: Callable[[], Overwritten] | None = None
    """What the last pass that was checked overwrote, where a variant is known to."""

    def run(self) -> None:
        """One pass, eagerly."""
        run_all(self.calls)

    def run_captured(self) -> None:
        """One pass of what a graph would hold, eagerly."""
        run_all(self.calls if self.to_capture is None else self.to_capture)


def run_all(calls: Sequence[Run]) -> None:
    """One call after the other."""
    for call in calls:
        call()


def compared(
    calls: Sequence[Callable[[], Tensors]],
    error: Callable[[Sequence[Tensors]], float],
    limit: float,
    *,
    work: Work,
    written_bytes: int = 0,
    before: Run = lambda: None,
) -> Calls:
    """Calls that return tensors, of which the last pass's are held against the truth: `error` of them, up to `limit`.

    Whatever an earlier pass returned is filled with NaN before a pass that is checked; then `before` is run.
    """
    results: list[Tensors] = [() for _ in calls]

    def keeping(number: int) -> Run:
        def keep() -> None:
            results[number] = calls[number]()

        return keep

    def found() -> float:
        return error(results)

    def check(run: Run) -> str:
        for result in results:
            spoil(*result)
        before()
        run()
        return verdict(found(), limit)

    return Calls(
        calls=[keeping(number) for number in range(len(calls))],
        check=check,
        error=found,
        work=work,
        written_bytes=written_bytes,
    )


def spoil(*tensors: torch.Tensor) -> None:
    """Fill with NaN, which no result may hold."""
    for tensor in tensors:
        tensor.fill_(math.nan)


def verdict(error: float, limit: float) -> str:
    """What is said of a relative error; empty where it is within the limit."""
    return "" if error <= limit else f"its relative error is {error:.2g}"


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


def gpu_time(run: Run, calls: int, device: torch.device, settings: BenchSettings) -> tuple[Timing, Gpu | None]:
    """Time of a call, where `run` is a pass of so many, passes back to back, by CUDA events.

    Run eagerly, the host's waiting and launching is in it; a graph's replay has none of either.
    """
    (time,), gpu = gpu_times([(run, calls)], device, settings)
    return time, gpu


def gpu_times(
    passes: Sequence[tuple[Run, int]], device: torch.device, settings: BenchSettings
) -> tuple[list[Timing], Gpu | None]:
    """The same of several that take turns, and the state that all of them met."""
    with GpuSampler(device) as sampler:
        chunks = [Timer(run, device).chunk for run, _ in passes]
        found = time_in_turns(chunks, _rule(settings), chunk_seconds=CHUNK_SECONDS)
    return [_timing(each, calls) for each, (_, calls) in zip(found, passes, strict=True)], sampler.state()


def host_time(calls: Calls, settings: BenchSettings) -> Timing:
    """Host time inside a call while the GPU is `backlog_us` behind."""
    clock = HostClock(calls.calls[:HOST_CALLS], settings.backlog_us)
    return _timing(time_chunks(clock.chunk, _rule(settings), chunk_seconds=CHUNK_SECONDS), len(clock.calls))


def try_capture(calls: Calls) -> Graph:
    """Whether a pass can be captured at all, and if not, what torch says. Nothing should be timed afterwards."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    _tried.append(graph)
    torch.cuda.synchronize()
    reason = ""
    with torch.cuda.stream(stream):
        # Not torch.cuda.graph, which empties the allocator's cache: after a refusal that is an error of its own.
        graph.capture_begin()
        try:
            calls.run_captured()
        except REFUSALS as e:
            reason = "" if isinstance(e, SystemError) else first_line(e)
        try:
            graph.capture_end()
        except RuntimeError as e:
            reason = reason or first_line(e)
    return Graph(captured=not reason, reason=reason)


def waits(run: Run) -> bool:
    """Whether torch itself would wait for a stream in `run`.

    Asked before anything else is counted: the live detector's callbacks stay for good and would slow later timings.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except REFUSALS:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    return False


def count_syncs(build: Callable[[torch.device], Calls], device: torch.device) -> Syncs:
    """Synchronisations of one pass, per call; what building it takes is left out.

    On a GPU nothing may be timed afterwards, as the detector's callbacks stay. On the CPU the case is built again, on
    a device that only stands for a GPU.
    """
    if device.type == "cuda":
        from dcpbench.syncs.live import watch

        calls = build(device)
        with watch() as seen:
            calls.run()
        return _per_call(seen.syncs, calls, "live")
    from dcpbench.syncs.dry_run import dry_run

    # A dry run begins with a backward pass, which inference mode would refuse.
    with torch.inference_mode(mode=False), dry_run() as run:
        calls = build(torch.device("cuda", 0))
        before = len(run.syncs)
        calls.run()
        return _per_call(run.syncs[before:], calls, "dry-run")


def _per_call(syncs: Sequence[Sync], calls: Calls, detector: Literal["live", "dry-run"]) -> Syncs:
    passes = len(calls.calls)
    certain = [sync for sync in syncs if not sync.may_block]
    sites = [
        SyncSite(
            kind=site.kind,
            op=site.op,
            function=site.function,
            file=site.file,
            line=site.line,
            per_call=site.count / passes,
        )
        for site in sites_of(certain)
    ]
    return Syncs(per_call=len(certain) / passes, detector=detector, sites=sites)


def _timing(found: timing.Timing, calls: int) -> Timing:
    samples = [ms * 1e3 / calls for ms in found.samples_ms]
    interval = median_interval(samples)
    return Timing(
        median_us=interval.median,
        low_us=interval.low,
        high_us=interval.high,
        max_us=max(samples),
        samples=interval.samples,
        noisy=found.noisy,
        unsettled=found.unsettled,
        samples_us=samples,
    )


def _rule(settings: BenchSettings) -> StopRule:
    return StopRule(precision=settings.precision, seconds=settings.seconds)


def _cycles_per_us() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, end):  # the first spin also wakes the clocks
        torch.cuda._sleep(SPIN_CYCLES)  # noqa: SLF001 - see HostClock
        event.record()
    end.synchronize()
    return SPIN_CYCLES / (start.elapsed_time(end) * 1e3)


def first_line(error: BaseException) -> str:
    """What an error says, without the advice below it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def cold_sets(set_bytes: int, device: torch.device) -> int:
    """Sets of tensors that a pass must go through so that none of a set is still in the L2 cache when it comes again.

    Without the set itself they fill it COLD times over; a set that does so alone is enough. At most MOST_SETS.
    """
    if device.type == "cpu":
        return CPU_SETS
    cold = COLD * torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if set_bytes >= cold else min(MOST_SETS, 1 + -(-cold // set_bytes))


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """‖x − truth‖ / ‖truth‖ in fp64; 0 where both are 0, infinite where x holds NaN or infinity."""
    size = float(truth.double().norm())
    error = float((x.double() - truth.double()).norm())
    if not math.isfinite(error):
        return math.inf
    return error / size if size else math.inf if error else 0.0
