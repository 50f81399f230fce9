"""Test the measured limits of a machine: their units, and the reasons for missing ones. No value is compared."""

import pytest
import torch

from dcpbench.bench.operators import limits
from dcpbench.records.record import Rates


@pytest.fixture
def small_sizes(monkeypatch):
    """Reduce sizes so that measuring on a CPU is quick."""
    monkeypatch.setattr(limits, "BUFFER_BYTES", 4 * limits.BLOCK * 4)
    monkeypatch.setattr(limits, "SIDE", 32)
    monkeypatch.setattr(limits, "PAUSE_S", 0.0)


@pytest.mark.usefixtures("small_sizes")
def test_one_rank_measures_memory_and_matrix_products(device):
    found, without = limits.measure_limits(("read", "copy", "matmul"), device)
    assert [(limit.name, limit.unit) for limit in found] == [("read", "B/s"), ("copy", "B/s"), ("matmul", "FLOP/s")]
    assert all(0 < limit.low <= limit.median <= limit.high for limit in found)
    assert without == []


@pytest.mark.usefixtures("small_sizes")
def test_one_rank_skips_peer_limits_and_measures_the_others(device):
    found, without = limits.measure_limits(("peer", "read", "barrier"), device)
    assert [limit.name for limit in found] == ["read"]
    assert without == [
        "peer: there is no peer to read from.",
        "barrier: there is no peer to read from.",
    ]


@pytest.mark.usefixtures("small_sizes")
def test_rates_of_one_rank_have_no_peer_limits_and_no_reasons(device):
    """Skip peer limits without a reason, because one rank has no peer."""
    rates = limits.measure_rates(device, ranks=1)
    assert set(rates.limits) == {"read", "copy", "matmul"}
    assert (rates.peer_bytes_s, rates.barrier_us, rates.unmeasured) == (None, None, [])


@pytest.mark.usefixtures("small_sizes")
def test_rates_without_peer_access_are_left_out_with_reasons(device):
    rates = limits.measure_rates(device, ranks=2)
    assert set(rates.limits) == {"read", "copy", "matmul"}
    assert [reason.split(":")[0] for reason in rates.unmeasured] == ["peer", "barrier"]


@pytest.mark.gpu
def test_measuring_rates_on_a_gpu_frees_its_memory():
    """Check the memory, because an engine plans with what is free afterwards."""
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        rates = limits.measure_rates(device, ranks=1)
    assert rates.unmeasured == []
    assert rates.read_bytes_s > rates.copy_bytes_s / 2
    assert torch.cuda.memory_allocated(device) - before < 64 << 20, "no more than a workspace of the matrix product"


def test_barrier_is_recorded_in_microseconds_and_returned_in_seconds():
    assert Rates(barrier_us=2.5, peer_bytes_s=372e9).limits == pytest.approx({"barrier": 2.5e-6, "peer": 372e9})


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(("unit", "chosen"), [("B/s", 2000.0), ("s", 0.0005)])
def test_limit_is_the_best_of_several_methods(unit, chosen, monkeypatch):
    """Measure 1 in 1 ms and 1 in 0.5 ms: 2,000 a second, or 0.5 ms for one."""

    class Clock:
        def __init__(self, step, _device) -> None:
            self.step = step

        def measure_chunk(self, steps):
            return [self.step()] * steps, 0.0

    monkeypatch.setattr(limits, "Timer", Clock)
    limit = limits.measure_best("x", unit, 1, [lambda: 1.0, lambda: 0.5], torch.device("cpu"))
    assert limit.median == chosen
