"""Warm-up and stop rule of `measure_steps`, with chunks of given samples instead of clocks."""

import itertools

import pytest
import torch

from dcpbench.measuring import timing
from dcpbench.measuring.timing import Timer, Timing, measure_steps
from dcpbench.points.settings import Settings
from dcpbench.records.stats import MIN_EFFECTIVE, compute_median_interval

CPU = torch.device("cpu")


@pytest.fixture
def chunks(monkeypatch):
    """Return a `measure_steps` in which chunk i has samples around `medians[i]` (the last one repeats) and takes
    `seconds`.
    """

    def run(medians, *, seconds=0.1, spread=0.0, settings=None):
        sizes = []
        endless = itertools.chain(medians, itertools.repeat(medians[-1]))

        def chunk(_timer, steps):
            sizes.append(steps)
            middle = next(endless)
            return [middle * (1 + spread * (2 * i / (steps - 1) - 1)) for i in range(steps)], seconds

        monkeypatch.setattr(Timer, "measure_chunk", chunk)
        return measure_steps(lambda: None, CPU, settings or Settings(seconds=10.0)), sizes

    return run


class TestWarmUp:
    def test_warm_up_ends_when_two_medians_agree_within_1_percent(self, chunks):
        """With steps of 40 ms, 0.4 s are 10 per chunk. 50 → 44 → 40 → 40.3 settles: (40.3 − 40) / 40 = 0.75 %. The
        first chunk of 5 only sets the size; three warm-up chunks follow before the fourth settles, and then 20 samples
        in two chunks are measured.
        """
        timing, sizes = chunks([40, 50, 44, 40, 40.3, 41])
        assert sizes == [5, 10, 10, 10, 10, 10, 10]
        assert timing == Timing(samples_ms=[41] * 20, noisy=False, unsettled=False)

    def test_warm_up_that_never_settles_ends_at_half_the_time_limit(self, chunks):
        """Each chunk takes 1 s of 10 s and each median is 2 % above the last: 1 chunk for the size and 4 warm-up chunks
        are 5 s.
        """
        medians = [40 * 1.02**i for i in range(5)]
        timing, sizes = chunks([*medians, 50], seconds=1.0)
        assert sizes == [5] + [10] * 4 + [10] * 2
        assert timing.samples_ms == [50] * 20
        assert timing.unsettled
        assert not timing.noisy, "the measured samples are precise"


class TestStopRule:
    def test_measuring_continues_until_the_interval_is_narrow(self, chunks):
        """Chunks have ten 39s, ten 41s and then 40s; 1 % of the median 40 is 0.4. Of 40 samples the 11th to the 30th
        are 40, and independent samples would need the 14th to the 27th. Equal neighbours count less: the end of the
        interval is 39 until there are 100 samples.
        """
        timing, _ = chunks([40, 40, 40, 39, 41, 40])
        assert not timing.noisy
        assert timing.samples_ms == [39] * 10 + [41] * 10 + [40] * 80
        ends = [compute_median_interval(timing.samples_ms[:n]) for n in (90, 100)]
        assert [(end.low, end.high) for end in ends] == [(39, 41), (40, 40)]

    def test_at_least_20_samples_are_measured(self, chunks):
        """Measuring continues even if 5 samples of a step of 1 s take 5 s of a limit of 2 s and all agree."""
        timing, sizes = chunks([1000], seconds=5.0, settings=Settings(seconds=2.0))
        assert sizes == [5] * 7, "one chunk for the size, two of warm-up, and 4 · 5 = 20 measured samples"
        assert len(timing.samples_ms) == 20
        assert not timing.unsettled

    def test_time_limit_ends_a_wide_interval_and_marks_it_noisy(self, chunks):
        """±30 % around 40 ms in chunks of 10 that take 0.25 s; warm-up settles, and 2 s are 8 chunks."""
        timing, sizes = chunks([40], seconds=0.25, spread=0.3, settings=Settings(seconds=2.0))
        assert sizes == [5] + [10] * 2 + [10] * 8
        assert (timing.noisy, timing.unsettled) == (True, False)
        assert len(timing.samples_ms) == 80

    def test_requested_precision_decides_the_number_of_samples(self, chunks):
        """The same ±30 % rise within each chunk: 20 samples are worth fewer than six, and 30 are enough."""
        timing, _ = chunks([40], spread=0.3, settings=Settings(seconds=1.0, precision=0.5))
        assert not timing.noisy
        assert len(timing.samples_ms) == 30
        worth = [compute_median_interval(timing.samples_ms[:n]).effective_samples for n in (20, 30)]
        assert worth[0] < MIN_EFFECTIVE <= worth[1]


def test_drift_is_the_difference_of_the_medians_of_both_halves():
    """Halves 10 10 10 and 12 11 11: (11 − 10) / 10. A step that becomes faster drifts as much as one that becomes
    slower.
    """
    samples = [10.0, 10.0, 10.0, 12.0, 11.0, 11.0]
    assert Timing(samples_ms=samples, noisy=False, unsettled=False).drift == pytest.approx(0.1)
    falling = [11.0, 11.0, 12.0, 10.0, 10.0, 10.0]
    assert Timing(samples_ms=falling, noisy=False, unsettled=False).drift == pytest.approx(1 / 11)


def test_heartbeat_is_recorded_after_each_chunk(monkeypatch):
    """There are a chunk for the size, two of warm-up, and one measured with 50 steps of 8 ms; the last three are
    reported.
    """
    monkeypatch.setattr(Timer, "measure_chunk", lambda _timer, steps: ([8.0] * steps, 0.4))
    heartbeats = []
    timing = measure_steps(lambda: None, CPU, Settings(), lambda: heartbeats.append(1))
    assert len(timing.samples_ms) == 50
    assert len(heartbeats) == 3


@pytest.mark.parametrize(("median_ms", "steps"), [(0.0, 100), (1, 100), (8, 50), (40, 10), (80, 5), (5000, 5)])
def test_chunk_takes_about_400_ms_within_5_to_100_steps(median_ms, steps):
    """400 / 8 = 50; a step without measurable time does not divide by zero."""
    assert timing._compute_steps_per_chunk(median_ms) == steps


def test_chunk_on_the_cpu_runs_and_times_every_step():
    """Seven steps give seven samples, and the chunk takes at least as long as they do."""
    ran = []
    samples, elapsed = Timer(lambda: ran.append(1), CPU).measure_chunk(7)
    assert (len(ran), len(samples)) == (7, 7)
    assert 0 <= sum(samples) <= elapsed * 1e3
