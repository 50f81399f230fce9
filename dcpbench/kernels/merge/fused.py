"""LSE correction in one Triton kernel, writing heads first as the reduce-scatter wants it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _correct_kernel(
    o, lse, out, batch, heads, rank,
    N: tl.constexpr, N_BLOCK: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        o_BHR, lse_NBH, out_HBR, batch, heads, rank,
        N=lse_NBH.shape[0], N_BLOCK=triton.next_power_of_2(lse_NBH.shape[0]),
        R=latent, BLOCK=triton.next_power_of_2(latent), num_warps=2,
    )  # fmt: skip
    return out_HBR
