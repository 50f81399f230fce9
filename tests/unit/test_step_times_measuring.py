"""Test measurement of step times: the number of repetitions of a case, and the definition of a sample."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dcpbench.kernels import moe
from dcpbench.kernels.moe import decode_experts, prefill_experts, scaled
from dcpbench.models import SHAPES
from dcpbench.models.weight_formats import FORMATS, FP8, UNQUANTISED
from dcpbench.points.layout import Layout
from dcpbench.points.roofline import Sharding, StepRows, compute_step_floors
from dcpbench.records.record import Rates
from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence, ServeRequest, Step
from dcpbench.serving.step_cases import CaseSteps
from dcpbench.serving.step_times import Case, Chunks, Decodes
from dcpbench.workloads import step_timing
from dcpbench.workloads.step_timing import Pipeline, Times, has_enough_samples, list_kernel_changes

PROMPT = Sequence(ServeRequest(number=-1, prompt=np.zeros(9, np.int32), output_tokens=2), 1, replica=0, slot=1)
CHUNK = ReplicaStep(chunks=[Chunk(PROMPT, slot=1, start=0, stop=9, samples=True)])
FIRST, AGAIN = Step(1, [ReplicaStep()]), Step(2, [ReplicaStep()])
CHUNKS_FIRST, CHUNKS = Step(3, [CHUNK]), Step(4, [CHUNK])
BETWEEN = Step(5, [ReplicaStep()])


class TestFloors:
    def test_case_has_the_floor_of_its_step_on_all_replicas(self) -> None:
        """Each of 2 replicas has 3 requests at 20 rows and two chunks of 8 tokens after 16: 19 rows each, 38 in all."""
        case = Case(decodes=(Decodes(3, 20),), chunks=(Chunks(2, 8, 16),))
        rows = StepRows(decodes=(20,) * 3, chunks=((8, 16),) * 2, sampled=5, tokens=38)
        assert case.compute_rows(2) == rows
        sharding = Sharding(shape=SHAPES["tiny"], layout=Layout(2, 2), itemsize=2)
        rates = Rates(read_bytes_s=1e9, copy_bytes_s=1e9, matmul_flop_s=1e12, peer_bytes_s=1e9, barrier_us=3.0)
        assert step_timing.compute_floor_ms(sharding, case, rates) == pytest.approx(
            sum(compute_step_floors(sharding, rows, rates.limits).values()) / 1e3
        )

    @pytest.mark.parametrize("rates", [None, Rates(read_bytes_s=1e9)], ids=["cpu", "some"])
    def test_case_has_no_floor_without_all_rates(self, rates: Rates | None) -> None:
        sharding = Sharding(shape=SHAPES["tiny"], layout=Layout(1), itemsize=2)
        assert step_timing.compute_floor_ms(sharding, Case(chunks=(Chunks(1, 8, 0),)), rates) is None


class TestKernelChanges:
    """Test the rows of a replica up to which the same kernels run, by the thresholds of kernels/moe and kernels/linear."""

    def test_fp8_linear_and_expert_kernels_change_at_these_rows(self) -> None:
        """The thresholds are 128 rows; 256 tokens, 6,144 assignments of 8 per token, and 57 per row of 256 experts less
        one.
        """
        assert sorted(list_kernel_changes(make_sharding(scaled=True))) == [128, 256, 768, 1823]

    def test_bf16_expert_kernels_change_at_these_rows(self) -> None:
        """The thresholds are 256 tokens, 4,096 assignments, and 57, 113 and 192 per row of 256 experts less one."""
        assert list_kernel_changes(make_sharding()) == [256, 512, 1823, 3615, 6143]

    def test_expert_thresholds_are_divided_by_replicas_unlike_linear_ones(self) -> None:
        """The thresholds are 256 and 768 of 4 replicas; 64 experts of a rank have more rows each, so that 455 tokens
        are no change.
        """
        assert list_kernel_changes(make_sharding(Layout(4, 4), scaled=True)) == [64, 192, 128]

    @pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
    @pytest.mark.parametrize("local", [32, 256])
    def test_kernel_changes_are_where_kernels_choose_another_plan(self, local: int, weights: str) -> None:
        """All numbers of tokens between two changes have one plan, and each number just after a change has another."""

        def choose_plan(tokens: int) -> object:
            count = 8 * tokens
            if count <= (scaled if weights == "fp8" else decode_experts).MAX_ASSIGNMENTS:
                return "decode", tokens <= decode_experts.WIDE_TILES
            if weights == "fp8":
                return "prompts", count // local <= scaled.FEW_ROWS
            if weights == "int4":
                return "prompts"
            return [prefill_experts.choose_tiling(count // local, 2048, gated=gated) for gated in (False, True)]

        jumps = [n for n in range(1, 7000) if choose_plan(n) != choose_plan(n + 1)]
        assert moe.list_kernel_changes(local, 8, weights) == jumps


def make_sharding(layout: Layout | None = None, *, scaled: bool = False) -> Sharding:
    return Sharding(
        shape=SHAPES["deepseek-v3"],
        layout=layout or Layout(1),
        itemsize=2,
        weights=FORMATS[FP8] if scaled else UNQUANTISED,
    )


class TestEnough:
    @pytest.mark.parametrize(
        ("samples", "verdict"),
        [
            ([], False),
            ([100.0], False),
            ([100.0, 101.0], True),
            ([100.0, 103.0], False),
            ([100.0, 103.0] * 3, False),
            ([100.0, 103.0, 100.0, 103.0, 100.0, 103.0, 100.0], True),
            ([300.0], True),
            ([300.0, 330.0], False),
            ([300.0, 330.0, 360.0, 300.0], True),
        ],
        ids=["none", "one", "calm", "spread", "six", "most", "slow", "slow-spread", "a-second"],
    )
    def test_case_ends_when_samples_agree_or_take_too_long(self, samples: list[float], verdict: bool) -> None:
        """One more step is always in flight: a case takes 3 samples within 2 %, 2 of a slow step, at most 8, or a
        second in all.
        """
        assert has_enough_samples(samples) is verdict


@dataclasses.dataclass
class Event:
    """Represent a moment on a device, in ms."""

    at_ms: float

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


@dataclasses.dataclass
class Launched:
    step: Step
    ended: Event
    log: list[str]

    def wait_tokens(self) -> None:
        self.log.append(f"read {self.step.number}")


class Engine:
    """Simulate steps with the durations of a list."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.now_ms, self.log = iter(times), 0.0, []

    def launch_step(self, step: Step) -> Launched:
        self.log.append(f"launch {step.number}")
        self.now_ms += next(self.times)
        return Launched(step, Event(self.now_ms), self.log)


