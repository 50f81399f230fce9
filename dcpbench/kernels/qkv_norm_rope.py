"""Fused operators after the first projection of MLA: norms of the query's and the KV latent, rope of k.

One kernel replaces four to six, each of which would start and end for a few kilobytes.
"""

from __future__ import annotations

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
from dcpbench.kernels.norm import normalised, normalize_reference
from dcpbench.kernels.rope import apply_rope_reference, turn


def split_latent(
    qkv_BN: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    positions_B: torch.Tensor,
    table: torch.Tensor,
    row_BQ: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
    feeds: torch.Tensor | Scaled | None = None,
) -> torch.Tensor | Rows | None:
    """Fill the KV rows [B, R + P] and return the normalised query latent, for a product with `feeds`.

    Args:
        qkv_BN: query columns, R of the KV latent, P of k's rope part.
        q_norm: None if queries are projected in one step: their columns are left unchanged.
        kv_norm: [R].
        positions_B: as in rope.
        table: as in rope.
        row_BQ: destination of the KV rows; the columns of a row are contiguous.
        eps: epsilon of both norms.
        interleaved: as in rope.
        feeds: with e4m3 weights on a GPU the query latent is quantised, and the plain one is not kept.
    """
    given = (qkv_BN, q_norm, kv_norm, positions_B, table, row_BQ, eps)
    if not qkv_BN.is_cuda:
        return split_latent_reference(*given, interleaved=interleaved)
    return split_latent_fused(*given, interleaved=interleaved, quantise=needs_quantized_input(feeds))


def split_latent_reference(
    qkv_BN: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    positions_B: torch.Tensor,
    table: torch.Tensor,
    row_BQ: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
) -> torch.Tensor | None:
    """Slow and obvious."""
    latent, columns = len(kv_norm), row_BQ.shape[1]
    q, kv_BQ = qkv_BN.split((qkv_BN.shape[1] - columns, columns), dim=-1)
    row_BQ[:, :latent] = normalize_reference(kv_BQ[:, :latent], None, kv_norm, eps)
    apply_rope_reference(kv_BQ[:, None, latent:], positions_B, table, row_BQ[:, None, latent:], interleaved)
    return None if q_norm is None else normalize_reference(q, None, q_norm, eps)


@triton.jit
def _normalised(x, weight, width, eps, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    inside = d < width
    value, factors = tl.load(x + d, mask=inside, other=0.0), tl.load(weight + d, mask=inside, other=0.0)
    return normalised(value, factors, width, eps)


@triton.jit(do_not_specialize=SCALE_STRIDES)
def _latent_kernel(
    qkv,
    q_norm,
    kv_norm,
    positions,
    table,
    out,
    row,
    qkv_stride,
    row_stride,
    q_width,
    latent,
    eps,
    data,
    scale,
    scale_row,
    scale_group,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMS_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    QUANTISED: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Process a row's KV columns in its first program, and its query latent in the second one, if there is one."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    qkv += b * qkv_stride
    if tl.program_id(1) == 0:
        r = tl.arange(0, BLOCK_R)
        normed = _normalised(qkv + q_width, kv_norm, latent, eps, BLOCK_R)
        tl.store(row + b * row_stride + r, normed, mask=r < latent)
        at = tl.load(positions + b).to(tl.int64) * 2 * HALF
        cos = tl.load(table + at + tl.arange(0, HALF))[None, :]
        sin = tl.load(table + at + HALF + tl.arange(0, HALF))[None, :]
        one = tl.full([1, 1], 0, tl.int64)
        turn(
            qkv + q_width + latent + one, row + b * row_stride + latent + one, cos, sin, one == 0, 1, HALF, INTERLEAVED
        )
    elif NORMS_Q:
        q = _normalised(qkv, q_norm, q_width, eps, BLOCK_Q)
        if QUANTISED:
            store_quantised(
                q.to(tl.float32), data, scale, scale_row, scale_group, b, 0, q_width, BLOCK_Q, LEAST, LARGEST, NATIVE
            )
        else:
            d = tl.arange(0, BLOCK_Q)
            tl.store(out + b * q_width + d, q, mask=d < q_width)


def split_latent_fused(
    qkv_BN: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    positions_B: torch.Tensor,
    table: torch.Tensor,
    row_BQ: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
    quantise: bool = False,
) -> torch.Tensor | Rows | None:
    """Split with one kernel of one or two programs per row. `quantise` a query latent of a multiple of 128 columns."""
    batch, latent, columns = len(qkv_BN), len(kv_norm), row_BQ.shape[1]
    q_width = qkv_BN.shape[1] - columns
    out = rows = None
    if q_norm is not None and quantise:
        rows = allocate_rows(batch, q_width, qkv_BN.device)
    elif q_norm is not None:
        out = torch.empty(batch, q_width, dtype=qkv_BN.dtype, device=qkv_BN.device)
    block_q, block_r = triton.next_power_of_2(q_width), triton.next_power_of_2(latent)
    _latent_kernel[(batch, 1 if q_norm is None else 2)](
        qkv_BN,
        q_norm,
        kv_norm,
        positions_B,
        table,
        out,
        row_BQ,
        qkv_BN.stride(0),
        row_BQ.stride(0),
        q_width,
        latent,
        eps,
        HALF=(columns - latent) // 2,
        INTERLEAVED=interleaved,
        NORMS_Q=q_norm is not None,
        BLOCK_Q=block_q,
        BLOCK_R=block_r,
        num_warps=max(1, min(8, max(block_q if q_norm is not None else 0, block_r) // 512)),
        **make_store_arguments(rows),
    )
    return out if rows is None else Rows(rows, qkv_BN.dtype)
