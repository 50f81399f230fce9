"""Step times of a power-limited GPU: steps after chunks take longer than steps after decodes."""

import dataclasses
import itertools
import math

import msgspec
import pytest

from dcpbench.serving.replay import replay_requests
from dcpbench.serving.requests import Step
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.step_cases import TRAIN, HotRun, find_fullest, is_bare, make_cases, make_hot_runs
from dcpbench.serving.step_model import HEAT_S, DeviceHeat, HotStep, ReplicaBatch, Slowdown
from dcpbench.serving.step_times import HOT, Case, Chunks, Decodes, MeasuredCase, StepTimes
from tests.unit.serving_builder import make_config, make_request
from tests.unit.step_times_builder import EXTENT, compute_true_ms, make_step_times
from tests.unit.test_step_times import make_replica, predict_ms

DECODES, CHUNKS = ReplicaBatch.from_requests(8, 8000, []), ReplicaBatch.from_requests(0, 0, [(2048, 0)])
LARGEST = HotStep(CHUNKS, 1.1)


def make_chunk(tokens: int) -> ReplicaBatch:
    return ReplicaBatch.from_requests(0, 0, [(tokens, 0)])


class TestSlowdown:
    def test_slowdown_is_one_without_hot_cases(self):
        assert Slowdown([])([DECODES]) == 1

    def test_slowdown_is_interpolated_between_rows_and_constant_beyond(self):
        """5 % at 4 decode rows and 1 % at 16 give 3 % at 10 rows, run as 12, two thirds of the way."""
        slowed = Slowdown(
            [HotStep(ReplicaBatch.from_requests(4, 1, []), 1.05), HotStep(ReplicaBatch.from_requests(16, 1, []), 1.01)]
        )
        at = [slowed([ReplicaBatch.from_requests(n, 1, [])]) for n in (1, 4, 12, 16, 100)]
        assert at == pytest.approx([1.05, 1.05, 1.05 - 0.04 * 8 / 12, 1.01, 1.01])

    def test_steps_with_chunks_have_their_own_slowdown(self):
        slowed = Slowdown([HotStep(DECODES, 1.02), LARGEST])
        assert (slowed([DECODES]), slowed([CHUNKS]), slowed([DECODES, CHUNKS])) == (1.02, 1.1, 1.1)

    def test_slowdown_is_at_least_one(self):
        assert Slowdown([HotStep(DECODES, 0.98)])([DECODES]) == 1

    def test_only_first_steps_after_the_largest_chunks_give_their_slowdown(self):
        later = [HotStep(DECODES, 1.01, elapsed_s=0.1), HotStep(DECODES, 1.02, preceding_tokens=512)]
        assert Slowdown([HotStep(DECODES, 1.05), LARGEST, *later])([DECODES]) == 1.05


class TestHeatAfterChunks:
    def test_decodes_leave_no_heat(self):
        assert Slowdown([LARGEST]).compute_final_heat([DECODES]) == 0

    def test_heat_of_smaller_chunks_follows_the_slowdown_after_them(self):
        """A decode takes 10 % longer after 2,048 tokens, 2 % after 128 and 6 % after 512; all rows of a step count."""
        probes = [
            HotStep(DECODES, 1.1),
            HotStep(DECODES, 1.02, preceding_tokens=128),
            HotStep(DECODES, 1.06, preceding_tokens=512),
        ]
        slowed = Slowdown([LARGEST, *probes])
        at = [slowed.compute_final_heat([make_chunk(n)]) for n in (16, 128, 320, 512, 1280, 2048, 9000)]
        assert at == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1, 1])
        assert slowed.compute_final_heat([ReplicaBatch.from_requests(192, 9000, [(128, 0)])]) == pytest.approx(0.4)

    def test_heat_after_chunks_is_between_zero_and_one(self):
        probes = [
            HotStep(DECODES, 1.1),
            HotStep(DECODES, 0.9, preceding_tokens=128),
            HotStep(DECODES, 1.2, preceding_tokens=512),
        ]
        slowed = Slowdown([LARGEST, *probes])
        assert [slowed.compute_final_heat([make_chunk(n)]) for n in (128, 512)] == [0, 1]

    @pytest.mark.parametrize(
        "probes",
        [[], [HotStep(DECODES, 1.004), HotStep(DECODES, 1.004, preceding_tokens=512)]],
        ids=["older-files", "noise"],
    )
    def test_heat_is_proportional_to_tokens_without_probes(self, probes: list[HotStep]):
        slowed = Slowdown([LARGEST, *probes])
        assert [slowed.compute_final_heat([make_chunk(n)]) for n in (512, 1024, 2048)] == [0.25, 0.5, 1]


