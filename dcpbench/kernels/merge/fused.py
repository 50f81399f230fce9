"""LSE correction in one Triton kernel, writing heads first as the reduce-scatter wants it, and merging in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _correct_kernel(
    o,
    lse,
    out,
    batch,
    heads,
    rank,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    stride = batch * heads
    n = tl.arange(0, N_BLOCK)
    lse_n = tl.load(lse + n * stride + b * heads + h, mask=n < N, other=float("-inf"))
    top = tl.max(lse_n, 0)
    power = tl.exp(lse_n - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(power, 0)
    mine = tl.sum(tl.where(n == rank, power, 0.0), 0)
    weight = mine / tl.where(total == 0.0, 1.0, total)
    r = tl.arange(0, BLOCK)
    inside = r < R
    # Read without waiting for the weight; an empty shard's o may be anything, NaN included, so it is not used.
    values = tl.load(o + (b * heads + h) * R + r, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + (h * batch + b) * R + r, tl.where(mine > 0.0, values * weight, 0.0).to(out.dtype.element_ty), mask=inside
    )


def correct(o_BHR: torch.Tensor, lse_NBH: torch.Tensor, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.merge.correct."""
    batch, heads, latent = o_BHR.shape
    out_HBR = torch.empty(heads, batch, latent, dtype=dtype, device=o_BHR.device)
    _correct_kernel[(batch, heads)](
        o_BHR,
        lse_NBH,
        out_HBR,
        batch,
        heads,
        rank,
        N=lse_NBH.shape[0],
        N_BLOCK=triton.next_power_of_2(lse_NBH.shape[0]),
        R=latent,
        BLOCK=triton.next_power_of_2(latent),
        num_warps=2,
    )
    return out_HBR


@triton.jit(do_not_specialize=["lse_t", "lse_h", "more_lse_t", "more_lse_h"])
def _merge_into_kernel(
    o,
    lse,
    more,
    more_lse,
    heads,
    lse_t,
    lse_h,
    more_t,
    more_h,
    more_lse_t,
    more_lse_h,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < heads
    lse_a = tl.load(lse + t * lse_t + h * lse_h, mask=live, other=float("-inf"))
    lse_b = tl.load(more_lse + t * more_lse_t + h * more_lse_h, mask=live, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    power_a = tl.exp(lse_a - finite)
    power_b = tl.exp(lse_b - finite)
    total = power_a + power_b
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    v = tl.arange(0, BLOCK)
    inside = live[:, None] & (v < V)[None, :]
    place = o + (t * heads + h)[:, None] * V + v[None, :]
    a = tl.load(place, mask=inside, other=0.0)
    b = tl.load(more + t * more_t + h[:, None] * more_h + v[None, :], mask=inside, other=0.0).to(tl.float32)
    merged = tl.where(power_a[:, None] > 0.0, a * (power_a / total)[:, None], 0.0)
    merged += tl.where(power_b[:, None] > 0.0, b * (power_b / total)[:, None], 0.0)
    tl.store(place, merged, mask=inside)
    tl.store(lse + t * lse_t + h * lse_h, tl.where(nothing, float("-inf"), finite + tl.log(total)), mask=live)


def merge_into(o_ThV: torch.Tensor, lse_Th: torch.Tensor, more_ThV: torch.Tensor, more_Th: torch.Tensor) -> None:
    """See kernels.merge.merge_into."""
    rows, heads, value = o_ThV.shape
    block = min(8, triton.next_power_of_2(heads))
    _merge_into_kernel[(rows, triton.cdiv(heads, block))](
        o_ThV,
        lse_Th,
        more_ThV,
        more_Th,
        heads,
        *lse_Th.stride(),
        *more_ThV.stride()[:2],
        *more_Th.stride(),
        V=value,
        BLOCK=triton.next_power_of_2(value),
        BLOCK_H=block,
        num_warps=4,
    )
