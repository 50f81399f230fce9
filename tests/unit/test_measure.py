"""Warm-up and stop rule of `measure_steps`, with chunks of made-up samples instead of clocks."""

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
    """`measure_steps` where chunk i consists of samples `medians[i]` (the last repeats) and takes `seconds`."""

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
    def test_it_ends_when_two_successive_medians_agree_within_1_percent(self, chunks):
        """40 ms steps, so 0.4 s are 10 a chunk. 50 → 44 → 40 → 40.3 settles: (40.3 − 40) / 40 = 0.75 %.

        The first chunk of 5 only sets the size; three warm-up chunks follow before the fourth settles it, and what is
        measured comes after: 20 samples in two chunks.
        """
        timing, sizes = chunks([40, 50, 44, 40, 40.3, 41])
        assert sizes == [5, 10, 10, 10, 10, 10, 10]
        assert timing == Timing(samples_ms=[41] * 20, noisy=False, unsettled=False)

    def test_one_that_never_settles_ends_at_half_the_time_limit_and_is_unsettled(self, chunks):
        """Each chunk takes 1 s of 10 s, each median is 2 % above the last: 1 sizing and 4 warm-up chunks are 5 s."""
        medians = [40 * 1.02**i for i in range(5)]
        timing, sizes = chunks([*medians, 50], seconds=1.0)
        assert sizes == [5] + [10] * 4 + [10] * 2
        assert timing.samples_ms == [50] * 20
        assert timing.unsettled
        assert not timing.noisy, "what was measured is precise"


class TestStopRule:
    def test_it_goes_on_until_the_interval_is_narrow(self, chunks):
        """Chunks of ten 39s, ten 41s and then 40s; 1 % of the median 40 is 0.4.

        Of 40 samples the 11th to the 30th are 40, which independent samples would need from the 14th to the 27th on. Equal
        neighbours are worth less: the end of the interval is 39 until 100 samples are there.
        """
        timing, _ = chunks([40, 40, 40, 39, 41, 40])
        assert not timing.noisy
        assert timing.samples_ms == [39] * 10 + [41] * 10 + [40] * 80
        ends = [compute_median_interval(timing.samples_ms[:n]) for n in (90, 100)]
        assert [(end.low, end.high) for end in ends] == [(39, 41), (40, 40)]

    def test_never_on_fewer_than_20_samples(self, chunks):
        """Measuring continues even when 5 samples of a 1 s step take 5 s of a limit of 2 s and all agree."""
        timing, sizes = chunks([1000], seconds=5.0, settings=Settings(seconds=2.0))
        assert sizes == [5] * 7, "one to size, two medians of warm-up however slow, and 4 · 5 = 20 measured"
        assert len(timing.samples_ms) == 20
        assert not timing.unsettled

    def test_the_time_limit_ends_what_stays_wide_and_marks_it(self, chunks):
        """±30 % around 40 ms in chunks of 10 that take 0.25 s; warm-up settles, and 2 s are 8 chunks."""
        timing, sizes = chunks([40], seconds=0.25, spread=0.3, settings=Settings(seconds=2.0))
        assert sizes == [5] + [10] * 2 + [10] * 8
        assert (timing.noisy, timing.unsettled) == (True, False)
        assert len(timing.samples_ms) == 80

    def test_the_precision_asked_for_decides(self, chunks):
        """The same ±30 %, rising within each chunk: 20 samples are worth fewer than six, and 30 are enough."""
        timing, _ = chunks([40], spread=0.3, settings=Settings(seconds=1.0, precision=0.5))
        assert not timing.noisy
        assert len(timing.samples_ms) == 30
        worth = [compute_median_interval(timing.samples_ms[:n]).effective_samples for n in (20, 30)]
        assert worth[0] < MIN_EFFECTIVE <= worth[1]


def test_drift_is_how_far_the_halves_medians_lie_apart():
    """Halves 10 10 10 and 12 11 11: (11 − 10) / 10. A step that grows faster drifts as much as one that slows down."""
    samples = [10.0, 10.0, 10.0, 12.0, 11.0, 11.0]
    assert Timing(samples_ms=samples, noisy=False, unsettled=False).drift == pytest.approx(0.1)
    falling = [11.0, 11.0, 12.0, 10.0, 10.0, 10.0]
    assert Timing(samples_ms=falling, noisy=False, unsettled=False).drift == pytest.approx(1 / 11)


def test_whoever_watches_for_a_hang_hears_of_every_chunk(monkeypatch):
    """Sizing chunk, two of warm-up, one measured with 50 steps of 8 ms: the last three are told."""
    monkeypatch.setattr(Timer, "measure_chunk", lambda _timer, steps: ([8.0] * steps, 0.4))
    signs = []
    timing = measure_steps(lambda: None, CPU, Settings(), lambda: signs.append(1))
    assert len(timing.samples_ms) == 50
    assert len(signs) == 3


@pytest.mark.parametrize(("median_ms", "steps"), [(0.0, 100), (1, 100), (8, 50), (40, 10), (80, 5), (5000, 5)])
def test_a_chunk_lasts_about_400_ms_within_5_to_100_steps(median_ms, steps):
    """400 / 8 = 50; a step that takes no measurable time divides by nothing."""
    assert timing._compute_steps_per_chunk(median_ms) == steps


def test_a_chunk_on_the_cpu_runs_and_times_every_step():
    """Seven steps, seven samples, and the chunk lasts at least as long as they do."""
    ran = []
    samples, elapsed = Timer(lambda: ran.append(1), CPU).measure_chunk(7)
    assert (len(ran), len(samples)) == (7, 7)
    assert 0 <= sum(samples) <= elapsed * 1e3
