"""Emulate a GPU: the answers of torch.cuda and torch.accelerator during a dry run.

Its streams, events and graphs order nothing, and report when the host would wait.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
import types
from typing import TYPE_CHECKING, Any, Self

import torch

from dcpbench.syncs import rules

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY_BYTES = 80 << 30
CAPABILITY, PROCESSORS = (9, 0), 132
NAME = "virtual GPU of a dry run"
_MISSING = object()
_CONSTANT_ANSWERS = (  # functions of torch.cuda by the constant that they return, regardless of their arguments
    (None, "_sleep set_sync_debug_mode init _lazy_init manual_seed manual_seed_all seed seed_all"),
    (None, "set_rng_state set_rng_state_all"),
    (0, "get_sync_debug_mode memory_allocated max_memory_allocated memory_reserved max_memory_reserved ipc_collect"),
    (0, "reset_peak_memory_stats reset_max_memory_allocated set_per_process_memory_fraction"),
    (0, "utilization memory_usage temperature power_draw clock_rate device_memory_used"),
    (True, "is_available is_initialized is_bf16_supported"),
    (False, "can_device_access_peer _is_in_bad_fork"),
    ("", "memory_summary list_gpu_processes"),
)
_NVTX = "range_push range_pop mark range_start range_end"
_ids = itertools.count()


def make_constant(value: Any) -> Callable[..., Any]:
    """Return a function, also usable as a method, that returns the value regardless of its arguments."""
    return lambda *_, **__: value


_yes, _zero, _nothing, _pool = map(make_constant, (True, 0, None, (0, 0)))


@contextlib.contextmanager
def _no_range(*_: Any, **__: Any) -> Any:
    yield


class Patches:
    """Replace attributes, and restore them in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set_attributes(self, owner: Any, **values: Any) -> None:
        """Set attributes of a module or class, whether they existed or not."""
        for name, value in values.items():
            # The class's own entry, not the result of a look-up: else a static method would be restored as a function.
            self._before.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)

    def set_existing(self, owner: Any, **values: Any) -> None:
        """Set those attributes that this version of the module has."""
        self.set_attributes(owner, **{name: value for name, value in values.items() if hasattr(owner, name)})

    def restore(self) -> None:
        """Restore all attributes."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class VirtualStream:
    """Replace torch.cuda.Stream; work is done immediately."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        self.device = torch.device("cuda", index or 0)
        self.device_index = self.device.index
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_ids)

    wait_stream = wait_event = _nothing  # stand-in for a wait of the stream, during which the host does not wait
    query = _yes
    priority_range = staticmethod(make_constant((0, -5)))

    def synchronize(self) -> None:
        """Report a wait for the stream."""
        gpu.report(rules.STREAM, "torch.cuda.Stream.synchronize", "cudaStreamSynchronize")

    def is_capturing(self) -> bool:
        """Return True if a graph is being captured."""
        return gpu.is_capturing()

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Return an event that has been recorded."""
        event = event if event is not None else VirtualEvent()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        _local.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _local.streams.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class VirtualEvent:
    """Replace torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded_s: float | None = None
        self.cuda_event = next(_ids)
        self.device = torch.device("cuda", 0)

    wait = _nothing  # stand-in for a wait of a stream, during which the host does not wait
    query = _yes

    def record(self, stream: Any = None) -> None:
        """Record the time."""
        self.recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        """Report a wait, unless the event was never recorded, for which CUDA does not wait."""
        if self.recorded_s is not None:
            gpu.report(rules.EVENT, "torch.cuda.Event.synchronize", "cudaEventSynchronize")

    def ipc_handle(self) -> bytes:
        """Raise NotImplementedError: there is no event that another process could open."""
        raise NotImplementedError("A dry run has no events for other processes; use `dcpbench syncs run` on a GPU.")

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Return the milliseconds between two records on the host's clock, which is no measure of a GPU."""
        if self.recorded_s is None or end.recorded_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end.recorded_s - self.recorded_s) * 1e3


class VirtualGraph:
    """Replace torch.cuda.CUDAGraph; captured work is done immediately, and again by each replay."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[tuple[Any, Any, Any, Any]] = []

    instantiate = enable_debug_mode = debug_dump = register_generator_state = _nothing
    raw_cuda_graph = raw_cuda_graph_exec = _zero
    pool = _pool

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Start the capture: further operators belong to the graph."""
        self.work = []
        gpu.graph = self

    def capture_end(self) -> None:
        """End the capture."""
        gpu.graph = None

    def replay(self) -> None:
        """Run the captured operators again, with results in the tensors of the capture."""
        for func, args, kwargs, result in self.work:
            _copy_result(result, func(*args, **kwargs))

    def reset(self) -> None:
        """Discard the captured work."""
        self.work = []


def _copy_result(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, list | tuple):
        for a, b in zip(old, new, strict=False):
            _copy_result(a, b)


class Gpu:
    """Emulate the GPUs: the current device, the receiver of waits, and the state that calls of torch.cuda need."""

    index = 0
    touched = False  # True if a device tensor was made since the cache was last emptied, so that memory may be freed

    def __init__(self) -> None:
        self.report: Callable[..., None] = _nothing
        self.graph: VirtualGraph | None = None  # graph that is being captured, if any

    def is_capturing(self) -> bool:
        """Return True if a graph is being captured."""
        return self.graph is not None

    def exchange_device(self, index: int) -> int:
        """Set the current device and return the previous one; negative numbers change nothing."""
        before, self.index = self.index, index if index >= 0 else self.index
        return before

    def set_device(self, device: Any) -> None:
        """Replace torch.cuda.set_device."""
        self.exchange_device(device if isinstance(device, int) else torch.device(device).index or 0)

    def synchronize(self, device: Any = None) -> None:
        """Replace torch.cuda.synchronize."""
        self.report(rules.DEVICE, "torch.cuda.synchronize", "cudaDeviceSynchronize")

    def empty_cache(self) -> None:
        """Replace torch.cuda.empty_cache: it frees memory, for which CUDA waits; without any there is no wait."""
        if self.touched:
            self.report(rules.ALLOCATION, "torch.cuda.empty_cache", "cudaFree", explicit=False)
        self.touched = False


