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
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, HALF)
    position = tl.load(positions + b).to(tl.int64)
    cos = tl.load(table + position * 2 * HALF + i)[None, :]
    sin = tl.load(table + position * 2 * HALF + HALF + i)[None, :]
    live = (h < heads)[:, None]
    x += b * x_b + h[:, None] * x_h
    out += b * out_b + h[:, None] * out_h
    if INTERLEAVED:  # pairs are loaded and stored whole: alternate columns alone are 12 times as slow
        p = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.load(x + p, mask=live, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, [BLOCK_H, HALF, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(out + p, tl.reshape(turned, [BLOCK_H, 2 * HALF]).to(out.dtype.element_ty), mask=live)
    else:
        first = tl.load(x + i[None, :], mask=live, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + i[None, :], mask=live, other=0.0).to(tl.float32)
        tl.store(out + i[None, :], (first * cos - second * sin).to(out.dtype.element_ty), mask=live)
        tl.store(out + HALF + i[None, :], (second * cos + first * sin).to(out.dtype.element_ty), mask=live)


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
        INTERLEAVED=interleaved,
        BLOCK_H=block,
        num_warps=2,
    )
