"""What a GPU that is limited by power does to step times: steps behind chunks take longer than those behind decodes."""

import dataclasses
import itertools
import math

import msgspec
import pytest

from dcpbench.serving.replay import replay_requests
from dcpbench.serving.requests import Step
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.step_cases import TRAIN, HotRun, find_fullest, is_bare, make_cases, make_hot_runs
from dcpbench.serving.step_model import HEAT_S, Heat, HotStep, Slowdown, Work
from dcpbench.serving.step_times import HOT, Case, Chunks, Decodes, MeasuredCase, StepTimes
from tests.unit.serving_builder import config, request
from tests.unit.step_times_builder import EXTENT, step_times, true_ms
from tests.unit.test_step_times import ms, replica

DECODES, CHUNKS = Work.from_requests(8, 8000, []), Work.from_requests(0, 0, [(2048, 0)])
LARGEST = HotStep(CHUNKS, 1.1)


def chunks(tokens: int) -> Work:
    return Work.from_requests(0, 0, [(tokens, 0)])


class TestSlowed:
    def test_without_hot_cases_nothing_is_slower(self):
        assert Slowdown([])([DECODES]) == 1

    def test_it_is_interpolated_between_rows_and_stays_past_them(self):
        """5 % at 4 decode rows, 1 % at 16: 3 % at 10 rows run as 12, which is two thirds of the way."""
        slowed = Slowdown([HotStep(Work.from_requests(4, 1, []), 1.05), HotStep(Work.from_requests(16, 1, []), 1.01)])
        at = [slowed([Work.from_requests(n, 1, [])]) for n in (1, 4, 12, 16, 100)]
        assert at == pytest.approx([1.05, 1.05, 1.05 - 0.04 * 8 / 12, 1.01, 1.01])

    def test_steps_with_chunks_have_a_line_of_their_own(self):
        slowed = Slowdown([HotStep(DECODES, 1.02), LARGEST])
        assert (slowed([DECODES]), slowed([CHUNKS]), slowed([DECODES, CHUNKS])) == (1.02, 1.1, 1.1)

    def test_noise_makes_nothing_faster(self):
        assert Slowdown([HotStep(DECODES, 0.98)])([DECODES]) == 1

    def test_only_steps_right_behind_the_largest_chunks_say_how_much_these_slow(self):
        later = [HotStep(DECODES, 1.01, since_s=0.1), HotStep(DECODES, 1.02, before=512)]
        assert Slowdown([HotStep(DECODES, 1.05), LARGEST, *later])([DECODES]) == 1.05


class TestHowMuchHeatChunksLeave:
    def test_decodes_leave_none(self):
        assert Slowdown([LARGEST]).compute_final_heat([DECODES]) == 0

    def test_smaller_chunks_leave_what_a_step_behind_them_was_slowed(self):
        """A decode takes 10 % longer behind 2,048 tokens, 2 % behind 128 and 6 % behind 512; of a step, all rows count."""
        probes = [HotStep(DECODES, 1.1), HotStep(DECODES, 1.02, before=128), HotStep(DECODES, 1.06, before=512)]
        slowed = Slowdown([LARGEST, *probes])
        at = [slowed.compute_final_heat([chunks(n)]) for n in (16, 128, 320, 512, 1280, 2048, 9000)]
        assert at == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1, 1])
        assert slowed.compute_final_heat([Work.from_requests(192, 9000, [(128, 0)])]) == pytest.approx(0.4)

    def test_none_leave_more_than_the_largest_or_less_than_none(self):
        probes = [HotStep(DECODES, 1.1), HotStep(DECODES, 0.9, before=128), HotStep(DECODES, 1.2, before=512)]
        slowed = Slowdown([LARGEST, *probes])
        assert [slowed.compute_final_heat([chunks(n)]) for n in (128, 512)] == [0, 1]

    @pytest.mark.parametrize(
        "probes",
        [[], [HotStep(DECODES, 1.004), HotStep(DECODES, 1.004, before=512)]],
        ids=["older-files", "noise"],
    )
    def test_where_nothing_tells_it_goes_by_tokens(self, probes: list[HotStep]):
        slowed = Slowdown([LARGEST, *probes])
        assert [slowed.compute_final_heat([chunks(n)]) for n in (512, 1024, 2048)] == [0.25, 0.5, 1]