gpu = Gpu()
DEFAULT = VirtualStream()


class _Local(threading.local):
    """Hold each thread's streams, the current one last."""

    def __init__(self) -> None:
        self.streams = [DEFAULT]


_local = _Local()


def stream_context(stream: VirtualStream | None) -> Any:
    """Replace torch.cuda.stream(s): within the context the stream is the thread's current one; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def current_stream(device: Any = None) -> VirtualStream:
    """Return the calling thread's stream; by default the default one."""
    return _local.streams[-1]


def set_stream(stream: VirtualStream | None) -> None:
    """Set the calling thread's stream; None changes nothing."""
    _local.streams[-1] = stream or _local.streams[-1]


class VirtualGenerator(torch.Generator):
    """Replace a generator on the GPU; its numbers come from the CPU's, so they differ from a GPU's."""

    def __new__(cls, device: Any = "cpu") -> Self:
        """Return a generator, seeded like any new one."""
        made = super().__new__(cls)
        made.where = torch.device(device or "cpu")
        return made

    where: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device that was requested."""
        return torch.device("cuda", self.where.index or 0) if self.where.type == "cuda" else self.where


def install_cuda(patches: Patches, report: Callable[..., None]) -> None:
    """Replace functions of torch.cuda until `patches.restore()`; `report` is called with rule, name and runtime call of
    a wait.
    """
    patches.set_attributes(gpu, report=report, index=0, touched=False)
    _apply_device_patches(patches)
    _apply_stream_patches(patches)
    _apply_accelerator_patches(patches)


def _apply_device_patches(patches: Patches) -> None:
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    properties = types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY_BYTES,
        warp_size=32,
        uuid="",
        multi_processor_count=PROCESSORS,
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
    for value, names in _CONSTANT_ANSWERS:
        answers = dict.fromkeys(names.split(), make_constant(value))
        patches.set_attributes(torch.cuda, **answers)
        patches.set_existing(torch.cuda.memory, **answers)
    patches.set_attributes(
        torch.cuda,
        device_count=make_constant(count),
        current_device=lambda: gpu.index,
        set_device=gpu.set_device,
        _exchange_device=gpu.exchange_device,
        _maybe_exchange_device=gpu.exchange_device,
        synchronize=gpu.synchronize,
        get_device_properties=make_constant(properties),
        get_device_capability=make_constant(CAPABILITY),
        get_device_name=make_constant(NAME),
        get_rng_state=lambda _=None: torch.get_rng_state(),
        initial_seed=torch.initial_seed,
        get_rng_state_all=list,
        memory_stats=lambda _=None: collections.defaultdict(int),
    )
    for home in (torch.cuda, torch.cuda.memory):
        patches.set_attributes(
            home, empty_cache=gpu.empty_cache, mem_get_info=make_constant((MEMORY_BYTES, MEMORY_BYTES))
        )
    patches.set_attributes(
        torch._C,
        _cuda_getCurrentRawStream=_zero,
        _host_emptyCache=_nothing,
        _get_accelerator=make_constant(torch.device("cuda")),
    )
    patches.set_attributes(torch, Generator=VirtualGenerator)
    patches.set_attributes(torch.cuda.nvtx, **dict.fromkeys(_NVTX.split(), _nothing), range=_no_range)


def _apply_stream_patches(patches: Patches) -> None:
    kinds: dict[str, Any] = {"Stream": VirtualStream, "Event": VirtualEvent}
    graphs = {"CUDAGraph": VirtualGraph, "is_current_stream_capturing": gpu.is_capturing, "graph_pool_handle": _pool}
    patches.set_attributes(
        torch.cuda,
        **kinds,
        **graphs,
        ExternalStream=VirtualStream,
        get_stream_from_external=lambda _pointer, device=None: VirtualStream(device),
        stream=stream_context,
        StreamContext=stream_context,
        current_stream=current_stream,
        default_stream=make_constant(DEFAULT),
        set_stream=set_stream,
    )
    patches.set_attributes(torch.cuda.graphs, **graphs)
    patches.set_attributes(torch.cuda.graph, default_capture_stream=None)
    patches.set_attributes(torch.cuda.streams, **kinds)
    patches.set_attributes(torch, **kinds)
    patches.set_attributes(torch.Tensor, record_stream=_nothing)  # torch's own accepts no other stream than its own


def _apply_accelerator_patches(patches: Patches) -> None:
    patches.set_existing(
        torch.accelerator,
        is_available=_yes,
        current_accelerator=make_constant(torch.device("cuda")),
        device_count=torch.cuda.device_count,
        **dict.fromkeys(("current_device_index", "current_device_idx"), torch.cuda.current_device),
        **dict.fromkeys(("set_device_index", "set_device_idx"), gpu.set_device),
        synchronize=gpu.synchronize,
        current_stream=current_stream,
        set_stream=set_stream,
        empty_cache=gpu.empty_cache,
    )
