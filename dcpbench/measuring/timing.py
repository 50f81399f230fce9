"""Timing of steps: CUDA events between back-to-back graph replays, slowest rank, warm-up and stop rule."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import triton

from dcpbench.hangs.heartbeats import record_collective
from dcpbench.records.stats import StopRule, has_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcpbench.points.settings import Settings

    Chunk = Callable[[int], tuple[list[float], float]]  # from a number of samples: times in ms, and elapsed seconds

CHUNK_SECONDS = 0.4  # approximate s of a chunk of queued steps, after which ranks communicate and may stop
MIN_ROUNDS = 8  # minimum number of rounds when several variants are timed in turns
CHUNK_STEPS = (5, 100)  # fewest and most steps of a chunk
MIN_MEDIANS = 2  # minimum number of medians that warm-up compares, even for slow steps
KERNELS = 100  # run in a stream, so that it has been used
WARM_UP_SHARE = 0.5  # share of the time limit after which warm-up ends unsettled; the point is `unsettled`


def capture_graph(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `run`, which has run before, with gaps between its kernels as long as a server's."""
    use_two_streams()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@functools.cache
def use_two_streams() -> None:
    """Run kernels in this stream, then in another, once: from then on kernels of graphs follow each other as in a server.

    As long as one stream alone has been used they follow each other 0.2 µs sooner, until about the fourth capture of a
    process: its first points would look faster than the rest by that (docs/methodology.md).
    """
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            numbers = torch.zeros(1, device="cuda")
            for _ in range(KERNELS):
                numbers.add_(1)
        torch.cuda.synchronize()


@contextlib.contextmanager
def collect_compiled_kernels() -> Iterator[list[str]]:
    """Yield a list of the Triton kernels that are compiled or loaded within the block: each of them delayed the timing."""
    names: list[str] = []
    before = triton.knobs.compilation.listener

    def record_name(*, src: Any, **others: Any) -> None:  # noqa: ANN401 - Triton has no types
        names.append(getattr(src, "name", "a kernel"))
        if before is not None:
            before(src=src, **others)

    triton.knobs.compilation.listener = record_name
    try:
        yield names
    finally:
        triton.knobs.compilation.listener = before


@dataclasses.dataclass(frozen=True)
class Timing:
    """Step samples of one point, each the slowest rank's."""

    samples_ms: list[float]
    noisy: bool  # the time limit came before the interval was narrow enough
    unsettled: bool  # warm-up ended by time, not because two successive medians agreed

    @property
    def drift(self) -> float:
        """Return the difference of the medians of the first and the second half of the samples, as a share of the
        first.
        """
        half = len(self.samples_ms) // 2
        first, second = statistics.median(self.samples_ms[:half]), statistics.median(self.samples_ms[half:])
        return abs(second - first) / first