class TestHowSoonItGoes:
    @pytest.mark.parametrize("settle_s", [0.01, 0.03, 0.2])
    def test_steps_that_follow_each_other_tell(self, settle_s: float):
        train = [HotStep(DECODES, 1 + 0.08 * math.exp(-s / settle_s), since_s=s) for s in (0.0, 0.02, 0.04, 0.06)]
        assert Slowdown([LARGEST, *train]).settle_s == pytest.approx(settle_s, rel=0.03)

    def test_a_step_that_is_hardly_slower_tells_nothing(self):
        train = [HotStep(DECODES, 1.004), HotStep(DECODES, 1.003, since_s=0.02)]
        assert Slowdown([LARGEST, *train]).settle_s == HEAT_S


class TestHeat:
    def test_it_is_none_among_decodes_and_whole_after_long_chunks(self):
        heat = Heat(0.1)
        heat.add_step(1.0, 0.0)
        assert heat.compute_share(1.0) == 0
        heat.add_step(1.0, 1.0)
        assert heat.compute_share(2.0) == pytest.approx(1, abs=1e-3)

    def test_it_comes_and_goes_by_the_same_time(self):
        heat = Heat(0.1)
        heat.add_step(0.1, 0.5)
        assert heat.compute_share(0.1) == pytest.approx(0.5 * (1 - math.exp(-1)))
        heat.add_step(0.1, 0.0)
        assert heat.compute_share(0.2) == pytest.approx(0.5 * (1 - math.exp(-1)) * math.exp(-1))

    def test_it_goes_while_the_device_has_nothing_to_do(self):
        heat = Heat(0.1)
        heat.add_step(1.0, 1.0)
        assert heat.compute_share(1.1) == pytest.approx(math.exp(-1), rel=1e-3)

    def test_no_step_begins_before_the_one_in_front_of_it_ends(self):
        """Rounding may say so; then no time passes backwards."""
        heat = Heat(0.1)
        heat.add_step(0.1, 1.0)
        before = heat.share
        heat.compute_share(0.1 - 1e-9)
        assert heat.share == before

    def test_time_between_two_steps_is_counted_once(self):
        """A step that seems to begin at 0.05 s, before the one in front of it ends at 0.1, moves nothing back: until 0.2 s
        a tenth of a second passes, not 0.15.
        """
        heat = Heat(0.1)
        heat.add_step(0.1, 1.0)
        before = heat.share
        heat.compute_share(0.05)
        assert heat.compute_share(0.2) == pytest.approx(before * math.exp(-1))


def hot(case: Case, times: float) -> MeasuredCase:
    return MeasuredCase(case=case, samples_ms=[times * true_ms(case.compute_work())])


def with_hot(*cases: MeasuredCase) -> StepTimes:
    cool = step_times()
    return msgspec.structs.replace(cool, cases=[*cool.cases, *cases])


