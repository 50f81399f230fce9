"""Rotary embedding in one Triton kernel, all heads of a request in one program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _rope_kernel(
    x,
    positions,
    table,
    out,
    x_b,
    x_h,
    out_b,
    out_h,
    heads,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, HALF)
    position = tl.load(positions + b).to(tl.int64)
    cos = tl.load(table + position * 2 * HALF + i)[None, :]
    sin = tl.load(table + position * 2 * HALF + HALF + i)[None, :]
    live = (h < heads)[:, None]
    source = x + b * x_b + h[:, None] * x_h + i[None, :] * STEP
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + SHIFT, mask=live, other=0.0).to(tl.float32)
    target = out + b * out_b + h[:, None] * out_h + i[None, :] * STEP
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=live)
    tl.store(target + SHIFT, (second * cos + first * sin).to(out.dtype.element_ty), mask=live)


def rope(
    x_BhP: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor, out_BhP: torch.Tensor, *, interleaved: bool
) -> None:
    """See kernels.rope.rope."""
    batch, heads, width = x_BhP.shape
    block = min(32, triton.next_power_of_2(heads))
    _rope_kernel[(batch, triton.cdiv(heads, block))](
        x_BhP,
        positions_B,
        table,
        out_BhP,
        x_BhP.stride(0),
        x_BhP.stride(1),
        out_BhP.stride(0),
        out_BhP.stride(1),
        heads,
        HALF=width // 2,
        STEP=2 if interleaved else 1,
        SHIFT=1 if interleaved else width // 2,
        BLOCK_H=block,
        num_warps=2,
    )
