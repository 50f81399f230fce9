"""How calls are measured: arithmetic anywhere; waiting, graphs and refused captures on a GPU."""

import subprocess
import sys

import pytest
import torch

from dcpbench.bench.operators import calls as measuring
from dcpbench.bench.operators.calls import Calls, count_syncs
from dcpbench.bench.operators.kv_write import KvWrite
from dcpbench.bench.record import BenchSettings, Case
from dcpbench.measuring.timing import Timing, capture_graph

QUICK = BenchSettings(seconds=0.05, backlog_us=50.0)
REFUSED_TWICE = """
import torch
from dcpbench.bench.record import Case
from dcpbench.bench.operators.calls import try_capture
from dcpbench.bench.operators.kv_write import KvWrite
workload = KvWrite(torch.device("cuda", 0), 0)
sizes = {"tokens": 16, "dcp": 2, "owned": 8, "dtype": "bf16"}
ready = [workload.build(Case(variant=v, sizes=sizes, calls=2)) for v in ("check-all", "filter")]
for calls in ready:
    assert calls.check(calls.run) == ""
for calls in ready:
    found = try_capture(calls)
    print(found.captured, found.reason, flush=True)
import os
os._exit(0)
"""


def case(variant: str, layers: int = 3) -> Case:
    """16 tokens, of which this rank of 2 owns 8."""
    return Case(variant=variant, sizes={"tokens": 16, "dcp": 2, "owned": 8, "dtype": "fp8"}, calls=layers)


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


def test_making_a_case_is_not_counted_only_its_calls_are():
    """Building it copies tensors to the device, which waits; a pass of the kernel does not."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    syncs = count_syncs(lambda on: KvWrite(on, 0).build_calls(case("masked-kernel")), device)
    assert syncs.per_call == 0
    assert syncs.sites == []


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "wait"), [("check-all", True), ("filter", True), ("masked-kernel", False)])
def test_a_variant_that_waits_is_known_before_anything_is_captured(variant, wait, device):
    before = torch.cuda.get_sync_debug_mode()
    assert measuring.has_stream_wait(KvWrite(device, 0).build_calls(case(variant)).run_captured) is wait
    assert torch.cuda.get_sync_debug_mode() == before


@pytest.mark.gpu
def test_the_masked_kernel_is_right_from_a_graph_and_timed_there(device):
    calls = KvWrite(device, 0).build_calls(case("masked-kernel"))
    assert calls.check(calls.run) == ""
    replay = capture_graph(calls.run_captured).replay
    assert calls.check(replay) == ""
    time, _ = measuring.measure_gpu_time(replay, len(calls.calls), device, QUICK)
    assert time.samples >= 20


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["check-all", "filter", "masked-kernel"])
def test_every_variant_is_timed_eagerly_and_on_the_host(variant, device):
    calls = KvWrite(device, 0).build_calls(case(variant))
    time, _ = measuring.measure_gpu_time(calls.run, len(calls.calls), device, QUICK)
    host = measuring.measure_host_time(calls, QUICK)
    for timing in (time, host):
        assert 0 < timing.low_us <= timing.median_us <= timing.high_us <= timing.max_us
        assert timing.samples >= 20


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "count"), [("check-all", 3), ("filter", 2), ("masked-kernel", 0)])
def test_the_live_detector_counts_what_was_measured_by_hand(variant, count, device):
    """Of 16 entries 8 are -1: check-all reads one value and filters twice, filter filters twice."""
    syncs = count_syncs(lambda on: KvWrite(on, 0).build_calls(case(variant)), device)
    assert syncs.detector == "live"
    assert syncs.per_call == count


@pytest.mark.gpu
def test_refused_captures_follow_each_other_and_say_why():
    """In a process of its own, which they leave unfit for anything else."""
    done = subprocess.run([sys.executable, "-c", REFUSED_TWICE], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["False", "False"], done.stderr
    assert all("captur" in line for line in lines)
