"""Clocks, power, temperature and throttling of this rank's GPU while something is measured (NVML)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

import torch

from dcpbench.records import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable

PERIOD_S = 0.05
# Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a busy GPU down; idle and application clocks do not.
THROTTLE_BITS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


class GpuSampler:
    """Context manager that samples in a thread; `state()` afterwards. None where NVML cannot be used."""

    def __init__(self, device: torch.device) -> None:
        self.handle = _open(device)
        self.clocks: list[int] = []
        self.power: list[float] = []
        self.temperature: list[int] = []
        self.reasons = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        if self.handle is not None:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        if self.handle is not None:
            self.thread.join()

    def _sample(self) -> None:
        import pynvml

        while not self.stop.is_set():
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM))
            self.power.append(pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3)
            self.temperature.append(pynvml.nvmlDeviceGetTemperature(self.handle, pynvml.NVML_TEMPERATURE_GPU))
            self.reasons |= pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
            self.stop.wait(PERIOD_S)

    def state(self) -> Gpu | None:
        """What was seen, or None without NVML."""
        if not self.clocks:
            return None
        return Gpu(
            sm_clock_mhz_min=min(self.clocks),
            sm_clock_mhz_max=max(self.clocks),
            power_w_max=max(self.power),
            temperature_c_max=max(self.temperature),
            throttle_reasons=[name for bit, name in THROTTLE_BITS.items() if self.reasons & bit],
        )


def worst(states: Iterable[Gpu | None]) -> Gpu | None:
    """The worst of all ranks' states, field by field."""
    seen = [s for s in states if s is not None]
    if not seen:
        return None
    return Gpu(
        sm_clock_mhz_min=min(s.sm_clock_mhz_min or 0 for s in seen),
        sm_clock_mhz_max=max(s.sm_clock_mhz_max or 0 for s in seen),
        power_w_max=max(s.power_w_max or 0.0 for s in seen),
        temperature_c_max=max(s.temperature_c_max or 0 for s in seen),
        throttle_reasons=sorted({reason for s in seen for reason in s.throttle_reasons}),
    )


def _open(device: torch.device):  # noqa: ANN202 - an opaque NVML handle
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    except Exception:  # noqa: BLE001 - NVML is a bonus: any failure of it means that clocks are not known
        return None
