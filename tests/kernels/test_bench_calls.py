"""Test how calls are measured."""

from dcpbench.bench.operators import calls as measuring
from dcpbench.bench.operators.calls import Calls
from dcpbench.measuring.timing import Timing


def test_the_time_of_a_call_is_its_passes_divided_by_the_calls():
    """Passes of 4 calls take 2, 4 and 6 ms: calls take 0.5, 1 and 1.5 ms, in microseconds."""
    found = Timing(samples_ms=[2.0, 4.0, 6.0], noisy=True, unsettled=False)
    timing = measuring._convert_timing(found, 4)
    assert (timing.median_us, timing.low_us, timing.high_us, timing.max_us) == (1000, 500, 1500, 1500)
    assert timing.samples_us == [500, 1000, 1500]
    assert timing.noisy
    assert not timing.unsettled


def test_what_a_graph_holds_may_differ_from_what_runs_eagerly():
    done = []
    calls = Calls(
        calls=[lambda: done.append("eager")] * 2, check=lambda _: "", to_capture=[lambda: done.append("graph")]
    )
    calls.run()
    calls.run_captured()
    assert done == ["eager", "eager", "graph"]


def test_an_error_is_told_by_its_first_line():
    """CUDA's errors go on with advice about debugging."""
    assert (
        measuring.get_first_line(RuntimeError("CUDA error: not permitted\nCompile with …"))
        == "CUDA error: not permitted"
    )
    assert measuring.get_first_line(RuntimeError()) == "RuntimeError"
