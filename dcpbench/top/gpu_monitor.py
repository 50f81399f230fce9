"""Query NVML for the current state of this machine's GPUs. Missing values are absent; no torch, and no GPU is required."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dcpbench.records.record import decode_throttle_reasons

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a GPU."""

    index: int
    name: str = ""
    utilisation: int | None = None  # percent of the last sampling period in which any kernel ran
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttle_reasons: list[str] = []


class Gpus:
    """GPUs of the machine; none if NVML cannot be used."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        with contextlib.suppress(Exception):  # NVML is optional: a run can be watched without it
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml

    def read_states(self) -> list[GpuState]:
        """Query each GPU."""
        return [self._read_gpu(index, handle) for index, handle in enumerate(self._handles)]

    def _read_gpu(self, index: int, gpu: Any) -> GpuState:  # noqa: ANN401 -- NVML's handle
        nvml = self._nvml
        memory = _get_or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
        name = _get_or_none(lambda: nvml.nvmlDeviceGetName(gpu)) or ""
        return GpuState(
            index=index,
            name=name.decode(errors="replace") if isinstance(name, bytes) else name,
            utilisation=_get_or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
            sm_clock_mhz=_get_or_none(lambda: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))),
            sm_clock_max_mhz=_get_or_none(lambda: int(nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM))),
            power_w=_get_or_none(lambda: float(nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)),
            power_limit_w=_get_or_none(lambda: float(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3)),
            temperature_c=_get_or_none(lambda: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))),
            memory_used_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else None,
            throttle_reasons=decode_throttle_reasons(
                _get_or_none(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))) or 0
            ),
        )


def _get_or_none(query: Callable[[], T]) -> T | None:
    """Return the answer, or None if this GPU or its driver has none."""
    try:
        return query()
    except Exception:  # noqa: BLE001 -- NVML raises a class for each kind of refusal
        return None