class Timer:
    """Runs steps on this rank, in step with all others."""

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self.step, self.device = step, device

    def measure_chunk(self, steps: int) -> tuple[list[float], float]:
        """Return (samples in ms, elapsed seconds), each the largest over ranks; every rank returns the same numbers."""
        start = time.perf_counter()
        mine = self._measure_cuda_chunk(steps) if self.device.type == "cuda" else self._measure_cpu_chunk(steps)
        numbers = torch.tensor([*mine, time.perf_counter() - start], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            with record_collective("all_reduce", numbers, dist.group.WORLD):
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        *samples, elapsed = numbers.tolist()
        return samples, elapsed

    def _measure_cuda_chunk(self, steps: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        self.step()  # not timed: ranks arrive here at different times and wait for each other in its collectives
        for event in events[:-1]:
            event.record()
            self.step()
        events[-1].record()
        events[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def _measure_cpu_chunk(self, steps: int) -> list[float]:
        if dist.is_initialized():
            with record_collective("barrier", None, dist.group.WORLD):
                dist.barrier()
        times = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


def measure_steps(
    step: Callable[[], None], device: torch.device, settings: Settings, alive: Callable[[], None] = lambda: None
) -> Timing:
    """Warm up until two successive medians agree within 1 %, then measure until the stop rule is met.

    A step that is replayed back to back includes no host time: its sample is the time from one replay's start on the
    GPU to the next one's. `alive` is called from time to time, for the hang watchdog.
    """
    rule = StopRule(precision=settings.precision, seconds=settings.seconds)
    return measure_chunks(Timer(step, device).measure_chunk, rule, alive)


def measure_chunks(
    chunk: Chunk, rule: StopRule, alive: Callable[[], None] = lambda: None, chunk_seconds: float = CHUNK_SECONDS
) -> Timing:
    """Measure like `measure_steps`, with samples from any function."""
    return measure_in_turns([chunk], rule, alive, chunk_seconds)[0]


def measure_in_turns(
    chunks: Sequence[Chunk],
    rule: StopRule,
    alive: Callable[[], None] = lambda: None,
    chunk_seconds: float = CHUNK_SECONDS,
) -> list[Timing]:
    """Measure several variants for comparison, a chunk of each in turn until all are done, so that all run at the same
    clocks.

    Each round has its own order, and there are MIN_ROUNDS if time permits: a device at its power limit is slower
    after the variant with the highest power, although samples of one chunk agree.
    """
    rounds = MIN_ROUNDS if len(chunks) > 1 else 1
    ways = [_TimedVariant(chunk, rule, alive, chunk_seconds, rounds) for chunk in chunks]
    orders = random.Random(0)
    _run_until_all([way.warm_up for way in ways], orders)
    _run_until_all([way.measure_chunk for way in ways], orders)
    return [way.get_timing() for way in ways]


def _run_until_all(attempts: Sequence[Callable[[], bool]], orders: random.Random) -> None:
    """Call each in turn, until all return True in one round."""
    results = [False]
    while not all(results):
        results = [each() for each in orders.sample(attempts, len(attempts))]


class _TimedVariant:
    """A variant that is timed in alternation with others."""

    def __init__(
        self, chunk: Chunk, rule: StopRule, alive: Callable[[], None], chunk_seconds: float, rounds: int
    ) -> None:
        self.chunk, self.rule, self.alive, self.rounds = chunk, rule, alive, rounds
        samples, self.elapsed = chunk(CHUNK_STEPS[0])
        self.steps = _compute_steps_per_chunk(statistics.median(samples), chunk_seconds)
        self.medians: list[float] = []
        self.calm = False
        self.samples: list[float] = []
        self.measuring = 0.0
        self.verdict: str | None = None

    def warm_up(self) -> bool:
        """Run one more chunk; whether it has settled, or has had its time."""
        median = statistics.median(self._run_chunk()[0])
        self.calm = self.calm or has_settled(self.medians[-1] if self.medians else None, median)
        self.medians.append(median)
        over = self.elapsed >= self.rule.seconds * WARM_UP_SHARE and len(self.medians) >= MIN_MEDIANS
        return self.calm or over

    def measure_chunk(self) -> bool:
        """Measure one more chunk; whether that is enough."""
        samples, seconds = self._run_chunk()
        self.samples += samples
        self.measuring += seconds
        self.rounds -= 1
        self.verdict = self.rule.get_stop_reason(self.samples, self.measuring)
        return self.verdict is not None and (self.rounds <= 0 or self.measuring >= self.rule.seconds)

    def get_timing(self) -> Timing:
        """Return the result of the timing."""
        return Timing(samples_ms=self.samples, noisy=self.verdict != "precise", unsettled=not self.calm)

    def _run_chunk(self) -> tuple[list[float], float]:
        samples, seconds = self.chunk(self.steps)
        self.alive()
        self.elapsed += seconds
        return samples, seconds


def _compute_steps_per_chunk(median_ms: float, chunk_seconds: float = CHUNK_SECONDS) -> int:
    fewest, most = CHUNK_STEPS
    return max(fewest, min(most, round(chunk_seconds * 1e3 / max(median_ms, 1e-3))))
