"""Measure the step times of a built engine: cases of a grid, one step after the other, as the live loop runs them.

    broadcast ─▶ launch ─▶ read the step before ─▶ …        the same iterations as serving_loop.py, without a scheduler

A sample is the time from the end of the preceding step to its own end on the device, so that it includes device idle
time between two steps. Launching a step with chunks may take the host longer than the device runs it: the host time is
measured with such steps one after the other, and the step time, as usual, after decode steps of about the same
duration. Last, a few cases are measured after chunks: where power limits clocks, they take longer there. Positions are
constant: every sample of a case is the same work on random KV rows.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING

import torch

from dcpbench.exchange.torch_collectives import gather_objects
from dcpbench.kernels import block_scaled, moe
from dcpbench.measuring.environment import get_gpu_uuid
from dcpbench.measuring.gpu_state import GpuSampler, is_throttled, merge_states
from dcpbench.points.batches import GRAPH_BATCHES
from dcpbench.points.roofline import Sharding, compute_step_floors
from dcpbench.serving.step_cases import CaseMaker, Extent, find_fullest, is_bare, make_cases, make_hot_runs
from dcpbench.serving.step_times import MeasuredCase, StepTimes, get_engine_path
from dcpbench.workloads.decode import count_emulated_calls
from dcpbench.workloads.point_facts import describe_weights, list_device_warnings, list_warnings
from dcpbench.workloads.serve import make_scheduler_config
from dcpbench.workloads.serving_loop import freeze_heap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.engine.serve_engine import LaunchedStep, ServeEngine
    from dcpbench.points.point import Point
    from dcpbench.records.record import Environment, Rates
    from dcpbench.serving.requests import Step
    from dcpbench.serving.step_cases import CaseSteps
    from dcpbench.serving.step_times import Case
    from dcpbench.workloads.serve import Serving
    from dcpbench.workloads.serving_loop import RankZeroBroadcast

SLOW_MS, MIN_SLOW_SAMPLES, MIN_SAMPLES, MAX_SAMPLES = 150, 2, 3, 8
"""Numbers of samples of a case: MIN_SAMPLES, or MIN_SLOW_SAMPLES for a step longer than SLOW_MS, and MAX_SAMPLES if they differ."""
SPREAD = 0.02  # samples agree when their range is within this share of the median
CASE_MS = 1000  # a case is not continued past this
LAUNCH_MS = 500  # limit of the time to repeat launches of a step with chunks, at most as often as samples
LAUNCHES = 5  # number of steps launched on an idle device, for launch_ms
HOT_MS, SETTLED_MS = 500, 150  # duration of a case after chunks; settling time of a GPU, 3 to 4 settle_s
MAX_HOT_MS = 700  # maximum duration of the largest chunks after which cases are measured
MAX_STEPS_BETWEEN = 8  # decode steps before one with chunks
FILL_TOKENS = 1 << 20  # KV locations filled at once


def get_extent(serving: Serving, points: Sequence[Point]) -> Extent:
    """Return the extent of the steps of these points on a built engine."""
    session, point = serving.session, points[0]
    plan, changes = session.plan, []
    if session.engine.device.type == "cuda":
        changes = list_kernel_changes(Sharding.from_point(point, session.shape))
    return Extent.from_points(points, pages=plan.pages, max_context=plan.max_context, changes=changes)


def list_kernel_changes(sharding: Sharding) -> list[int]:
    """Return the maximum rows of a replica up to which linear layers and experts use the same kernels on a GPU."""
    shape, layout = sharding.shape, sharding.layout
    experts = moe.list_kernel_changes(shape.experts // sharding.expert_ranks, shape.top_k, sharding.weights.name)
    return [tokens // layout.dp for tokens in experts] + ([block_scaled.FEW_ROWS] if sharding.in_fp8 else [])


def measure_step_times(
    serving: Serving,
    points: Sequence[Point],
    environment: Environment,
    report_progress: Callable[..., None],
    rates: Rates | None = None,
) -> StepTimes:
    """Measure step times for all of `points`, which share one engine path. Collective; every rank returns the same
    samples.

    The `rates` of the machine give each case a floor. Graphs have been captured (ServeEngine.capture_steps). The contents of
    the KV cache are lost.
    """
    session, started = serving.session, time.perf_counter()
    sharding = Sharding.from_point(points[0], session.shape)
    engine = session.engine
    extent = get_extent(serving, points)
    cases = make_cases(extent)
    _init_cache(serving)
    serving.engine.reset_slots()
    largest = engine.batches[max(engine.batches)]
    emulated = count_emulated_calls(session, points[0], largest)
    rates = None if emulated else rates
    most = max(points, key=lambda p: p.concurrency)
    maker = CaseMaker(make_scheduler_config(most, session), session.shape.vocab)
    pipeline = Pipeline(
        serving.engine, serving.broadcast, maker.make_padding_step(min(extent.max_running, GRAPH_BATCHES[-1]))
    )
    mine = []
    freeze_heap()
    with GpuSampler(get_gpu_uuid(engine.device)) as sampler:
        for index, case in enumerate(cases):
            report_progress("measure", f"step times: {index} of {len(cases)} cases")
            mine.append(pipeline.run_case(maker.make_steps(case)))
        pipeline.read_in_flight()
        if engine.device.type == "cuda":
            report_progress("measure", "step times: hot")
            chunks_ms = {
                case: statistics.median(m.samples_ms) for case, m in zip(cases, mine, strict=True) if is_bare(case)
            }
            quick = {case: ms for case, ms in chunks_ms.items() if serving.broadcast(int(ms <= MAX_HOT_MS))[0]}
            hot = make_hot_runs(
                extent, find_fullest(quick or [min(chunks_ms, key=lambda case: case.compute_work().tokens)])
            )
            before: dict[Case, Step] = {}
            for run in hot:
                if run.before not in before:
                    steps = maker.make_steps(run.before)
                    pipeline.run_turn(steps.first, None)
                    before[run.before] = steps.again
                count = serving.broadcast(math.ceil(SETTLED_MS / chunks_ms[run.before]))[0]
                mine += pipeline.run_hot(maker.make_steps(run.case), before[run.before], count, run.times)
                cases += run.cases
        launch_ms = _measure_launch_ms(serving, pipeline, maker.make_steps(cases[0]), mine[0].samples_ms)
        gpu = merge_states(gather_objects(sampler.get_state()))
    serving.engine.reset_slots()
    return StepTimes(
        path=get_engine_path(points[0]),
        cases=[
            MeasuredCase(
                case=case,
                samples_ms=samples,
                host_ms=host,
                floor_ms=compute_floor_ms(sharding, case, rates, engine.query_length),
            )
            for case, samples, host in zip(
                cases,
                gather_slowest([m.samples_ms for m in mine]),
                gather_slowest([m.host_ms for m in mine]),
                strict=True,
            )
        ],
        launch_ms=launch_ms,
        measuring_s=time.perf_counter() - started,
        conditions=describe_weights(session, cuda_graph=engine.device.type == "cuda"),
        environment=environment,
        warnings=list_device_warnings(points[0], engine.device)
        + list_warnings(throttled=is_throttled(gpu), emulated=emulated is not None),
        emulated=emulated,
        gpu=gpu,
    )


def compute_floor_ms(sharding: Sharding, case: Case, rates: Rates | None, queries: int = 1) -> float | None:
    """Return the floor of a case's step with so many rows of each decode; None without rates, or without a required one."""
    floors = rates and compute_step_floors(sharding, case.compute_rows(sharding.layout.dp, queries), rates.limits)
    return sum(floors.values()) / 1e3 if floors else None


