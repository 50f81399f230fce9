"""Packing and merging messages, one Triton kernel each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.pack import Message

BLOCK = 2048
"""Numbers that one program copies."""


@triton.jit
def _pack_kernel(
    o,
    lse,
    out_o,
    out_lse,
    heads,
    length,
    message_o,
    message_lse,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    # What a request has for one rank is contiguous on both sides: h·R numbers.
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    values = tl.load(o + (b * N + n) * length + at, mask=live)
    tl.store(out_o + n * message_o + b * length + at, values, mask=live)
    if tl.program_id(2) == 0:
        h = tl.arange(0, BLOCK_H)
        lse_h = tl.load(lse + (b * N + n) * heads + h, mask=h < heads)
        tl.store(out_lse + n * message_lse + b * heads + h, lse_h, mask=h < heads)


@triton.jit
def _combine_kernel(
    o,
    lse,
    out,
    heads,
    message_o,
    message_lse,
    out_h,
    out_b,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    row = b * heads + h
    n = tl.arange(0, N_BLOCK)
    lse_n = tl.load(lse + n.to(tl.int64) * message_lse + row, mask=n < N, other=float("-inf"))
    top = tl.max(lse_n, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse_n - pivot), 0)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    r = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(N):
        weight = tl.exp(tl.load(lse + tl.full([], i, tl.int64) * message_lse + row) - pivot) * scale
        # Read without waiting for the weight; an empty shard's o may be anything, NaN included, so it is not used.
        part = tl.load(o + tl.full([], i, tl.int64) * message_o + row * R + r, mask=r < R, other=0.0)
        acc += tl.where(weight > 0.0, part.to(tl.float32) * weight, 0.0)
    tl.store(out + h * out_h + b * out_b + r, acc.to(out.dtype.element_ty), mask=r < R)


def pack(o_BHR: torch.Tensor, lse_BH: torch.Tensor, message: Message, wire_NW: torch.Tensor) -> None:
    """See kernels.pack.pack."""
    o_NBhR, lse_NBh = message.views(wire_NW)
    ranks, length = wire_NW.shape[0], message.heads * message.columns
    _pack_kernel[(message.batch, ranks, triton.cdiv(length, BLOCK))](
        o_BHR,
        lse_BH,
        o_NBhR,
        lse_NBh,
        message.heads,
        length,
        o_NBhR.stride(0),
        lse_NBh.stride(0),
        N=ranks,
        BLOCK=BLOCK,
        BLOCK_H=triton.next_power_of_2(message.heads),
        num_warps=4,
    )


def combine(wire_NW: torch.Tensor, message: Message, out_hBR: torch.Tensor) -> None:
    """See kernels.pack.combine."""
    o_NBhR, lse_NBh = message.views(wire_NW)
    ranks = wire_NW.shape[0]
    _combine_kernel[(message.batch, message.heads)](
        o_NBhR,
        lse_NBh,
        out_hBR,
        message.heads,
        o_NBhR.stride(0),
        lse_NBh.stride(0),
        out_hBR.stride(0),
        out_hBR.stride(1),
        N=ranks,
        N_BLOCK=triton.next_power_of_2(ranks),
        R=message.columns,
        BLOCK=triton.next_power_of_2(message.columns),
        num_warps=2,
    )