class TestDurations:
    def test_a_hot_step_takes_as_much_longer_as_its_cases_did(self):
        """All hot cases took a tenth longer: so does any step at full heat, half of that at half."""
        times = with_hot(*(hot(run.case, 1.1) for run in RUNS))
        step = Step(0, [replica([4999] * 8)])
        assert times.predict_duration_ms(step, 1.0) == pytest.approx(1.1 * ms(replica([4999] * 8)))
        assert times.predict_duration_ms(step, 0.5) == pytest.approx(1.05 * ms(replica([4999] * 8)))
        assert times.predict_duration_ms(step) == ms(replica([4999] * 8))

    def test_a_replay_is_slower_behind_chunks_and_then_as_ever(self):
        """
        A prompt of 5,000 tokens and 40 decodes. The first takes a tenth longer and the next one e^(-41.4 / 40) of that, by
        files of which no case tells how soon heat goes; the last ones take as long as without hot cases.
        """
        setup = config(pages=9000, max_requests=48, chunk=8192, max_context=9000)
        found = []
        for times in (step_times(), with_hot(*(hot(run.case, 1.1) for run in RUNS))):
            traffic = replay_requests([request(0, 5000, 41)], Scheduler(setup), 1, times).traffic
            at = traffic.samples[0].token_s
            found.append([b - a for a, b in itertools.pairwise(at)])
        cool, slow = found
        more = [b / a - 1 for a, b in zip(cool, slow, strict=True)]
        assert more[0] == pytest.approx(0.1, rel=1e-3)
        assert more[1] == pytest.approx(0.1 * math.exp(-slow[0] / HEAT_S), rel=1e-3)
        assert more[-1] == pytest.approx(0, abs=1e-4)

    def test_a_file_tells_what_chunks_leave_and_how_soon_it_goes(self):
        """A case of 8 rows takes 51 ms, 10 % more behind the largest chunks, half of it a step later, and half behind 512 tokens."""
        probe = Case(decodes=(Decodes(8, 256),), use=HOT)
        later, behind = (
            msgspec.structs.replace(probe, **more) for more in ({"since": 1}, {"after": (Chunks(1, 512, 0),)})
        )
        largest = msgspec.structs.replace(find_fullest(make_cases(EXTENT)), use=HOT)
        slowed = with_hot(hot(largest, 1.1), hot(probe, 1.1), hot(later, 1.05), hot(behind, 1.05)).slowdown
        assert slowed.compute_final_heat([chunks(512)]) == pytest.approx(0.5)
        assert slowed.settle_s == pytest.approx(true_ms(probe.compute_work()) / 1e3 / math.log(2), rel=0.03)


RUNS = make_hot_runs(EXTENT, find_fullest(make_cases(EXTENT)))


class TestCases:
    def test_hot_cases_are_cases_of_the_lines(self):
        """Only heat tells the two times of a case from each other."""
        lines = {msgspec.structs.replace(case, use=HOT) for case in make_cases(EXTENT)}
        assert {msgspec.structs.replace(run.case, after=()) for run in RUNS} <= lines

    def test_a_run_has_a_case_for_each_step_behind_its_chunks(self):
        run = HotRun(Case(decodes=(Decodes(4, 9),), use=HOT), Case(chunks=(Chunks(1, 8, 0),)), times=3)
        assert [case.since for case in run.cases] == [0, 1, 2]
        assert {msgspec.structs.replace(case, since=0) for case in run.cases} == {run.case}

    def test_few_and_some_rows_follow_each_other_and_the_fewest_are_behind_smaller_chunks_too(self):
        """1, 24 and 48 rows, and 512, 2,048 and 8,192 tokens: the middle by ratio."""
        behind = [run for run in RUNS if not run.case.after]
        rows = [(run.case.decodes[0].requests, run.times) for run in behind if run.case.decodes]
        assert [count for _, count in rows] == [TRAIN, TRAIN, 1]
        assert rows[0][0] == 1
        assert rows[-1][0] == 48
        assert [run.case.compute_work().tokens for run in behind if run.case.chunks] == [512, 2048, 8192]
        probes = [run for run in RUNS if run.case.after]
        assert [run.before.compute_work().tokens for run in probes] == [128, 512, 2048]
        assert {run.case.decodes for run in probes} == {behind[0].case.decodes}
        assert all(run.case.after == run.before.chunks for run in probes)

    def test_one_row_alone_tells_how_soon_heat_goes(self):
        alone = dataclasses.replace(EXTENT, requests=1, targets=(1,))
        runs = make_hot_runs(alone, find_fullest(make_cases(alone)))
        assert [run.times for run in runs if run.case.decodes and not run.case.after] == [TRAIN]

    def test_none_has_more_tokens_than_the_largest_that_are_quick_enough(self):
        largest = find_fullest(case for case in make_cases(EXTENT) if case.compute_work().tokens <= 1024)
        runs = make_hot_runs(EXTENT, largest)
        assert {run.before.compute_work().tokens for run in runs if not run.case.after} == {1024}
        assert max(run.case.compute_work().tokens for run in runs) == 1024

    def test_the_largest_chunks_of_a_grid_have_no_prefix(self):
        work = find_fullest(make_cases(EXTENT)).compute_work()
        assert (work.rows, work.tokens, work.prefix) == (0, 8192, 0)
        assert [is_bare(case) for case in (Case(chunks=(Chunks(1, 8, 4),)), Case(chunks=(Chunks(1, 8, 0),)))] == [
            False,
            True,
        ]
