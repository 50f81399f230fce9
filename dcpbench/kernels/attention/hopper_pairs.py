"""Compile (2 s per process), parametrise and launch the kernels of hopper_*.cu."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec

HERE = Path(__file__).parent
MANY, APART_FP8, FEW = "hopper_pairs", "hopper_apart_fp8", "hopper_few"  # names of kernels, as of their sources
SHARED = "hopper_parts.cuh"  # source shared by these kernels
THREADS = {MANY: 384, APART_FP8: 512, FEW: 160}  # per program: 3 warpgroups, fp8: one more, few heads: 1 and a warp
FEW_HEADS = (8, 16)  # numbers of heads of the products for few heads; the smallest sufficient one is used
SHARED_BYTES = 232_448  # all of the 227 KB of shared memory that a program may have
WIDTH, BOX = 576, 64  # numbers of a row, and the rows (of q: heads) that one copy takes at most
PAGES = (16, 32)  # supported page sizes besides multiples of 64: a tile is at most four copies per 64 columns
MIN_TILES, SLACK = 2, 2  # parameters of the division of work of all Hopper kernels; see partition.py
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def supports_pages(page_size: int) -> bool:
    """Return True if pages of this size can be copied whole."""
    return page_size in PAGES or page_size % BOX == 0


def has_few_heads(spec: AttentionSpec) -> bool:
    """Return True if the kernel for few heads is used, for products with the number of heads as the smaller side."""
    return not spec.fp8 and spec.query_length * spec.heads <= FEW_HEADS[-1]


@functools.cache
def is_installed() -> bool:
    """Return True if the CUDA driver and compiler can be called (cuda-bindings, which torch for CUDA brings)."""
    try:
        from cuda.bindings import driver, nvrtc

        driver.cuDriverGetVersion()
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


def _check_answer(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call of the driver or compiler, or raise RuntimeError with its error."""
    error, *rest = answer
    if int(error):
        raise RuntimeError(f"{type(error).__name__}: {error!s}")
    return rest[0] if len(rest) == 1 else rest


@functools.lru_cache(maxsize=8)
def _load_kernel(name: str, element: str, page: int, heads: int, query_length: int, device: int) -> Any:
    from cuda.bindings import driver, nvrtc

    source = b"".join((HERE / file).read_bytes() for file in (SHARED, f"{name}.cu"))
    program = _check_answer(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 0, [], []))
    words = (
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        f'-DELEMENT="{element}"',
        f"-DPAGE={page}",
        f"-DLEAST={MIN_TILES}",
        f"-DSLACK={SLACK}",
        f"-DFEW={heads}",
        f"-DQUERY_LENGTH={query_length}",
        "-DINFINITY=__int_as_float(0x7f800000)",
    )
    (error,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
    if int(error):
        log = b" " * _check_answer(nvrtc.nvrtcGetProgramLogSize(program))
        _check_answer(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    code = b" " * _check_answer(nvrtc.nvrtcGetCUBINSize(program))
    _check_answer(nvrtc.nvrtcGetCUBIN(program, code))
    torch.cuda.current_stream(device)  # the device's context exists
    module = _check_answer(driver.cuModuleLoadData(code))
    function = _check_answer(driver.cuModuleGetFunction(module, name.encode()))
    size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check_answer(driver.cuFuncSetAttribute(function, size, SHARED_BYTES))
    return function


@functools.lru_cache(maxsize=4096)
def _encode_tensor_map(pointer: int, rows: int, box: int, dtype: torch.dtype, line: int = 128) -> bytes:
    """Return the tensor map of `rows` rows of 576 numbers: boxes of `box` rows and `line` bytes, with a swizzle of
    `line` bytes.
    """
    from cuda.bindings import driver

    each, kinds = dtype.itemsize, driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    swizzles = driver.CUtensorMapSwizzle
    swizzle = {128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B, 64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B}[line]
    # L2 fetching pairs of lines cost 3 to 6 % of long contexts: rows of 576 numbers are no whole number of them.
    promotions = driver.CUtensorMapL2promotion
    lines = promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE if each == 1 else promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
    number, size = driver.cuuint32_t, driver.cuuint64_t
    made = _check_answer(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            pointer,
            [size(WIDTH), size(rows)],
            [size(each * WIDTH)],
            [number(line // each), number(box)],
            [number(1), number(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            lines,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("tables", "lengths", "row_lengths", "part_o", "part_lse", "pieces_of", "o", "lse")
        ),
        *((name, ctypes.c_float) for name in ("scale_log2", "ln2")),
        *((name, ctypes.c_int) for name in ("table_stride", "heads", "batch", "parts")),
        ("pool", ctypes.c_void_p),
    )


class _ArgumentsFp8(_Arguments):
    _fields_ = (("q", ctypes.c_void_p), ("value_scale", ctypes.c_float))


def launch_kernel(
    spec: AttentionSpec,
    grid: int,
    q_BHQ: torch.Tensor,
    kv: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, float, int, int, int, int],
) -> None:
    """Put one run on the current stream. `tensors`, `numbers`: the fields of the kernel's Arguments before `pool`, in their order."""
    from cuda.bindings import driver

    rows, box = kv.numel() // WIDTH, min(BOX, spec.page_size)
    own = (*(tensor.data_ptr() for tensor in tensors), *numbers, kv.data_ptr())
    heads = next(few for few in FEW_HEADS if spec.query_length * spec.heads <= few) if has_few_heads(spec) else BOX
    arguments: ctypes.Structure
    if spec.fp8:
        name, maps = APART_FP8, [_encode_tensor_map(kv.data_ptr(), rows, box, kv.dtype, line) for line in (128, 64)]
        arguments = _ArgumentsFp8(*own, q_BHQ.data_ptr(), spec.kv_scale)
    else:
        q_map = _encode_tensor_map(q_BHQ.data_ptr(), q_BHQ.numel() // WIDTH, heads, spec.dtype)
        name = FEW if has_few_heads(spec) else MANY
        maps = [q_map, _encode_tensor_map(kv.data_ptr(), rows, box, spec.dtype)]
        arguments = _Arguments(*own)
    function = _load_kernel(
        name, ELEMENTS[spec.dtype], spec.page_size, heads, spec.query_length, q_BHQ.device.index or 0
    )
    map_buffers = [ctypes.create_string_buffer(one, 128) for one in maps]
    places = (ctypes.c_void_p * 3)(*(ctypes.addressof(part) for part in (*map_buffers, arguments)))
    stream = torch.cuda.current_stream(q_BHQ.device).cuda_stream
    _check_answer(
        driver.cuLaunchKernel(
            function, grid, 1, 1, THREADS[name], 1, 1, SHARED_BYTES, stream, ctypes.addressof(places), 0
        )
    )