def make_agreement(*answers: int) -> list[int]:
    """Return the agreement of one rank."""
    return list(answers)


@dataclasses.dataclass
class Clock:
    """Replace the module `time`: each launch takes the same host time."""

    engine: Engine
    each_s: float

    def perf_counter(self) -> float:
        return self.each_s * sum(line.startswith("launch") for line in self.engine.log)


class TestPipeline:
    def test_step_is_launched_before_the_previous_one_is_read(self) -> None:
        """The order is that of the live loop; the first step of a case is not counted."""
        engine = Engine([500, 100, 101, 102])
        pipeline = Pipeline(engine, make_agreement, BETWEEN)
        times = pipeline.run_case(CaseSteps(FIRST, AGAIN))
        assert times == Times([100, 101])
        pipeline.read_in_flight()
        assert times == Times([100, 101, 102])
        assert engine.log == [
            "launch 1",
            "launch 2",
            "read 1",
            "launch 2",
            "read 2",
            "launch 2",
            "read 2",
            "read 2",
        ]

    def test_first_step_of_the_next_case_completes_the_last_sample(self) -> None:
        """Device time between the cases counts for neither: 900 ms of the second case's first step."""
        pipeline = Pipeline(Engine([500, 100, 101, 102, 900, 50, 50, 50]), make_agreement, BETWEEN)
        first = pipeline.run_case(CaseSteps(FIRST, AGAIN))
        second = pipeline.run_case(CaseSteps(FIRST, AGAIN))
        pipeline.read_in_flight()
        assert (first, second) == (Times([100, 101, 102]), Times([50, 50, 50]))

    def test_rank_0_decides_the_number_of_repetitions(self) -> None:
        """This rank follows rank 0: four turns, although three would suffice for its own samples."""
        answers = iter([0, 0, 0, 1])
        pipeline = Pipeline(Engine([500, *[100] * 9]), lambda *_: [next(answers), 0], BETWEEN)
        times = pipeline.run_case(CaseSteps(FIRST, AGAIN))
        pipeline.read_in_flight()
        assert times.samples_ms == [100] * 4

    def test_chunk_step_is_launched_after_itself_and_timed_after_another(self, monkeypatch) -> None:
        """Three launches of 40 ms on the host yield no sample; samples then span from the end of the step in between to
        the end of the case's. Once the time of decodes is known, as many of them precede it as take the same time: five
        of 20 ms for 90 ms, four for 70 ms.
        """
        engine = Engine([500, 90, 90, 90, 20, 70, *[20] * 5, 70, *[20] * 4, 70])
        clock = Clock(engine, 0.04)
        monkeypatch.setattr(step_timing, "time", clock)
        pipeline = Pipeline(engine, make_agreement, BETWEEN)
        times = pipeline.run_case(CaseSteps(CHUNKS_FIRST, CHUNKS))
        pipeline.read_in_flight()
        assert times == Times([70, 70, 70], pytest.approx([40, 40, 40]))
        assert [line for line in engine.log if line.startswith("launch")] == [
            f"launch {number}" for number in (3, 4, 4, 4, 5, 4, *[5] * 5, 4, *[5] * 4, 4)
        ]

    def test_decode_only_steps_follow_each_other_directly(self) -> None:
        pipeline = Pipeline(Engine([500, 100, 100, 100]), make_agreement, BETWEEN)
        times = pipeline.run_case(CaseSteps(FIRST, AGAIN))
        pipeline.read_in_flight()
        assert times == Times([100, 100, 100])

    def test_cooling_steps_before_a_slow_step_are_limited_by_the_settling_time(self) -> None:
        """The limit of 150 ms is four decodes of 40 ms, and not the ten that would take as long as a step of 400 ms."""
        engine = Engine([500, 400, 400, *[*[40] * 4, 400] * 2])
        pipeline = Pipeline(engine, make_agreement, BETWEEN)
        pipeline.decoding_ms.append(40)
        times = pipeline.run_case(CaseSteps(CHUNKS_FIRST, CHUNKS))
        pipeline.read_in_flight()
        assert times.samples_ms == [400] * 2
        assert [line for line in engine.log if line.startswith("launch")] == [
            f"launch {number}" for number in (3, 4, 4, *[5, 5, 5, 5, 4] * 2)
        ]

    def test_hot_case_is_timed_after_chunks_have_run_for_half_a_second(self, monkeypatch) -> None:
        """Half a second with 60 ms of host time per launch is three rounds of two chunk steps and the case, after its
        first step; clocks decrease in this time, so that the later half counts.
        """
        engine = Engine([500, *[40, 40, 10], *[41, 41, 11], *[42, 42, 12]])
        monkeypatch.setattr(step_timing, "time", Clock(engine, 0.06))
        pipeline = Pipeline(engine, make_agreement, BETWEEN)
        times = pipeline.run_hot(CaseSteps(FIRST, AGAIN), CHUNKS, count=2, times=1)
        assert times == [Times([11, 12])]
        assert [line for line in engine.log if line.startswith("launch")] == [
            f"launch {number}" for number in (1, *[4, 4, 2] * 3)
        ]

    def test_consecutive_steps_after_chunks_are_timed_separately(self, monkeypatch) -> None:
        """Two rounds of one second are enough: 900 ms of chunks and three steps, of which the first is slowest."""
        engine = Engine([500, *[900, 13, 12, 11], *[900, 15, 14, 13]])
        monkeypatch.setattr(step_timing, "time", Clock(engine, 0.13))
        pipeline = Pipeline(engine, make_agreement, BETWEEN)
        times = pipeline.run_hot(CaseSteps(FIRST, AGAIN), CHUNKS, count=1, times=3)
        assert times == [Times([13, 15]), Times([12, 14]), Times([11, 13])]
