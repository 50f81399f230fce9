"""A linear layer over weights as they are stored: numbers of the dtype computed with, or e4m3 in blocks with scales.

Over scales a row is quantised in groups as wide as a block of the weight; products of a group are added up as tensor
cores do it, then multiplied with both scales and added in fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2).

    quantise   rows in groups of 128 numbers, unless the kernel that made them has (Rows); block_scaled.py
    product    a tile of rows times a block of columns; of narrow layers a stretch of the depth, so that there are
               programs for the whole machine
    add up     partial sums of the stretches, always in the same order
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch.nn import functional

from dcpbench.kernels.block_scaled import (
    FEW_ROWS,
    Rows,
    Scaled,
    dequantize_rows,
    dequantize_weight,
    get_launch_options,
    quantize_rows,
    quantize_rows_reference,
)
from dcpbench.kernels.e4m3 import get_capability
from dcpbench.models.weight_formats import SCALE_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

HOPPER = 9  # major compute capability
SHARED, RESERVED = 228 * 1024, 1024  # Hopper's shared memory per multiprocessor, and reserved per program, in bytes
MIN_STAGES = 4
MAX_TOGETHER = 3  # programs on a multiprocessor from which on they hide each other's waiting
PROGRAM_RATE, MEMORY_RATE, ADD_UP_RATE = 47e3, 3.9e6, 2e6  # bytes per µs: reads of one program, of all; added-up parts
SHARING_SLOWDOWN = 0.43  # relative slowdown of a program per additional program on the same multiprocessor
ADD_UP_US = 1.7  # fixed time of adding up partial sums


def apply_linear(
    x_TK: torch.Tensor | Rows, weight_NK: torch.Tensor | Scaled, out_TN: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x · weightᵀ [T, N] in x's dtype, in `out` if given. On a GPU, scale blocks are 128 × 128, and 128 | K."""
    if isinstance(x_TK, Rows):
        assert isinstance(weight_NK, Scaled)
        return compute_product(x_TK.scaled, weight_NK, x_TK.dtype, out=out_TN)
    if not isinstance(weight_NK, Scaled):
        return functional.linear(x_TK, weight_NK) if out_TN is None else torch.mm(x_TK, weight_NK.t(), out=out_TN)
    if not x_TK.is_cuda:
        y_TN = apply_linear_reference(x_TK, weight_NK)
        return y_TN if out_TN is None else out_TN.copy_(y_TN)
    return compute_product(quantize_rows(x_TK.contiguous()), weight_NK, x_TK.dtype, out=out_TN)


def apply_linear_reference(x_TK: torch.Tensor, weight_NK: Scaled) -> torch.Tensor:
    """Return the reference product over blocks of any size, from the represented e4m3 values in fp32."""
    rows = dequantize_rows(quantize_rows_reference(x_TK, weight_NK.block[1]))
    return functional.linear(rows, dequantize_weight(weight_NK)).to(x_TK.dtype)