class TestSettleTime:
    @pytest.mark.parametrize("settle_s", [0.01, 0.03, 0.2])
    def test_settle_time_is_fitted_to_consecutive_steps(self, settle_s: float):
        train = [HotStep(DECODES, 1 + 0.08 * math.exp(-s / settle_s), elapsed_s=s) for s in (0.0, 0.02, 0.04, 0.06)]
        assert Slowdown([LARGEST, *train]).settle_s == pytest.approx(settle_s, rel=0.03)

    def test_settle_time_is_the_default_if_steps_are_hardly_slower(self):
        train = [HotStep(DECODES, 1.004), HotStep(DECODES, 1.003, elapsed_s=0.02)]
        assert Slowdown([LARGEST, *train]).settle_s == HEAT_S


class TestHeat:
    def test_heat_is_zero_after_decodes_and_one_after_long_chunks(self):
        heat = DeviceHeat(0.1)
        heat.add_step(1.0, 0.0)
        assert heat.compute_share(1.0) == 0
        heat.add_step(1.0, 1.0)
        assert heat.compute_share(2.0) == pytest.approx(1, abs=1e-3)

    def test_heat_rises_and_falls_with_the_same_time_constant(self):
        heat = DeviceHeat(0.1)
        heat.add_step(0.1, 0.5)
        assert heat.compute_share(0.1) == pytest.approx(0.5 * (1 - math.exp(-1)))
        heat.add_step(0.1, 0.0)
        assert heat.compute_share(0.2) == pytest.approx(0.5 * (1 - math.exp(-1)) * math.exp(-1))

    def test_heat_falls_while_the_device_is_idle(self):
        heat = DeviceHeat(0.1)
        heat.add_step(1.0, 1.0)
        assert heat.compute_share(1.1) == pytest.approx(math.exp(-1), rel=1e-3)

    def test_step_that_begins_before_its_predecessor_ends_changes_no_heat(self):
        """Rounding can give such a time, and time must not go backwards."""
        heat = DeviceHeat(0.1)
        heat.add_step(0.1, 1.0)
        before = heat.share
        heat.compute_share(0.1 - 1e-9)
        assert heat.share == before

    def test_time_between_two_steps_is_counted_once(self):
        """A step that seems to begin at 0.05 s, before its predecessor ends at 0.1, moves nothing back: until 0.2 s a
        tenth of a second passes, not 0.15.
        """
        heat = DeviceHeat(0.1)
        heat.add_step(0.1, 1.0)
        before = heat.share
        heat.compute_share(0.05)
        assert heat.compute_share(0.2) == pytest.approx(before * math.exp(-1))


def make_hot_case(case: Case, times: float) -> MeasuredCase:
    return MeasuredCase(case=case, samples_ms=[times * compute_true_ms(case.compute_work())])


def make_hot_times(*cases: MeasuredCase) -> StepTimes:
    cool = make_step_times()
    return msgspec.structs.replace(cool, cases=[*cool.cases, *cases])


