"""Norms of the heads of q and k, and rope, after the joint projection of grouped-query attention.

One kernel replaces five, each of which would start and end for a few kilobytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dcpbench.kernels.norm import normalize_reference
from dcpbench.kernels.rope import apply_rope_reference

if TYPE_CHECKING:
    import torch

HEADS = 8  # heads of one program


def split_heads(
    qkv_BN: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions_B: torch.Tensor,
    table: torch.Tensor,
    q_BhX: torch.Tensor,
    row_BW: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Write queries and KV rows from the output of a joint projection, the heads of q ‖ k ‖ v, X columns each.

    Args:
        qkv_BN: rows may be strided.
        q_norm: [X], for each head of q, before rope; None if heads are not normalised.
        k_norm: [X], for each head of k; None if heads are not normalised.
        positions_B: as in rope.
        table: as in rope; pairs are columns (i, i + X/2).
        q_BhX: destination of queries.
        row_BW: destination of KV rows, heads of k and then of v.
        eps: epsilon of both norms.
    """
    split = split_heads_fused if qkv_BN.is_cuda else split_heads_reference
    split(qkv_BN, q_norm, k_norm, positions_B, table, q_BhX, row_BW, eps)


def split_heads_reference(
    qkv_BN: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions_B: torch.Tensor,
    table: torch.Tensor,
    q_BhX: torch.Tensor,
    row_BW: torch.Tensor,
    eps: float,
) -> None:
    """Slow and obvious."""
    heads, width = q_BhX.shape[1:]
    kv_heads = row_BW.shape[1] // (2 * width)
    q, k, v = qkv_BN.unflatten(-1, (heads + 2 * kv_heads, width)).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None:
        q = normalize_reference(q, None, q_norm, eps)
    if k_norm is not None:
        k = normalize_reference(k, None, k_norm, eps)
    rows = row_BW.unflatten(-1, (2 * kv_heads, width))
    apply_rope_reference(q, positions_B, table, q_BhX, interleaved=False)
    apply_rope_reference(k, positions_B, table, rows[:, :kv_heads], interleaved=False)
    rows[:, kv_heads:] = v


@triton.jit
def _split_kernel(
    qkv,
    q_norm,
    k_norm,
    positions,
    table,
    q,
    row,
    qkv_stride,
    q_stride,
    row_stride,
    heads,
    kv_heads,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Process HEADS heads of a row; heads of k and v lie one behind the other in a KV row, as in qkv."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)[None, :]
    of_q = (h < heads)[:, None]
    of_kv = ((h >= heads) & (h < heads + 2 * kv_heads))[:, None]
    rotated = (h < heads + kv_heads)[:, None]
    source = qkv + b * qkv_stride + h[:, None] * (2 * HALF) + i
    low = tl.load(source, mask=of_q | of_kv, other=0.0)
    high = tl.load(source + HALF, mask=of_q | of_kv, other=0.0)
    if NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        low_weight = tl.where(of_q, tl.load(q_norm + i), tl.load(k_norm + i))
        high_weight = tl.where(of_q, tl.load(q_norm + HALF + i), tl.load(k_norm + HALF + i))
        low = tl.where(rotated, (wide_low * factor).to(low.dtype) * low_weight, low)
        high = tl.where(rotated, (wide_high * factor).to(high.dtype) * high_weight, high)
    at = tl.load(positions + b).to(tl.int64) * (2 * HALF)
    cos, sin = tl.load(table + at + i), tl.load(table + at + HALF + i)
    first, second = low.to(tl.float32), high.to(tl.float32)
    low = tl.where(rotated, (first * cos - second * sin).to(low.dtype), low)
    high = tl.where(rotated, (second * cos + first * sin).to(high.dtype), high)
    to_q = q + b * q_stride + h[:, None] * (2 * HALF) + i
    tl.store(to_q, low, mask=of_q)
    tl.store(to_q + HALF, high, mask=of_q)
    to_row = row + b * row_stride + (h[:, None] - heads) * (2 * HALF) + i
    tl.store(to_row, low, mask=of_kv)
    tl.store(to_row + HALF, high, mask=of_kv)


def split_heads_fused(
    qkv_BN: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions_B: torch.Tensor,
    table: torch.Tensor,
    q_BhX: torch.Tensor,
    row_BW: torch.Tensor,
    eps: float,
) -> None:
    """Split with one kernel; X is a power of two, and heads of q and of rows are contiguous."""
    batch, heads, width = q_BhX.shape
    kv_heads = row_BW.shape[1] // (2 * width)
    assert (q_norm is None) == (k_norm is None)
    assert q_BhX.stride()[1:] == (width, 1)
    _split_kernel[(batch, triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv_BN,
        q_norm,
        k_norm,
        positions_B,
        table,
        q_BhX,
        row_BW,
        qkv_BN.stride(0),
        q_BhX.stride(0),
        row_BW.stride(0),
        heads,
        kv_heads,
        eps,
        HALF=width // 2,
        NORM=q_norm is not None,
        HEADS=HEADS,
        num_warps=4,
    )
