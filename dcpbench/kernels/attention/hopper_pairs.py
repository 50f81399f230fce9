"""The kernel of hopper_pairs.cu: compiled where it runs (2 s a process), told where its tensors lie, and launched."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, SHARED_BYTES = 384, 232_448
"""Three warpgroups, and all of the 227 KB of shared memory that a program may have."""
WIDTH, COLUMNS, BOX = 576, 64, 64
"""Numbers of a row, and the columns and rows (of q: heads) that one copy takes."""
PAGES = (16, 32)
"""Rows of pages that it reads, beside multiples of 64: a tile is four copies at most for each 64 columns."""
LEAST, SLACK = 2, 2
"""Of the division of work of all kernels for Hopper; see partition.py."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def reads(page_size: int) -> bool:
    """Whether pages of so many rows can be copied whole."""
    return page_size in PAGES or page_size % BOX == 0


@functools.cache
def installed() -> bool:
    """Whether the CUDA driver and compiler can be called from here (cuda-bindings, which torch for CUDA brings)."""
    try:
        from cuda.bindings import driver, nvrtc

        driver.cuDriverGetVersion()
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver or compiler returned, or the error that it named."""
    error, *rest = answer
    if int(error):
        raise RuntimeError(f"{type(error).__name__}: {error!s}")
    return rest[0] if len(rest) == 1 else rest


@functools.lru_cache(maxsize=8)
def _kernel(element: str, page: int, device: int) -> Any:
    from cuda.bindings import driver, nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], []))
    words = (
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        f'-DELEMENT="{element}"',
        f"-DPAGE={page}",
        f"-DLEAST={LEAST}",
        f"-DSLACK={SLACK}",
        "-DINFINITY=__int_as_float(0x7f800000)",
    )
    (error,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
    if int(error):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    torch.cuda.current_stream(device)  # the device's context exists
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, b"hopper_pairs"))
    size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, size, SHARED_BYTES))
    return function


@functools.lru_cache(maxsize=4096)
def _tensor_map(pointer: int, rows: int, box: int, dtype: torch.dtype) -> bytes:
    """What the copy engine is told of `rows` of 576 numbers: boxes of `box` rows and 64 columns, swizzled by 128 bytes."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == torch.bfloat16 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    number, size = driver.cuuint32_t, driver.cuuint64_t
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            pointer,
            [size(WIDTH), size(rows)],
            [size(2 * WIDTH)],
            [number(COLUMNS), number(box)],
            [number(1), number(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "lengths", "part_o", "part_lse", "pieces_of", "o", "lse")),
        *((name, ctypes.c_float) for name in ("scale_log2", "ln2")),
        *((name, ctypes.c_int) for name in ("table_stride", "heads", "batch", "parts")),
        ("pool", ctypes.c_void_p),
    )


def launch(
    spec: AttentionSpec,
    grid: int,
    q_BHQ: torch.Tensor,
    kv: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, float, int, int, int, int],
) -> None:
    """Put one run on the current stream. `tensors`, `numbers`: the fields of the kernel's Arguments before `pool`, in their order."""
    from cuda.bindings import driver

    function = _kernel(ELEMENTS[spec.dtype], spec.page_size, q_BHQ.device.index or 0)
    rows = kv.numel() // WIDTH
    q_map = ctypes.create_string_buffer(_tensor_map(q_BHQ.data_ptr(), q_BHQ.numel() // WIDTH, BOX, spec.dtype), 128)
    kv_map = ctypes.create_string_buffer(_tensor_map(kv.data_ptr(), rows, min(BOX, spec.page_size), spec.dtype), 128)
    arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), *numbers, kv.data_ptr())
    places = (ctypes.c_void_p * 3)(*(ctypes.addressof(part) for part in (q_map, kv_map, arguments)))
    stream = torch.cuda.current_stream(q_BHQ.device).cuda_stream
    _checked(
        driver.cuLaunchKernel(function, grid, 1, 1, THREADS, 1, 1, SHARED_BYTES, stream, ctypes.addressof(places), 0)
    )
