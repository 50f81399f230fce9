"""Test functions that are timed in turns, with a simulated clock."""

import itertools

from dcpbench.measuring.timing import measure_chunks, measure_in_turns
from dcpbench.records.stats import StopRule

RULE = StopRule(precision=0.05, seconds=1.0)


def make_chunk_function(name, log, samples):
    """Return a function that takes samples from an endless supply, a tenth of a second for each chunk."""

    def chunk(steps):
        log.append(name)
        return list(itertools.islice(samples, steps)), 0.1

    return chunk


def test_functions_take_turns_until_the_last_is_precise():
    """Measure a precise function as long as a noisy one, so that all run at the same clocks."""
    log = []
    calm, wild = (
        make_chunk_function(name, log, itertools.cycle(of)) for name, of in (("calm", [1.0]), ("wild", [1.0, 9.0]))
    )
    first, second = measure_in_turns([calm, wild], RULE)
    rounds = list(zip(log[::2], log[1::2], strict=True))
    assert {frozenset(one) for one in rounds} == {frozenset({"calm", "wild"})}
    assert set(rounds) == {("calm", "wild"), ("wild", "calm")}  # no function always follows the same one
    assert len(first.samples_ms) == len(second.samples_ms)
    assert set(first.samples_ms) == {1.0}
    assert (first.noisy, second.noisy) == (False, True)


def test_precise_functions_are_measured_in_as_many_orders_as_time_allows():
    """Expect eight rounds of a tenth of a second each unless there is less time; the first round measures the length
    of a step.
    """
    for seconds, rounds in ((10.0, 8), (0.3, 3)):
        log = []
        calm, other = (make_chunk_function(name, log, itertools.repeat(1.0)) for name in ("calm", "other"))
        found = measure_in_turns([calm, other], StopRule(precision=0.05, seconds=seconds))
        steps = 100
        assert [len(timing.samples_ms) for timing in found] == [rounds * steps] * 2
        assert not any(timing.noisy for timing in found)


def test_single_function_is_measured_until_it_is_precise():
    """Expect two chunks to settle, after the one that measures the length of a step."""
    log = []
    found = measure_chunks(make_chunk_function("one", log, itertools.repeat(2.0)), RULE)
    assert not found.noisy
    assert not found.unsettled
    assert log == ["one"] * (3 + len(found.samples_ms) // 100)


def test_warm_up_that_never_settles_ends_after_half_of_the_time():
    log = []
    growing = (2.0 ** (i // 100) for i in itertools.count())
    found = measure_chunks(make_chunk_function("one", log, growing), RULE)
    assert found.unsettled
