"""Limits of a machine: their units, and reasons for those that it does not have. No number is judged."""

import pytest
import torch

from dcpbench.bench.operators import limits
from dcpbench.records.record import Rates


@pytest.fixture
def small(monkeypatch):
    """Sizes that a CPU gets through in no time."""
    monkeypatch.setattr(limits, "BUFFER_BYTES", 4 * limits.BLOCK * 4)
    monkeypatch.setattr(limits, "SIDE", 32)
    monkeypatch.setattr(limits, "REST_S", 0.0)


@pytest.mark.usefixtures("small")
def test_one_rank_can_measure_its_own_memory_and_products(device):
    found, without = limits.measure_limits(("read", "copy", "matmul"), device)
    assert [(limit.name, limit.unit) for limit in found] == [("read", "B/s"), ("copy", "B/s"), ("matmul", "FLOP/s")]
    assert all(0 < limit.low <= limit.median <= limit.high for limit in found)
    assert without == []


@pytest.mark.usefixtures("small")
def test_one_rank_has_no_peer_and_the_others_are_measured_all_the_same(device):
    found, without = limits.measure_limits(("peer", "read", "barrier"), device)
    assert [limit.name for limit in found] == ["read"]
    assert without == [
        "peer: there is no peer to read from.",
        "barrier: there is no peer to read from.",
    ]


@pytest.mark.usefixtures("small")
def test_the_rates_of_a_job_are_these_limits_by_names_with_their_units(device):
    """One rank has nobody to read from, and is not asked."""
    rates = limits.measure_rates(device, ranks=1)
    assert set(rates.limits) == {"read", "copy", "matmul"}
    assert (rates.peer_bytes_s, rates.barrier_us, rates.without) == (None, None, [])


@pytest.mark.usefixtures("small")
def test_rates_between_ranks_that_cannot_read_each_other_are_left_out_with_their_reasons(device):
    rates = limits.measure_rates(device, ranks=2)
    assert set(rates.limits) == {"read", "copy", "matmul"}
    assert [reason.split(":")[0] for reason in rates.without] == ["peer", "barrier"]


@pytest.mark.gpu
def test_rates_of_a_gpu_leave_no_memory_taken():
    """What an engine plans with is what is free afterwards."""
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        rates = limits.measure_rates(device, ranks=1)
    assert rates.without == []
    assert rates.read_bytes_s > rates.copy_bytes_s / 2
    assert torch.cuda.memory_allocated(device) - before < 64 << 20, "no more than a workspace of the matrix product"


def test_a_barrier_is_recorded_in_microseconds_and_reckoned_in_seconds():
    assert Rates(barrier_us=2.5, peer_bytes_s=372e9).limits == pytest.approx({"barrier": 2.5e-6, "peer": 372e9})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("unit", "chosen"), [("B/s", 2000.0), ("s", 0.0005)])
def test_the_best_of_several_ways_is_the_limit(unit, chosen, monkeypatch):
    """Of 1 in 1 ms and 1 in 0.5 ms: 2,000 a second, or 0.5 ms for one."""

    class Clock:
        def __init__(self, step, _device) -> None:
            self.step = step

        def measure_chunk(self, steps):
            return [self.step()] * steps, 0.0

    monkeypatch.setattr(limits, "Timer", Clock)
    limit = limits.measure_best("x", unit, 1, [lambda: 1.0, lambda: 0.5], torch.device("cpu"))
    assert limit.median == chosen
