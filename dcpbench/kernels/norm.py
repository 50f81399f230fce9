"""RMSNorm (Zhang and Sennrich 2019), alone and with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from dcpbench.kernels.block_scaled import (
    SCALE_STRIDES,
    Rows,
    Scaled,
    allocate_rows,
    make_store_arguments,
    needs_quantized_input,
    store_quantised,
)

if TYPE_CHECKING:
    from dcpbench.kernels.int4 import Int4


class Mark(NamedTuple):
    """Marker that a norm writes when it begins, which shows the host the progress of a step, also within a graph."""

    at: torch.Tensor  # int32 [1], in pinned host memory if there is a GPU
    number: int


def add_rms_norm(
    x_BD: torch.Tensor, residual_BD: torch.Tensor, weight_D: torch.Tensor, eps: float, mark: Mark | None = None
) -> torch.Tensor:
    """Add x to residual in place. Return weight · residual / sqrt(mean(residual²) + eps) in x's dtype, mean in fp32."""
    return (normalize_fused if x_BD.is_cuda else normalize_reference)(x_BD, residual_BD, weight_D, eps, mark)


def normalize_for(
    feeds: torch.Tensor | Scaled | Int4 | None,
    x_BD: torch.Tensor,
    residual_BD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    mark: Mark | None = None,
    *,
    keep: bool = True,
) -> torch.Tensor | Rows:
    """Normalise x, with or without a residual, for a product with the weight `feeds`.

    The result is quantised if the product needs it; with `keep` it is also returned unquantised. Rows of x may be
    strided.
    """
    if needs_quantized_input(feeds):
        return normalize_rows(x_BD, residual_BD, weight_D, eps, mark, keep=keep)
    return (normalize_fused if x_BD.is_cuda else normalize_reference)(x_BD, residual_BD, weight_D, eps, mark)


def normalize_reference(
    x_BD: torch.Tensor,
    residual_BD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    mark: Mark | None = None,
) -> torch.Tensor:
    """Slow and obvious."""
    if mark is not None:
        mark.at[0] = mark.number
    if residual_BD is not None:
        residual_BD += x_BD
        x_BD = residual_BD
    wide = x_BD.to(torch.promote_types(x_BD.dtype, torch.float32))
    return weight_D * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x_BD.dtype)


@triton.jit
def normalised(value, weight, width, eps):
    """Return a row, 0 past its `width`, times `weight` over its root mean square."""
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    return (wide * factor).to(value.dtype) * weight


@triton.jit(do_not_specialize=["number", *SCALE_STRIDES])
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    width,
    eps,
    mark,
    number,
    data,
    scale,
    scale_row,
    scale_group,
    ADD: tl.constexpr,
    MARK: tl.constexpr,
    KEEP: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    if MARK:  # noqa: SIM102 -- the first is known when it is compiled
        if b == 0:
            tl.store(mark, number)
    d = tl.arange(0, BLOCK)
    inside = d < width
    value = tl.load(x + b * x_stride + d, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + b * width + d, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(residual + b * width + d, value, mask=inside)
    normed = normalised(value, tl.load(weight + d, mask=inside, other=0.0), width, eps)
    if KEEP:
        tl.store(out + b * width + d, normed, mask=inside)
    if QUANTISED:
        store_quantised(
            normed.to(tl.float32), data, scale, scale_row, scale_group, b, 0, width, BLOCK, LEAST, LARGEST, NATIVE
        )


def normalize_fused(
    x_BD: torch.Tensor,
    residual_BD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    mark: Mark | None = None,
) -> torch.Tensor:
    """Normalise with one kernel of one program per row. The first program writes the mark."""
    out_BD = torch.empty(x_BD.shape, dtype=x_BD.dtype, device=x_BD.device)
    _launch_norm(x_BD, residual_BD, weight_D, eps, mark, out_BD, None)
    return out_BD


def normalize_rows(
    x_BD: torch.Tensor,
    residual_BD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    mark: Mark | None = None,
    *,
    keep: bool = True,
) -> Rows:
    """Run normalize_fused and quantize_rows in one kernel, bit-identical; D must be a multiple of 128. `keep`: also return
    plain rows.
    """
    out_BD = torch.empty(x_BD.shape, dtype=x_BD.dtype, device=x_BD.device) if keep else None
    rows = allocate_rows(len(x_BD), x_BD.shape[1], x_BD.device)
    _launch_norm(x_BD, residual_BD, weight_D, eps, mark, out_BD, rows)
    return Rows(rows, x_BD.dtype, out_BD)


def _launch_norm(
    x_BD: torch.Tensor,
    residual_BD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    mark: Mark | None,
    out_BD: torch.Tensor | None,
    rows: Scaled | None,
) -> None:
    batch, width = x_BD.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(batch,)](
        x_BD,
        residual_BD,
        weight_D,
        out_BD,
        x_BD.stride(0),
        width,
        eps,
        mark.at if mark else None,
        mark.number if mark else 0,
        ADD=residual_BD is not None,
        MARK=mark is not None,
        KEEP=out_BD is not None,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **make_store_arguments(rows),
    )