def gather_slowest(mine: list[list[float]]) -> list[list[float]]:
    """Return the samples of the slowest rank for each case. Collective."""
    ranks = gather_objects(mine)
    return [[max(times) for times in zip(*case, strict=True)] for case in zip(*ranks, strict=True)]


def has_enough_samples(samples: Sequence[float]) -> bool:
    """Return True if a case needs no further step in addition to the one in flight."""
    if not samples:
        return False
    median, count = statistics.median(samples), len(samples) + 1
    if count < (MIN_SLOW_SAMPLES if median > SLOW_MS else MIN_SAMPLES):
        return False
    calm = max(samples) - min(samples) <= SPREAD * median
    return calm or count >= MAX_SAMPLES or sum(samples) >= CASE_MS


def _has_enough_launches(host_ms: Sequence[float], behind: Sequence[float]) -> bool:
    """Return True if these launches suffice for the host time; each of `behind` is the device time of the step before."""
    least = MIN_SLOW_SAMPLES if behind and behind[-1] > SLOW_MS else MIN_SAMPLES
    return len(host_ms) >= least or sum(host_ms) >= LAUNCH_MS


@dataclasses.dataclass
class Times:
    """Times of one case on this rank; see Measured."""

    samples_ms: list[float] = dataclasses.field(default_factory=list)
    host_ms: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _UnreadStep:
    launched: LaunchedStep
    at_s: float  # time at which the call that launched it returned; on the CPU the step has run by then
    samples: list[float] | None  # list to which its time is appended; None if it is not needed


