"""Measure calls, eagerly or as a pass from a CUDA graph, and check their results."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Protocol

import torch

from dcpbench.bench.bench_record import Timing
from dcpbench.measuring.environment import get_gpu_uuid
from dcpbench.measuring.gpu_state import GpuSampler
from dcpbench.measuring.timing import Timer, measure_in_turns
from dcpbench.records.stats import StopRule, compute_median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import BenchSettings, Case
    from dcpbench.measuring import timing
    from dcpbench.points.roofline import OperatorCost
    from dcpbench.records.record import Gpu

    Run = Callable[[], None]
    Tensors = tuple[torch.Tensor, ...]

CHUNK_SECONDS = 0.04  # passes between two looks at the stop rule; short, as a bench has many cases
COLD = 4  # minimum size of a pass's data relative to the L2 cache; a smaller one is marked `l2_warm`
FRESH_CALLS = 16  # default calls per pass for freshly written inputs; a multiple of any exchange's alternating buffers
MAX_SETS = 256
CPU_SETS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """A case, ready to run."""

    calls: Sequence[Run]  # one for each layer or step; together they are a pass
    check: Callable[[Run], str]  # runs a pass and compares with the reference; returns the difference, or nothing
    to_capture: Sequence[Run] | None = None  # calls that a CUDA graph holds instead of `calls`, if they differ
    written_bytes: int = 0  # bytes that a pass writes or reads, from which it follows whether the L2 cache is cold
    error: Callable[[], float] | None = None  # ‖x − ref‖ / ‖ref‖ of the last pass, if results are not bitwise equal
    work: OperatorCost | None = None  # minimum work of one call; None without a limit to compare with

    def run(self) -> None:
        """Run one pass, eagerly."""
        run_all(self.calls)

    def run_captured(self) -> None:
        """Run one pass of the calls that a graph would hold, eagerly."""
        run_all(self.calls if self.to_capture is None else self.to_capture)


def run_all(calls: Sequence[Run]) -> None:
    """Run one call after the other."""
    for call in calls:
        call()


def make_checked_calls(
    calls: Sequence[Callable[[], Tensors]],
    error: Callable[[Sequence[Tensors]], float],
    limit: float,
    *,
    work: OperatorCost,
    written_bytes: int = 0,
    before: Run = lambda: None,
) -> Calls:
    """Return calls that return tensors, with a check of the last pass by `error` and `limit`.

    Tensors of an earlier pass are filled with NaN before a checked pass; then `before` is run.
    """
    results: list[Tensors] = [() for _ in calls]

    def make_keeper(number: int) -> Run:
        def keep_result() -> None:
            results[number] = calls[number]()

        return keep_result

    def get_results() -> float:
        return error(results)

    def check_pass(run: Run) -> str:
        for result in results:
            reset_to_nan(*result)
        before()
        run()
        return describe_error(get_results(), limit)

    return Calls(
        calls=[make_keeper(number) for number in range(len(calls))],
        check=check_pass,
        error=get_results,
        work=work,
        written_bytes=written_bytes,
    )


def reset_to_nan(*tensors: torch.Tensor) -> None:
    """Fill with NaN, which no result may hold."""
    for tensor in tensors:
        tensor.fill_(math.nan)


def describe_error(error: float, limit: float) -> str:
    """Return the description of a relative error; empty if it is within the limit."""
    return "" if error <= limit else f"its relative error is {error:.2g}"


class Workload(Protocol):
    """Interface of every bench: tensors on a device, and a method that builds a case from them."""

    def __init__(self, device: torch.device, seed: int) -> None: ...

    def build_calls(self, case: Case) -> Calls:
        """Return a case, ready to run."""


def measure_gpu_times(
    passes: Sequence[tuple[Run, int]], device: torch.device, settings: BenchSettings
) -> tuple[list[Timing], Gpu | None]:
    """Return the time of a call of several passes by CUDA events, and the GPU state common to all.

    A pass is a function with its number of calls; passes are measured in turns, each repeated back to back. Eagerly, the
    time includes waits and launches of the host; a graph's replay has neither.
    """
    rule = StopRule(precision=settings.precision, seconds=settings.seconds)
    with GpuSampler(get_gpu_uuid(device)) as sampler:
        chunks = [Timer(run, device).measure_chunk for run, _ in passes]
        found = measure_in_turns(chunks, rule, chunk_seconds=CHUNK_SECONDS)
    return [_convert_timing(each, calls) for each, (_, calls) in zip(found, passes, strict=True)], sampler.get_state()


def _convert_timing(found: timing.Timing, calls: int) -> Timing:
    samples = [ms * 1e3 / calls for ms in found.samples_ms]
    interval = compute_median_interval(samples)
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


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error message, without the advice below it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def count_cold_sets(set_bytes: int, device: torch.device) -> int:
    """Return the number of tensor sets of a pass such that a set has left the L2 cache before it is used again.

    The other sets fill the cache COLD times over; a single set that does so is enough. At most MAX_SETS.
    """
    if device.type == "cpu":
        return CPU_SETS
    cold = COLD * torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if set_bytes >= cold else min(MAX_SETS, 1 + -(-cold // set_bytes))


def compute_relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Return ‖x − truth‖ / ‖truth‖ in fp64; 0 if both are 0, infinite if x holds NaN or infinity."""
    size = float(truth.double().norm())
    error = float((x.double() - truth.double()).norm())
    if not math.isfinite(error):
        return math.inf
    return error / size if size else math.inf if error else 0.0
