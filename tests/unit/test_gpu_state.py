"""Sampling of NVML during a measurement, and values derived from it."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.measuring import gpu_state
from dcpbench.measuring.gpu_state import ENERGY, GpuSampler, merge_states
from dcpbench.points.layout import Layout
from dcpbench.recommend.answer_formats import _format_energy
from dcpbench.recommend.forecast import from_record
from dcpbench.records.metrics import METRIC
from dcpbench.records.record import Gpu
from dcpbench.show.numbers import format_number
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_sampler(monkeypatch: pytest.MonkeyPatch, counter: Sequence[tuple[float, int]]) -> GpuSampler:
    """Return a sampler with these values of the energy counter: (seconds, mJ)."""
    sampler = GpuSampler(None)
    sampler.seen[ENERGY] = []
    for at, energy in counter:
        monkeypatch.setattr(gpu_state, "time", SimpleNamespace(perf_counter=lambda at=at: at))
        sampler._record_value(ENERGY, energy)
    return sampler


def test_power_is_the_increase_between_changes_of_the_energy_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter is constant between updates: from its change at 0.2 s to that at 1.2 s it rises by 600 J."""
    counter = [(0.0, 5000), (0.1, 5000), (0.2, 65_000), (0.3, 65_000), (0.7, 365_000), (1.2, 665_000), (1.3, 665_000)]
    assert make_sampler(monkeypatch, counter).compute_power_w() == pytest.approx(600.0)


@pytest.mark.parametrize(
    "counter",
    [
        pytest.param([], id="no counter"),
        pytest.param([(0.0, 5000), (9.0, 5000)], id="constant counter"),
        pytest.param([(0.0, 5000), (0.5, 65_000)], id="single change"),
        pytest.param([(0.0, 5000), (0.1, 65_000), (0.2, 125_000)], id="short time"),
    ],
)
def test_power_is_unknown_without_two_distant_changes_of_the_counter(
    counter: Sequence[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_sampler(monkeypatch, counter).compute_power_w() is None


def test_sampler_thread_reads_energy_counter_and_other_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake GPU takes 500 W, and its counter is always up to date."""
    monkeypatch.setattr(gpu_state, "PERIOD_S", 0.01)
    queries = {"clock": lambda: 1980, "power": lambda: 500_000, "temperature": lambda: 60, "reasons": lambda: 0}
    queries[ENERGY] = lambda: round(time.perf_counter() * 500_000)
    monkeypatch.setattr(gpu_state, "_make_queries", lambda _: queries)
    with GpuSampler("GPU-0") as sampler:
        time.sleep(0.5)
    state = sampler.get_state()
    assert state is not None
    assert state.power_w_all == pytest.approx(500.0, rel=0.05)
    assert state.power_w_max == 500.0


def test_total_power_is_a_sum_and_unknown_if_one_gpu_has_none() -> None:
    two = [Gpu(power_w_max=700.0, power_w_all=650.0), Gpu(power_w_max=690.0, power_w_all=600.0)]
    assert (found := merge_states(two)) is not None
    assert (found.power_w_all, found.power_w_max) == (1250.0, 700.0)
    for silent in (Gpu(power_w_max=690.0), None):
        assert (found := merge_states([two[0], silent])) is not None
        assert found.power_w_all is None


def test_joules_per_token_are_total_power_over_output() -> None:
    """At 100 tok/s, 2,000 W are 20 J; an emulated rank does not know the power of the others."""
    record = build.make_ok_record(build.make_point(Layout(4)), median_ms=80.0)
    record = msgspec.structs.replace(record, gpu=Gpu(power_w_all=2000.0))
    joules = METRIC["joules_per_token"]
    assert record.metrics is not None
    assert joules.get_value(record) == pytest.approx(2000.0 / record.metrics.output_tok_s.median)
    alone = msgspec.structs.replace(record, point=msgspec.structs.replace(record.point, emulate="H200"))
    assert joules.get_value(alone) is None
    assert joules.get_value(msgspec.structs.replace(record, gpu=None)) is None


def test_recommendation_states_energy_of_records_that_have_it() -> None:
    """The lowest of each load comes first; layouts without a measurement are left out."""
    record = build.make_ok_record(build.make_point(Layout(4)), median_ms=80.0)
    thrifty, plain, silent = (
        from_record(msgspec.structs.replace(record, gpu=gpu), "run")
        for gpu in (Gpu(power_w_all=1000.0), Gpu(power_w_all=2000.0), None)
    )
    text = _format_energy([SimpleNamespace(name="8 × 4,000 tokens", forecasts=[plain, silent, thrifty])])  # type: ignore[list-item]
    assert text.index(format_number(thrifty.joules_per_token)) < text.index(format_number(plain.joules_per_token))
    assert text.count("tp4") == 2
    assert text.endswith("at 8 × 4,000 tokens. The energy of the other layouts is unknown.")
    assert _format_energy([]) == "Energy per token is unknown: no given record contains energy readings of NVML."


class FakeNvml:
    """A stand-in for pynvml with four GPUs."""

    class NVMLError(Exception):
        """The error class of NVML."""

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < 4:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        index = uuid.decode().removeprefix("GPU-")
        return self.nvmlDeviceGetHandleByIndex(int(index) if index.isdecimal() else -1)

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def nvmlDeviceGetName(self, _: int) -> bytes:
        return b"NVIDIA H200"

    nvmlMemory_v2 = 0x2000028  # noqa: N815 -- NVML's name

    def nvmlDeviceGetMemoryInfo(self, gpu: int, version: int) -> SimpleNamespace:
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(total=142 * 10**9 + gpu, reserved=10**9)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetClockInfo(self, gpu: int, _: int) -> int:
        return 1980 - 100 * gpu

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 600_000 + gpu

    def nvmlDeviceGetTotalEnergyConsumption(self, _: int) -> int:
        return round(time.perf_counter() * 100_000)

    def nvmlDeviceGetTemperature(self, gpu: int, _: int) -> int:
        return 60 + gpu

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return 4 if gpu == 1 else 0


@pytest.mark.parametrize(
    ("visible", "count", "uuids"),
    [
        (None, 2, ("GPU-0", "GPU-1")),
        ("2,3", 2, ("GPU-2", "GPU-3")),
        ("GPU-3, 1", 2, ("GPU-3", "GPU-1")),
        ("3,9,1", 1, ("GPU-3",)),
        ("3,9,1", 2, None),
        ("", 1, None),
        (None, 5, None),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_use(
    visible: str | None, count: int, uuids: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA ignores entries after an invalid one; fewer GPUs than a layout needs are unknown."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpu_state.find_visible_gpus(count)
    assert (found and found.uuids) == uuids
    if found:
        assert (found.name, found.driver) == ("NVIDIA H200", "580.159.04")
        assert found.memory_bytes == 141 * 10**9 + min(int(uuid[-1]) for uuid in found.uuids)


def test_several_gpus_are_sampled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GPU has the lower clock and is limited by power."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    with gpu_state.sample_gpus(["GPU-0", "GPU-1"]) as get_state:
        time.sleep(0.2)
        state = get_state()
    assert state is not None
    assert (state.sm_clock_mhz_min, state.sm_clock_mhz_max, state.temperature_c_max) == (1880, 1980, 61)
    assert state.throttle_reasons == ["sw_power_cap"]


def test_no_state_is_sampled_without_gpus() -> None:
    with gpu_state.sample_gpus([]) as get_state:
        assert get_state() is None
