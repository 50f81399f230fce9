"""A virtual GPU: what torch.cuda and torch.accelerator say while a dry run is on."""

from __future__ import annotations

import collections
import contextlib
import os
import types
from typing import TYPE_CHECKING, Any, Self

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.dry_run.virtual_streams import (
    StreamContext,
    VirtualEvent,
    VirtualGraph,
    VirtualStream,
    current_stream,
    default_stream,
    recorder,
    set_stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.dry_run.patches import Patches

MEMORY_BYTES = 80 << 30
CAPABILITY = (9, 0)
NAME = "virtual GPU of a dry run"
_PROCESSORS = 132


class VirtualGenerator(torch.Generator):
    """Stands for a generator on the GPU; its numbers come from the CPU's, so they differ from a GPU's."""

    def __new__(cls, device: Any = "cpu") -> Self:
        """A generator, seeded like any new one."""
        made = super().__new__(cls)
        made.where = torch.device(device or "cpu")
        return made

    where: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it was asked to be."""
        return torch.device("cuda", self.where.index or 0) if self.where.type == "cuda" else self.where


class Device:
    """Which of the virtual GPUs is current, and what their memory calls report."""

    def __init__(self, report: Callable[..., None]) -> None:
        self.index = 0
        self.report = report
        self.touched = False
        """A device tensor was made since the cache was last emptied, so there may be memory to free."""

    def exchange(self, index: int) -> int:
        """Sets the current device and returns the one before; negative ones change nothing."""
        before, self.index = self.index, index if index >= 0 else self.index
        return before

    def set(self, device: Any) -> None:
        """torch.cuda.set_device."""
        self.exchange(device if isinstance(device, int) else torch.device(device).index or 0)

    def synchronize(self, device: Any = None) -> None:
        """torch.cuda.synchronize."""
        self.report(rules.DEVICE, "torch.cuda.synchronize", "cudaDeviceSynchronize")

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache frees memory, for which CUDA waits; without any there is no wait."""
        if self.touched:
            self.report(rules.ALLOCATION, "torch.cuda.empty_cache", "cudaFree", explicit=False)
        self.touched = False


def install(patches: Patches, report: Callable[..., None]) -> Device:
    """Replaces what torch.cuda says until `patches.restore()`.

    Args:
        patches: Where the replacements are noted.
        report: Called with rule, name and runtime call when the host would wait.
    """
    device = Device(report)
    VirtualStream.report = VirtualEvent.report = report
    _identity(patches, device)
    _streams(patches)
    _memory(patches, device)
    _randomness(patches)
    _accelerator(patches, device)
    patches.put(
        torch.cuda.nvtx, **dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), _nothing)
    )
    patches.put(torch.cuda.nvtx, range=_no_range)
    return device


def _identity(patches: Patches, device: Device) -> None:
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    properties = types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY_BYTES,
        warp_size=32,
        uuid="",
        multi_processor_count=_PROCESSORS,
        max_threads_per_multi_processor=2048,
        is_integrated=0,
        is_multi_gpu_board=0,
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=227 << 10,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
    patches.put(
        torch.cuda,
        _sleep=_nothing,
        get_sync_debug_mode=_zero,
        set_sync_debug_mode=_nothing,
        is_available=_yes,
        is_initialized=_yes,
        is_bf16_supported=_yes,
        init=_nothing,
        _lazy_init=_nothing,
        device_count=lambda: count,
        current_device=lambda: device.index,
        set_device=device.set,
        _exchange_device=device.exchange,
        _maybe_exchange_device=device.exchange,
        synchronize=device.synchronize,
        get_device_properties=lambda _=None: properties,
        get_device_capability=lambda _=None: CAPABILITY,
        get_device_name=lambda _=None: NAME,
        can_device_access_peer=_no,
        _is_in_bad_fork=_no,
    )
    patches.put(torch._C, _cuda_getCurrentRawStream=_zero, _host_emptyCache=_nothing)


def _streams(patches: Patches) -> None:
    patches.put(
        torch.cuda,
        Stream=VirtualStream,
        Event=VirtualEvent,
        ExternalStream=VirtualStream,
        stream=StreamContext,
        StreamContext=StreamContext,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=set_stream,
        CUDAGraph=VirtualGraph,
        is_current_stream_capturing=_capturing,
        graph_pool_handle=_pool,
    )
    patches.put(torch.cuda.graphs, CUDAGraph=VirtualGraph, is_current_stream_capturing=_capturing)
    patches.put(torch.cuda.graph, default_capture_stream=None)
    patches.put(torch.cuda.streams, Stream=VirtualStream, Event=VirtualEvent)
    patches.put(torch, Stream=VirtualStream, Event=VirtualEvent)


def _memory(patches: Patches, device: Device) -> None:
    patches.put(
        torch.cuda,
        empty_cache=device.empty_cache,
        mem_get_info=lambda _=None: (MEMORY_BYTES, MEMORY_BYTES),
        memory_stats=lambda _=None: collections.defaultdict(int),
        memory_summary=lambda *_, **__: "",
        **dict.fromkeys(
            (
                "memory_allocated",
                "max_memory_allocated",
                "memory_reserved",
                "max_memory_reserved",
                "ipc_collect",
                "reset_peak_memory_stats",
                "reset_max_memory_allocated",
                "set_per_process_memory_fraction",
            ),
            _zero,
        ),
    )
    patches.put(
        torch.cuda.memory, empty_cache=device.empty_cache, mem_get_info=lambda _=None: (MEMORY_BYTES, MEMORY_BYTES)
    )


def _randomness(patches: Patches) -> None:
    patches.put(
        torch.cuda,
        manual_seed=_nothing,
        manual_seed_all=_nothing,
        seed=_nothing,
        seed_all=_nothing,
        get_rng_state=lambda _=None: torch.get_rng_state(),
        set_rng_state=_nothing,
        initial_seed=torch.initial_seed,
        get_rng_state_all=list,
        set_rng_state_all=_nothing,
    )
    patches.put(torch, Generator=VirtualGenerator)


def _accelerator(patches: Patches, device: Device) -> None:
    patches.put_where_there(
        torch.accelerator,
        is_available=_yes,
        current_accelerator=lambda *_, **__: torch.device("cuda"),
        device_count=torch.cuda.device_count,
        current_device_index=lambda: device.index,
        current_device_idx=lambda: device.index,
        set_device_index=device.set,
        set_device_idx=device.set,
        synchronize=device.synchronize,
        current_stream=current_stream,
        set_stream=set_stream,
        empty_cache=device.empty_cache,
    )


def _capturing() -> bool:
    return recorder.graph is not None


def _pool() -> tuple[int, int]:
    return (0, 0)


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def _no_range(*_: Any, **__: Any) -> Any:
    yield
