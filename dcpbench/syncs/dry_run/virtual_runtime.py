"""Emulate CUDA's runtime, allocators and libraries during a dry run, for programs that query them through torch."""

from __future__ import annotations

import enum
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.dry_run.device_tensor import registered
from dcpbench.syncs.dry_run.virtual_cuda import MEMORY_BYTES, gpu, make_constant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.syncs.dry_run.virtual_cuda import Patches

CUDA_VERSION = "13.0"  # of the build of torch for which waits were measured
NCCL_VERSION = (2, 28, 0)
DEFAULT_WORKSPACE_BYTES = 32 << 20
_ANSWERS: tuple[tuple[Any, str], ...] = (  # functions of torch's C++ module, which CPU builds lack, by constant answer
    (None, "_cuda_record_memory_history _cuda_record_memory_history_legacy _cuda_attach_out_of_memory_observer"),
    (None, "_cuda_resetAccumulatedMemoryStats _cuda_resetPeakMemoryStats _cuda_resetAccumulatedHostMemoryStats"),
    (None, "_cuda_resetPeakHostMemoryStats _cuda_setMemoryFraction _cuda_setMemoryMetadata _cuda_allocationTraceback"),
    (None, "_cuda_cudaCachingAllocator_raw_delete _cuda_cudaCachingAllocator_enable _cuda_clearCublasWorkspaces"),
    (None, "_cuda_setCublasWorkspaceSize _cuda_setCublasLtWorkspaceSize _cuda_resetCublasWorkspaceSize"),
    (None, "_cuda_resetCublasLtWorkspaceSize _cuda_init _cuda_ipc_collect _cuda_sleep _cuda_endAllocateToPool"),
    (None, "_cuda_releasePool _cuda_tunableop_enable _cuda_tunableop_tuning_enable _cuda_record_untuned_enable"),
    (None, "_cuda_tunableop_set_max_tuning_duration _cuda_tunableop_set_max_tuning_iterations"),
    (None, "_cuda_tunableop_set_filename _cuda_tunableop_set_rotating_buffer_size"),
    (None, "_cuda_tunableop_set_numerical_check_tolerances"),
    (None, "_set_linalg_preferred_backend _set_blas_preferred_backend _set_rocm_fa_preferred_backend"),
    (None, "_accelerator_resetAccumulatedStats _accelerator_resetPeakStats _accelerator_emptyHostCache"),
    (0, "_cuda_getCurrentBlasHandle _cuda_getCurrentSolverHandle _cuda_get_sync_debug_mode"),
    (0, "_cuda_tunableop_get_max_tuning_duration _cuda_tunableop_get_max_tuning_iterations"),
    (0, "_cuda_tunableop_get_rotating_buffer_size"),
    ("", "_cuda_getMemoryMetadata _cuda_tunableop_get_filename"),
    ((), "_cuda_tunableop_get_results _cuda_tunableop_get_validators"),
    ({}, "_cuda_memoryStats _cuda_hostMemoryStats _accelerator_getDeviceStats"),
    (False, "_cuda_isHistoryEnabled _cuda_tunableop_is_enabled _cuda_tunableop_tuning_is_enabled"),
    (False, "_cuda_record_untuned_is_enabled _cuda_tunableop_read_file"),
    (True, "_cuda_cudaCachingAllocator_is_enabled _accelerator_isAllocatorInitialized"),
    (1.0, "_cuda_getMemoryFraction"),
    ("native", "_cuda_getAllocatorBackend"),
    (DEFAULT_WORKSPACE_BYTES, "_cuda_getCublasWorkspaceSize _cuda_getCublasLtWorkspaceSize"),
    ((MEMORY_BYTES, MEMORY_BYTES), "_accelerator_getMemoryInfo"),
)
_LEGACY_TYPES = "Float Double Half BFloat16 Long Int Short Char Byte Bool"
_LEGACY = {f"{name}Tensor": getattr(torch, f"{name}Tensor").dtype for name in _LEGACY_TYPES.split()}  # classes by dtype
_addresses = itertools.count(1 << 40, 1 << 20)
_pools = itertools.count(1)


def install_runtime(patches: Patches) -> None:
    """Replace those functions until `patches.restore()`."""
    for answer, names in _ANSWERS:
        _set_everywhere(patches, dict.fromkeys(names.split(), make_constant(answer)))
    _set_everywhere(
        patches,
        {
            "_cuda_getDeviceCount": lambda: torch.cuda.device_count(),  # noqa: PLW0108 - it is replaced while a dry run is on
            "_cuda_getDevice": lambda: gpu.index,
            "_cuda_setDevice": gpu.set_device,
            "_cuda_synchronize": gpu.synchronize,
            "_cuda_memorySnapshot": _make_snapshot,
            "_cuda_cudaCachingAllocator_raw_alloc": lambda *_: next(_addresses),
            "_cuda_beginAllocateCurrentThreadToPool": _use_pool,
            "_cuda_beginAllocateCurrentStreamToPool": _use_pool,
            "_cuda_beginAllocateToPool": _use_pool,
            "_accelerator_emptyCache": gpu.empty_cache,
            "_broadcast": _broadcast,
            "_broadcast_coalesced": lambda tensors, devices, _=0: [_move_to_device(tensors, d) for d in devices],
            "_scatter": _scatter,
            "_gather": _gather,
        },
    )
    patches.set_attributes(torch.cuda, _cudart=VirtualRuntime(), MemPool=VirtualPool)
    patches.set_attributes(torch.cuda.memory, MemPool=VirtualPool)
    patches.set_existing(torch.cuda.nccl, version=make_constant(NCCL_VERSION))
    patches.set_attributes(torch.backends.cuda, cufft_plan_cache=VirtualPlanCache())
    if torch.version.cuda is None:
        patches.set_attributes(torch.version, cuda=CUDA_VERSION)
    _apply_profiler_patches(patches)
    _apply_legacy_type_patches(patches)


