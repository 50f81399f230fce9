"""Clocks, power, energy, temperature and throttling of this rank's GPU while something is measured (NVML)."""

from __future__ import annotations

import functools
import operator
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import torch

from dcpbench.records.record import Gpu, decode_throttle_reasons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PERIOD_S = 0.05
MIN_POWER_INTERVAL_S = 0.25
"""Minimum time in s between two changes of the energy counter, updated every 20 to 100 ms, to compute the mean power.
"""
ENERGY = "energy"
MAXIMA = ("sm_clock_mhz_max", "power_w_max", "temperature_c_max")
"""Fields for which the maximum over all ranks is kept; for the lowest clock it is the minimum."""


class GpuSampler:
    """Context manager that samples the GPU in a thread; read `get_state()` afterwards. Values that NVML lacks are absent."""

    def __init__(self, device: torch.device) -> None:
        self.queries = _make_queries(device)
        self.seen: dict[str, list[int]] = {name: [] for name in self.queries}
        self.energy: list[tuple[float, int]] = []
        """(seconds, mJ since the driver was loaded) at each change of the counter."""
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample_loop, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _sample_loop(self) -> None:
        while self.queries and not self.stop.is_set():
            for name, query in list(self.queries.items()):
                try:
                    self._record_value(name, query())
                except Exception:  # noqa: BLE001 - a quantity that this GPU does not report is not known
                    del self.queries[name]
            self.stop.wait(PERIOD_S)

    def _record_value(self, name: str, value: int) -> None:
        if name != ENERGY:
            self.seen[name].append(value)
        elif not self.energy or value != self.energy[-1][1]:
            self.energy.append((time.perf_counter(), value))

    def compute_power_w(self) -> float | None:
        """Return the mean power in W between the first observed change of the counter and the last one."""
        if len(self.energy) < 3:  # noqa: PLR2004 - when the first value came is not known
            return None
        (begin, first), (end, last) = self.energy[1], self.energy[-1]
        return (last - first) / 1e3 / (end - begin) if end - begin >= MIN_POWER_INTERVAL_S else None

    def get_state(self) -> Gpu | None:
        """Return the observed state, or None without NVML."""
        if not (any(self.seen.values()) or self.energy):
            return None
        clock, power = self.seen["clock"], max(self.seen["power"], default=None)
        return Gpu(
            sm_clock_mhz_min=min(clock, default=None),
            sm_clock_mhz_max=max(clock, default=None),
            power_w_max=None if power is None else power / 1e3,
            power_w_all=self.compute_power_w(),
            temperature_c_max=max(self.seen["temperature"], default=None),
            throttle_reasons=decode_throttle_reasons(functools.reduce(operator.or_, self.seen["reasons"], 0)),
        )


def merge_states(states: Iterable[Gpu | None]) -> Gpu | None:
    """Return the worst of all ranks' states, field by field, with the power of all ranks together."""
    states = list(states)
    seen = [s for s in states if s is not None]
    if not seen:
        return None
    picks: dict[str, Callable[..., Any]] = {"sm_clock_mhz_min": min} | dict.fromkeys(MAXIMA, max)
    over_ranks = {
        field: pick((value for s in seen if (value := getattr(s, field)) is not None), default=None)
        for field, pick in picks.items()
    }
    powers = [s.power_w_all for s in seen]
    known = [power for power in powers if power is not None]
    return Gpu(
        **over_ranks,
        power_w_all=sum(known) if len(known) == len(states) else None,
        throttle_reasons=sorted({reason for s in seen for reason in s.throttle_reasons}),
    )


def is_throttled(gpu: Gpu | None) -> bool:
    """Return True if a throttle reason was observed."""
    return gpu is not None and bool(gpu.throttle_reasons)


def _make_queries(device: torch.device) -> dict[str, Callable[[], int]]:
    """Return the NVML queries for this rank's GPU; none if NVML cannot be used."""
    if device.type != "cuda":
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    except Exception:  # noqa: BLE001 - NVML is optional: after any failure the clocks are unknown
        return {}
    return {
        "clock": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu),
        ENERGY: lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    }