@triton.jit
def _product_kernel(
    x,
    x_scale,
    scale_row,
    scale_group,
    weight,
    weight_scale,
    out,
    rows,
    columns,
    groups,
    parts,
    ROWS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute a tile of `out` [parts, rows, columns]. A part sums over a range of K. WHOLE: all tiles have all rows."""
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    k = tl.arange(0, 128)
    depth = groups * 128
    begin, end = groups * part // parts, groups * (part + 1) // parts
    # If the last row were read in place of missing ones, all programs would read the same few bytes at a time.
    live = m < rows
    x_at = x + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight + (n % columns).to(tl.int64)[:, None] * depth + k[None, :]
    x_scale_at = x_scale + m * scale_row
    w_scale_at = weight_scale + (tl.program_id(0) * BLOCK_N // 128).to(tl.int64) * groups
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        at = x_at + group * 128
        x_MK = tl.load(at) if WHOLE else tl.load(at, mask=live[:, None], other=0.0)
        w_NK = tl.load(w_at + group * 128)
        scale_M = tl.load(x_scale_at + group * scale_group, mask=live, other=0.0) * tl.load(w_scale_at + group)
        if WEIGHT_FIRST:
            y += tl.dot(w_NK, tl.trans(x_MK)) * scale_M[None, :]
        else:
            y += tl.dot(x_MK, tl.trans(w_NK)) * scale_M[:, None]
    if WEIGHT_FIRST:
        y = tl.trans(y)
    to = out + (part.to(tl.int64) * rows + m[:, None]) * columns + n[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None] & (n < columns)[None, :])


@triton.jit
def _add_up_kernel(partial, out, numbers, parts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < numbers
    y = tl.load(partial + at, mask=live)
    for part in tl.range(1, parts, num_stages=4):
        y += tl.load(partial + part * numbers + at, mask=live)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiling and launch parameters of a product."""

    rows: int
    columns: int
    stages: int
    warps: int
    parts: int = 1  # number of parts of the depth, each computed by its own programs
    weight_first: bool = True  # True if weights are the first operand, so that few rows are the narrow side of a wgmma


def compute_product(
    x: Scaled, weight: Scaled, dtype: torch.dtype, how: Tiling | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product of rows [T, K], fp32 sums rounded to `dtype`. Blocks are 128 × 128; 128 divides K."""
    (rows, depth), columns, device = x.data.shape, len(weight.data), x.data.device
    assert weight.block == (SCALE_BLOCK, SCALE_BLOCK)
    assert depth % SCALE_BLOCK == 0
    if out is None:
        out = torch.empty(rows, columns, dtype=dtype, device=device)
    if how is None and rows > FEW_ROWS and get_capability(device)[0] == HOPPER:
        # Imported only where it runs: Triton before 3.6 and its interpreter cannot import it.
        from dcpbench.kernels import hopper_linear

        hopper_linear.compute_product(x, weight, out, count_multiprocessors(device))
        return out
    how = how or choose_tiling(rows, columns, depth, count_multiprocessors(device), get_shared_memory(device))
    partial = out
    if how.parts > 1:
        partial = torch.empty(how.parts, rows, columns, dtype=torch.float32, device=device)
    _product_kernel[(triton.cdiv(columns, how.columns), triton.cdiv(rows, how.rows), how.parts)](
        x.data,
        x.scale,
        *x.scale.stride(),
        weight.data,
        weight.scale,
        partial,
        rows,
        columns,
        depth // SCALE_BLOCK,
        how.parts,
        ROWS=how.rows,
        WEIGHT_FIRST=how.weight_first,
        BLOCK_N=how.columns,
        STAGES=how.stages,
        WHOLE=rows % how.rows == 0,
        num_warps=how.warps,
        **get_launch_options(device),
    )
    if how.parts > 1:
        block = 512
        _add_up_kernel[(triton.cdiv(out.numel(), block),)](
            partial, out, out.numel(), how.parts, BLOCK=block, **get_launch_options(device)
        )
    return out


@functools.cache
def count_multiprocessors(device: torch.device, interpreted: int = 1) -> int:
    """Return the number of multiprocessors of a GPU; `interpreted` for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@functools.cache
def get_shared_memory(device: torch.device) -> int:
    """Return the shared memory of a multiprocessor in bytes. Triton's interpreter has no limit."""
    return (
        torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else SHARED
    )


@functools.cache
def choose_tiling(rows: int, columns: int, depth: int, multiprocessors: int, shared: int = SHARED) -> Tiling:
    """Return the tiling of a product with the least time by estimate_us()."""
    if rows > FEW_ROWS:
        return Tiling(rows=128, columns=128, stages=3, warps=8, weight_first=False)
    return min(
        iter_tilings(rows, columns, depth, multiprocessors, shared),
        key=lambda how: estimate_us(how, rows, columns, depth, multiprocessors, shared),
    )


def iter_tilings(rows: int, columns: int, depth: int, multiprocessors: int, shared: int = SHARED) -> Iterator[Tiling]:
    """Iterate over the tilings of a product of few rows: one to four parts, or enough to fill the GPU once or twice.

    Of those that take as long the first is chosen: broader programs read rows fewer times.
    """
    tile = max(16, triton.next_power_of_2(rows))
    most = max(1, depth // SCALE_BLOCK // 2)
    for width in (128, 64) if tile < FEW_ROWS else (64,):
        blocks = triton.cdiv(columns, width)
        once = multiprocessors // blocks
        for parts in sorted({1, 2, 3, 4, once, 2 * once}):
            if parts == 1 or (1 < parts <= most and blocks * parts <= 4 * multiprocessors):
                stages = choose_stages(blocks * parts, multiprocessors, (tile + width) * SCALE_BLOCK, shared)
                yield Tiling(rows=tile, columns=width, stages=stages, warps=4, parts=parts)


def estimate_us(how: Tiling, rows: int, columns: int, depth: int, multiprocessors: int, shared: int = SHARED) -> float:
    """Return the modelled time of a product of few rows without its start-up: the slowest programs or the memory read,
    plus adding up.

    The constants were measured on an H200 with layers of DeepSeek-V3 and Kimi-K2, whole and divided by 2, 4 and 8;
    docs/kernels-linear.md.
    """
    stage = (how.rows + how.columns) * SCALE_BLOCK
    share = triton.cdiv(triton.cdiv(columns, how.columns) * how.parts, multiprocessors)
    together = max(1, min(share, shared // (how.stages * stage + RESERVED)))
    rounds = triton.cdiv(share, together) * triton.cdiv(depth // SCALE_BLOCK, how.parts)
    programs = rounds * stage * (1 + SHARING_SLOWDOWN * (together - 1)) / PROGRAM_RATE
    added = ADD_UP_US + how.parts * rows * columns * 4 / ADD_UP_RATE if how.parts > 1 else 0
    return max(programs, columns * depth / MEMORY_RATE) + added


def choose_stages(programs: int, multiprocessors: int, stage_bytes: int, shared: int = SHARED) -> int:
    """Return the lowest number of stages at which a multiprocessor cannot hold more programs than its share.

    Programs of a product may begin while those of the kernel before still run. A multiprocessor takes none with this much
    shared memory until it has none of the others left, and the first ones to be free would take all that fit: a third of
    the GPU then does all of the work.
    """
    together = min(triton.cdiv(programs, multiprocessors), MAX_TOGETHER)
    return max(MIN_STAGES, (shared // (together + 1) - RESERVED) // stage_bytes + 1)