def _set_everywhere(patches: Patches, functions: dict[str, Any]) -> None:
    """Replace functions of torch's C++ module, and the same names where modules of torch.cuda import them."""
    patches.set_attributes(torch._C, **functions)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.graphs):
        patches.set_existing(module, **functions)


class CudaError(enum.IntEnum):
    """Define results of calls of the CUDA runtime."""

    success = 0
    ERROR_NOT_READY = 34


class VirtualRuntime:
    """Replace torch.cuda.cudart()."""

    cudaError = CudaError  # noqa: N815 - CUDA's name
    cudaProfilerStart = cudaProfilerStop = cudaStreamCreate = cudaStreamDestroy = make_constant(CudaError.success)  # noqa: N815
    cudaMemGetInfo = make_constant((MEMORY_BYTES, MEMORY_BYTES))  # noqa: N815

    def cudaHostRegister(self, address: int, size: int, flags: int = 0) -> CudaError:
        """Pin host memory that exists already."""
        registered[address] = size
        return CudaError.success

    def cudaHostUnregister(self, address: int) -> CudaError:
        """Make such memory pageable again."""
        registered.pop(address, None)
        return CudaError.success

    def cudaGetErrorString(self, error: int) -> str:
        """Return the name of a result."""
        return CudaError(error).name


class VirtualPlanCache:
    """Replace torch.backends.cuda.cufft_plan_cache, of one device and of all."""

    size, max_size = 0, 4096
    clear = make_constant(None)

    def __getitem__(self, device: Any) -> VirtualPlanCache:
        return self


class VirtualPool:
    """Replace torch.cuda.MemPool; freeing a pool that was used frees memory, for which CUDA waits."""

    def __init__(self, allocator: Any = None, *_: Any, **__: Any) -> None:
        self.allocator, self.id = allocator, (0, next(_pools))
        _alive[self.id] = self.uses = [False]

    use_count = make_constant(1)
    snapshot = make_constant([])

    def __del__(self) -> None:
        _alive.pop(self.id, None)
        if self.uses[0]:
            gpu.report(rules.ALLOCATION, "torch.cuda.MemPool", "cudaFree", explicit=False)


_alive: dict[Any, list[bool]] = {}  # id of each memory pool -> whether memory was allocated in it


def _use_pool(_device: int, pool: Any) -> None:
    _alive.get(pool, [False])[0] = True


def _make_snapshot(*_: Any, **__: Any) -> dict[str, Any]:
    """Return what torch.cuda.memory._snapshot() does where nothing was allocated."""
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {},
        "graph_capture_record_stream_reuse": False,
    }
    traces: list[list[Any]] = [[] for _ in range(torch.cuda.device_count())]
    return {"segments": [], "device_traces": traces, "external_annotations": [], "allocator_settings": settings}


def _move_to_device(tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
    device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
    return [tensor.to(device) for tensor in tensors]


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [_move_to_device([tensor], device)[0] for device in devices]


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, _streams: Any = None
) -> tuple[torch.Tensor, ...]:
    chunks = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return tuple(_move_to_device([chunk], device)[0] for chunk, device in zip(chunks, devices, strict=False))


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None) -> torch.Tensor:
    return torch.cat(_move_to_device(tensors, 0 if destination is None else destination), dim)


def _apply_profiler_patches(patches: Patches) -> None:
    """Let torch's profilers record the host alone: builds for the CPU refuse to record a GPU."""
    profile, nvtx = torch.autograd.profiler.profile, torch.autograd.profiler.emit_nvtx
    begin = profile.__init__

    @functools.wraps(begin)
    def init_on_host(self: Any, enabled: bool = True, **options: Any) -> None:
        off = {"use_cuda": False} if "use_cuda" in options else {}
        begin(self, enabled, **{**options, "use_device": None, "use_cpu": True, **off})

    patches.set_attributes(profile, __init__=init_on_host)
    patches.set_attributes(nvtx, __enter__=lambda self: self, __exit__=make_constant(None))


class _LegacyType(type):
    """Metaclass of torch.cuda.FloatTensor and the like, which create and recognise tensors of one dtype."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            data = args[0]
            if isinstance(data, torch.Size):
                return torch.empty(data, dtype=cls.dtype, device="cuda")
            if isinstance(data, torch.Tensor):
                return data.to("cuda", cls.dtype)
            return torch.tensor(data, dtype=cls.dtype, device="cuda")
        return torch.empty(args or (0,), dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype


def _apply_legacy_type_patches(patches: Patches) -> None:
    entries = {"__module__": "torch.cuda"}
    patches.set_attributes(torch.cuda, **{n: _LegacyType(n, (), {**entries, "dtype": d}) for n, d in _LEGACY.items()})
    set_type: Callable[[Any], None] = torch.set_default_tensor_type

    @functools.wraps(set_type)
    def set_default_tensor_type(kind: Any) -> None:
        name = str(kind).rpartition(".")[2].strip("'>")
        on_gpu = ".cuda." in str(kind)
        torch.set_default_device("cuda" if on_gpu else None)
        if not on_gpu:
            set_type(kind)
        elif _LEGACY[name].is_floating_point:
            torch.set_default_dtype(_LEGACY[name])

    patches.set_attributes(torch, set_default_tensor_type=set_default_tensor_type)