class TestDurations:
    def test_hot_step_is_slower_by_the_factor_of_its_cases(self):
        """All hot cases took a tenth longer: any step does at full heat, and half of that at half."""
        times = make_hot_times(*(make_hot_case(run.case, 1.1) for run in RUNS))
        step = Step(0, [make_replica([4999] * 8)])
        assert times.predict_duration_ms(step, 1.0) == pytest.approx(1.1 * predict_ms(make_replica([4999] * 8)))
        assert times.predict_duration_ms(step, 0.5) == pytest.approx(1.05 * predict_ms(make_replica([4999] * 8)))
        assert times.predict_duration_ms(step) == predict_ms(make_replica([4999] * 8))

    def test_replay_is_slower_only_shortly_after_chunks(self):
        """After a prompt of 5,000 tokens, the first of 40 decodes takes a tenth longer and the next one e^(-41.4 / 40)
        of that, as no case gives the time constant; the last ones take as long as without hot cases.
        """
        setup = make_config(pages=9000, max_requests=48, chunk=8192, max_context=9000)
        found = []
        for times in (make_step_times(), make_hot_times(*(make_hot_case(run.case, 1.1) for run in RUNS))):
            traffic = replay_requests([make_request(0, 5000, 41)], Scheduler(setup), 1, times).traffic
            at = traffic.samples[0].token_s
            found.append([b - a for a, b in itertools.pairwise(at)])
        cool, slow = found
        more = [b / a - 1 for a, b in zip(cool, slow, strict=True)]
        assert more[0] == pytest.approx(0.1, rel=1e-3)
        assert more[1] == pytest.approx(0.1 * math.exp(-slow[0] / HEAT_S), rel=1e-3)
        assert more[-1] == pytest.approx(0, abs=1e-4)

    def test_step_times_give_heat_of_chunks_and_settle_time(self):
        """A case of 8 rows takes 51 ms, 10 % more after the largest chunks, half of it a step later, and half after 512
        tokens.
        """
        probe = Case(decodes=(Decodes(8, 256),), use=HOT)
        later, after = (
            msgspec.structs.replace(probe, **more) for more in ({"since": 1}, {"after": (Chunks(1, 512, 0),)})
        )
        largest = msgspec.structs.replace(find_fullest(make_cases(EXTENT)), use=HOT)
        slowed = make_hot_times(
            make_hot_case(largest, 1.1),
            make_hot_case(probe, 1.1),
            make_hot_case(later, 1.05),
            make_hot_case(after, 1.05),
        ).slowdown
        assert slowed.compute_final_heat([make_chunk(512)]) == pytest.approx(0.5)
        assert slowed.settle_s == pytest.approx(compute_true_ms(probe.compute_work()) / 1e3 / math.log(2), rel=0.03)


RUNS = make_hot_runs(EXTENT, find_fullest(make_cases(EXTENT)))


class TestCases:
    def test_hot_cases_are_a_subset_of_all_cases(self):
        """Only heat distinguishes the two times of a case."""
        lines = {msgspec.structs.replace(case, use=HOT) for case in make_cases(EXTENT)}
        assert {msgspec.structs.replace(run.case, after=()) for run in RUNS} <= lines

    def test_hot_run_has_a_case_for_each_step_after_its_chunks(self):
        run = HotRun(Case(decodes=(Decodes(4, 9),), use=HOT), Case(chunks=(Chunks(1, 8, 0),)), times=3)
        assert [case.since for case in run.cases] == [0, 1, 2]
        assert {msgspec.structs.replace(case, since=0) for case in run.cases} == {run.case}

    def test_hot_runs_cover_rows_consecutive_steps_and_smaller_chunks(self):
        """Runs have 1, 24 and 48 rows, and 512, 2,048 and 8,192 tokens; the middle is by ratio."""
        after_largest = [run for run in RUNS if not run.case.after]
        rows = [(run.case.decodes[0].requests, run.times) for run in after_largest if run.case.decodes]
        assert [count for _, count in rows] == [TRAIN, TRAIN, 1]
        assert rows[0][0] == 1
        assert rows[-1][0] == 48
        assert [run.case.compute_work().tokens for run in after_largest if run.case.chunks] == [512, 2048, 8192]
        probes = [run for run in RUNS if run.case.after]
        assert [run.before.compute_work().tokens for run in probes] == [128, 512, 2048]
        assert {run.case.decodes for run in probes} == {after_largest[0].case.decodes}
        assert all(run.case.after == run.before.chunks for run in probes)

    def test_single_row_has_consecutive_hot_steps(self):
        alone = dataclasses.replace(EXTENT, requests=1, targets=(1,))
        runs = make_hot_runs(alone, find_fullest(make_cases(alone)))
        assert [run.times for run in runs if run.case.decodes and not run.case.after] == [TRAIN]

    def test_hot_runs_have_at_most_the_tokens_of_the_given_chunks(self):
        largest = find_fullest(case for case in make_cases(EXTENT) if case.compute_work().tokens <= 1024)
        runs = make_hot_runs(EXTENT, largest)
        assert {run.before.compute_work().tokens for run in runs if not run.case.after} == {1024}
        assert max(run.case.compute_work().tokens for run in runs) == 1024

    def test_fullest_case_of_a_grid_has_no_prefix(self):
        batch = find_fullest(make_cases(EXTENT)).compute_work()
        assert (batch.rows, batch.tokens, batch.prefix) == (0, 8192, 0)
        assert [is_bare(case) for case in (Case(chunks=(Chunks(1, 8, 4),)), Case(chunks=(Chunks(1, 8, 0),)))] == [
            False,
            True,
        ]