class Pipeline:
    """Turns of the live loop with steps made by hand."""

    def __init__(self, engine: ServeEngine, broadcast: RankZeroBroadcast, between: Step) -> None:
        """Create the pipeline; `between` runs before each timed step with chunks."""
        self.engine, self.broadcast, self.between = engine, broadcast, between
        self.pending: _UnreadStep | None = None
        self.last: _UnreadStep | None = None
        self.decoding_ms: list[float] = []  # times of the steps in between

    def run_case(self, steps: CaseSteps) -> Times:
        """Return the times of a case, without the last sample, which the next case or `read_in_flight` adds. Collective.

        The first step is not counted, because it follows other steps, and it writes tables.
        """
        times = Times()
        behind: list[float] = []
        chunks = launching = steps.again.has_chunks
        self.run_turn(steps.first, None)
        while launching:
            times.host_ms.append(self.run_turn(steps.again, behind))
            launching = not self.broadcast(int(_has_enough_launches(times.host_ms, behind)))[0]
        done, between = 0, self.broadcast(self.count_steps_between(behind))[0] if chunks else 0
        while not done:
            for _ in range(between):
                self.run_turn(self.between, self.decoding_ms)
            self.run_turn(steps.again, times.samples_ms)
            took = times.samples_ms or behind
            done, between = self.broadcast(
                int(has_enough_samples(times.samples_ms)), self.count_steps_between(took) if chunks else 0
            )
        return times

    def count_steps_between(self, took_ms: Sequence[float]) -> int:
        """Return the number of decode steps that take as long as a step of the case, or as a device to settle: few, and
        one while that is unknown.
        """
        if not took_ms or not self.decoding_ms:
            return 1
        return min(math.ceil(min(took_ms[-1], SETTLED_MS) / max(self.decoding_ms[-1], 1e-3)), MAX_STEPS_BETWEEN)

    def run_hot(self, steps: CaseSteps, chunks: Step, count: int, times: int) -> list[Times]:
        """Return the times of `count` consecutive steps of a case after `chunks`, repeated. Collective; see run_case.

        Only the later half counts.
        """
        samples: list[list[float]] = [[] for _ in range(times)]
        self.run_turn(steps.first, None)
        began, rounds, done = time.perf_counter(), 0, False
        while not done:
            for _ in range(count):
                self.run_turn(chunks, None)
            for one in samples:
                self.run_turn(steps.again, one)
            rounds += 1
            took_ms = (time.perf_counter() - began) * 1e3
            least = MIN_SLOW_SAMPLES if took_ms >= CASE_MS else MIN_SAMPLES
            done = bool(self.broadcast(int(took_ms >= HOT_MS and rounds >= least))[0])
        self.read_in_flight()
        return [Times(samples_ms=one[(rounds - 1) // 2 :]) for one in samples]

    def run_turn(self, step: Step, samples: list[float] | None) -> float:
        """Launch a step, then read the one before it; return the time of the launch in ms."""
        start = time.perf_counter()
        launched = self.engine.launch_step(step)
        now = time.perf_counter()
        self._read_step()
        self.pending = _UnreadStep(launched, now, samples)
        return (now - start) * 1e3

    def read_in_flight(self) -> None:
        """Read the steps in flight."""
        self._read_step()
        self.pending = self.last = None

    def _read_step(self) -> None:
        read = self.pending
        if read is None:
            return
        read.launched.wait_tokens()
        if self.last is not None and read.samples is not None:
            read.samples.append(_compute_gap_ms(self.last, read))
        self.last = read


def _compute_gap_ms(before: _UnreadStep, after: _UnreadStep) -> float:
    start, end = before.launched.ended, after.launched.ended
    return (after.at_s - before.at_s) * 1e3 if start is None or end is None else start.elapsed_time(end)


def _measure_launch_ms(serving: Serving, pipeline: Pipeline, steps: CaseSteps, samples: list[float]) -> float:
    """Return how much longer a step takes from decision to read if the device waits for it; the slowest rank's."""
    pipeline.run_turn(steps.first, None)
    pipeline.read_in_flight()
    times = []
    for _ in range(LAUNCHES):
        start = time.perf_counter()
        serving.broadcast(0)
        serving.engine.launch_step(steps.again).wait_tokens()
        times.append((time.perf_counter() - start) * 1e3)
    return max(gather_objects(max(statistics.median(times) - statistics.median(samples), 0.0)))


def _init_cache(serving: Serving) -> None:
    """Fill the cache with random KV rows, and the table with token ids: zeros would make a GPU clock higher, and one
    expert do all the work.
    """
    session = serving.session
    engine = session.engine
    locs = engine.allocator.pages * engine.allocator.virtual_page
    for index, first in enumerate(range(0, locs, FILL_TOKENS)):
        some = torch.arange(first, min(first + FILL_TOKENS, locs), dtype=torch.int32, device=engine.device)
        engine.write_random_locs(some, number=index, seed=0)
    generator = torch.Generator(engine.device).manual_seed(0)
    engine.request_pool.tokens[1:].random_(0, session.shape.vocab, generator=generator)
