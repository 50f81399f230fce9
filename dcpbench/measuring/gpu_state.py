"""Sample clocks, power, energy, temperature and throttling of GPUs with NVML while something is measured. No torch."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dcpbench.records.record import Gpu, decode_throttle_reasons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PERIOD_S = 0.05
MIN_POWER_INTERVAL_S = 0.25  # minimum s for a mean power from the energy counter, which changes every 20 to 100 ms
ENERGY = "energy"
MAXIMA = ("sm_clock_mhz_max", "power_w_max", "temperature_c_max")  # maximum over ranks; lowest clock: minimum


class GpuSampler:
    """Context manager that samples a GPU in a thread; read `get_state()` afterwards. Values that NVML lacks are absent.

    `uuid` is the GPU's UUID, such as `GPU-1a2b…`; None samples nothing.
    """

    def __init__(self, uuid: str | None) -> None:
        self.queries = _make_queries(uuid) if uuid else {}
        self.seen: dict[str, list[int]] = {name: [] for name in self.queries}
        self.energy: list[tuple[float, int]] = []  # (seconds, mJ since the driver's start) when the counter changes
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


class VisibleGpus(msgspec.Struct, frozen=True, kw_only=True):
    """Describe GPUs that a program without options of its own would use, by NVML."""

    uuids: tuple[str, ...]
    name: str  # name of all of them, such as `NVIDIA H200`; several names are separated by commas
    memory_bytes: int | None  # memory of the smallest one without what the driver reserves, in bytes
    driver: str | None


def find_visible_gpus(count: int) -> VisibleGpus | None:
    """Return the first `count` GPUs of CUDA_VISIBLE_DEVICES, or of the machine; None without NVML or with fewer GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = _list_visible(pynvml)[:count]
        if len(handles) < count or not handles:
            return None
        names = [_to_text(pynvml.nvmlDeviceGetName(gpu)) for gpu in handles]
        return VisibleGpus(
            uuids=tuple(_to_text(pynvml.nvmlDeviceGetUUID(gpu)) for gpu in handles),
            name=", ".join(dict.fromkeys(names)),
            memory_bytes=min(sizes) if len(sizes := _list_usable_bytes(pynvml, handles)) == len(handles) else None,
            driver=_to_text(pynvml.nvmlSystemGetDriverVersion()),
        )
    except Exception:  # noqa: BLE001 - NVML is optional: after any failure the GPUs are unknown
        return None


def _list_usable_bytes(nvml: Any, handles: Sequence[Any]) -> list[int]:  # noqa: ANN401 - the module has no types
    """Return the memory of GPUs without what the driver reserves, as torch's `total_memory`, in bytes; empty if unknown."""
    try:
        found = [nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2) for gpu in handles]
    except nvml.NVMLError:  # a driver before 510
        return []
    return [int(memory.total) - int(memory.reserved) for memory in found]


def _list_visible(nvml: Any) -> list[Any]:  # noqa: ANN401 - the module and its handles have no types
    """Return the handles of the GPUs that CUDA_VISIBLE_DEVICES lists, by index or UUID; without it, of all GPUs.

    CUDA ignores what follows an invalid entry. Indices are in PCI order, as NVML's; CUDA_DEVICE_ORDER can change CUDA's.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for entry in listed.split(","):
        try:
            word = entry.strip()
            handles.append(
                nvml.nvmlDeviceGetHandleByIndex(int(word))
                if word.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(word.encode())
            )
        except nvml.NVMLError:
            break
    return handles


def _to_text(value: bytes | str) -> str:
    """Return a string of NVML, which older versions of its Python package return as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@contextlib.contextmanager
def sample_gpus(uuids: Iterable[str]) -> Iterator[Callable[[], Gpu | None]]:
    """Sample several GPUs; the yielded function returns their merged state, or None if none was sampled."""
    samplers = [GpuSampler(uuid) for uuid in uuids]
    with contextlib.ExitStack() as stack:
        for sampler in samplers:
            stack.enter_context(sampler)
        yield lambda: merge_states([sampler.get_state() for sampler in samplers])


def _make_queries(uuid: str) -> dict[str, Callable[[], int]]:
    """Return the NVML queries for a GPU; none if NVML cannot be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except Exception:  # noqa: BLE001 - NVML is optional: after any failure the clocks are unknown
        return {}
    return {
        "clock": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu),
        ENERGY: lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    }
