"""Test the measurement of calls."""

from dcpbench.bench.operators import calls as measuring
from dcpbench.bench.operators.calls import Calls
from dcpbench.measuring.timing import Timing


def test_time_of_a_call_is_the_time_of_a_pass_divided_by_its_calls():
    """Convert passes of 4 calls that take 2, 4 and 6 ms into calls of 500, 1000 and 1500 µs."""
    found = Timing(samples_ms=[2.0, 4.0, 6.0], noisy=True, unsettled=False)
    timing = measuring._convert_timing(found, 4)
    assert (timing.median_us, timing.low_us, timing.high_us, timing.max_us) == (1000, 500, 1500, 1500)
    assert timing.samples_us == [500, 1000, 1500]
    assert timing.noisy
    assert not timing.unsettled


def test_captured_calls_may_differ_from_eager_calls():
    done = []
    calls = Calls(
        calls=[lambda: done.append("eager")] * 2, check=lambda _: "", to_capture=[lambda: done.append("graph")]
    )
    calls.run()
    calls.run_captured()
    assert done == ["eager", "eager", "graph"]


def test_error_message_is_its_first_line():
    """Drop the advice about debugging that follows CUDA's errors."""
    assert (
        measuring.get_first_line(RuntimeError("CUDA error: not permitted\nCompile with …"))
        == "CUDA error: not permitted"
    )
    assert measuring.get_first_line(RuntimeError()) == "RuntimeError"
