"""What a GPU that is limited by power does to step times: steps among chunks take longer than those among decodes."""

import msgspec
import pytest

from dcpbench.serving.requests import Step
from dcpbench.serving.step_cases import fullest, grid, hot_cases
from dcpbench.serving.step_model import COOL, HEAT_S, Heat, Slowed, Work
from dcpbench.serving.step_times import HOT, Measured
from tests.unit.step_times_builder import EXTENT, step_times, true_ms
from tests.unit.test_step_times import ms, replica

DECODES, CHUNKS = Work.of(8, 8000, []), Work.of(0, 0, [(2048, 0)])


class TestSlowed:
    def test_without_hot_cases_nothing_is_slower(self):
        assert Slowed([])([DECODES]) == 1

    def test_it_is_interpolated_between_rows_and_stays_past_them(self):
        """5 % at 4 decode rows, 1 % at 16: 3 % at 10 rows run as 12, which is two thirds of the way."""
        slowed = Slowed([(Work.of(4, 1, []), 1.05), (Work.of(16, 1, []), 1.01)])
        at = [slowed([Work.of(n, 1, [])]) for n in (1, 4, 12, 16, 100)]
        assert at == pytest.approx([1.05, 1.05, 1.05 - 0.04 * 8 / 12, 1.01, 1.01])

    def test_steps_with_chunks_have_a_line_of_their_own(self):
        slowed = Slowed([(DECODES, 1.02), (CHUNKS, 1.1)])
        assert (slowed([DECODES]), slowed([CHUNKS]), slowed([DECODES, CHUNKS])) == (1.02, 1.1, 1.1)

    def test_noise_makes_nothing_faster(self):
        assert Slowed([(DECODES, 0.98)])([DECODES]) == 1


class TestHeat:
    def test_it_is_none_among_decodes_and_whole_after_long_chunks(self):
        heat = Heat()
        heat.ran(10 * HEAT_S, chunks=False)
        assert heat.at(10 * HEAT_S) == 0
        heat.ran(10 * HEAT_S, chunks=True)
        assert heat.at(20 * HEAT_S) == pytest.approx(1, abs=1e-3)

    def test_what_a_cool_case_has_is_none(self):
        """As many ms of chunks as of decodes, in small pieces."""
        heat = Heat()
        for piece in range(4000):
            heat.ran(HEAT_S / 100, chunks=piece % 2 == 0)
        assert heat.share == pytest.approx(COOL, abs=0.01)
        assert heat.at(40 * HEAT_S) == pytest.approx(0, abs=0.01)

    def test_it_goes_while_the_device_has_nothing_to_do(self):
        heat = Heat()
        heat.ran(10 * HEAT_S, chunks=True)
        assert heat.at(11 * HEAT_S) == 0

    def test_no_step_begins_before_the_one_in_front_of_it_ends(self):
        """Rounding may say so; then no time passes backwards."""
        heat = Heat()
        heat.ran(HEAT_S, chunks=True)
        before = heat.share
        heat.at(HEAT_S - 1e-9)
        assert heat.share == before


class TestDurations:
    def test_a_hot_step_takes_as_much_longer_as_its_cases_did(self):
        """All hot cases took a tenth longer: so does any step at full heat, half of that at half."""
        hot = [Measured(case=case, samples_ms=[1.1 * true_ms(case.work())]) for case in hot_cases(EXTENT)]
        times = step_times()
        times = msgspec.structs.replace(times, cases=[*times.cases, *hot])
        step = Step(0, [replica([4999] * 8)])
        assert times.duration_ms(step, 1.0) == pytest.approx(1.1 * ms(replica([4999] * 8)))
        assert times.duration_ms(step, 0.5) == pytest.approx(1.05 * ms(replica([4999] * 8)))
        assert times.duration_ms(step) == ms(replica([4999] * 8))

    def test_hot_cases_are_cases_of_the_lines(self):
        """So that only heat tells the two times of one from each other."""
        lines = {msgspec.structs.replace(case, use=HOT) for case in grid(EXTENT)}
        assert hot_cases(EXTENT)
        assert set(hot_cases(EXTENT)) <= lines

    def test_the_largest_chunks_of_a_grid_have_no_prefix(self):
        work = fullest(grid(EXTENT)).work()
        assert (work.rows, work.tokens, work.prefix) == (0, 8192, 0)
