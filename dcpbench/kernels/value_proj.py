"""W_UV: the merged latent output of each head to its value columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dcpbench.errors import UsageError

MIN_DOT_SIZE = 16  # side of the smallest product that the tensor cores take


def project_values(o_hBR: torch.Tensor, w_uv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return o_hBR @ w_uv[h, R, V] as [B, h, V] in `dtype`.

    An exchange may deliver o in fp32 while the weights are bf16: then the product takes o as it is (tf32), because
    rounding it to bf16 first would add as much error as the attention kernel's own output rounding.
    """
    heads, batch, _ = o_hBR.shape
    out_BhV = torch.empty(batch, heads, w_uv.shape[2], dtype=dtype, device=o_hBR.device)
    if o_hBR.dtype == w_uv.dtype:
        torch.bmm(o_hBR, w_uv, out=out_BhV.transpose(0, 1))
    elif o_hBR.is_cuda:
        project_values_fused(o_hBR, w_uv, out_BhV)
    else:
        project_values_reference(o_hBR, w_uv, out_BhV)
    return out_BhV


def project_values_reference(o_hBR: torch.Tensor, w_uv: torch.Tensor, out_BhV: torch.Tensor) -> None:
    """Slow and obvious, in o's dtype."""
    out_BhV.copy_((o_hBR @ w_uv.to(o_hBR.dtype)).transpose(0, 1))


@triton.jit
def _project_kernel(
    o,
    w,
    out,
    batch,
    heads,
    o_h,
    o_b,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    live = (b < batch)[:, None]
    acc = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        x = tl.load(o + h * o_h + b[:, None] * o_b + r[None, :], mask=live, other=0.0)
        weight = tl.load(w + (h * R + r[:, None]) * V + v[None, :]).to(tl.float32)
        acc += tl.dot(x, weight, input_precision=PRECISION)
    tl.store(out + (b[:, None] * heads + h) * V + v[None, :], acc.to(out.dtype.element_ty), mask=live)


def project_values_fused(
    o_hBR: torch.Tensor, w_uv: torch.Tensor, out_BhV: torch.Tensor, precision: str = "tf32"
) -> None:
    """Project with one kernel, without a cast. R and V must be powers of two of at least 16; o has unit last stride."""
    heads, batch, latent = o_hBR.shape
    value = w_uv.shape[2]
    for what, size in (("latent", latent), ("value", value)):
        if size < MIN_DOT_SIZE or size & (size - 1):
            raise UsageError(
                f"merging in fp32 needs a {what} width that is a power of two of at least {MIN_DOT_SIZE}, not {size}."
            )
    block_b, block_v = min(64, max(16, triton.next_power_of_2(batch))), min(32, value)
    _project_kernel[(heads, triton.cdiv(batch, block_b), value // block_v)](
        o_hBR,
        w_uv,
        out_BhV,
        batch,
        heads,
        o_hBR.stride(0),
        o_hBR.stride(1),
        R=latent,
        V=value,
        BLOCK_B=block_b,
        BLOCK_V=block_v,
        BLOCK_R=min(64, latent),
        PRECISION=precision,
        num_warps=4,
        num_stages=3,
    )
