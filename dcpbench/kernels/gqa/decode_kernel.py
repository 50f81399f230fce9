"""Paged decode attention with grouped query heads in Triton: for every GPU and dtype, and for the interpreter.

A program attends with all query heads that share a KV head, so that each K and V row is read once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcpbench.kernels.attention.partition import pieces, share, slot_of
from dcpbench.kernels.attention.plain_mla import MIN_TOP


@triton.jit
def _add_tile(
    q_GX, key_KX, value_KX, seen_GK, top, total, acc, scale_log2, PRECISION: tl.constexpr, QUERY_LENGTH: tl.constexpr
):
    """Advance the running softmax by a tile of rows, of which each query sees those in `seen_GK`. `top` is the maximum of
    the scores times log2(e).
    """
    score = tl.dot(q_GX, tl.trans(key_KX), input_precision=PRECISION)
    score = tl.where(seen_GK, score * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))  # of one query row finite: each tile of a request has a live row
    if QUERY_LENGTH > 1:
        new_top = tl.maximum(new_top, MIN_TOP)
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(q_GX.dtype), value_KX, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _load_pages(table, k, length, PAGE: tl.constexpr):
    """Return the pages of rows `k`."""
    return tl.load(table + k // PAGE, mask=k < length, other=0)


@triton.jit
def _attend_tiles(
    q_GX,
    kv,
    value_at,
    table,
    t0,
    t1,
    length,
    length_G,
    row_stride,
    scale_log2,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_LENGTH: tl.constexpr,
):
    """Return top, total and acc of the tiles [t0, t1) of a request; see `_add_tile`.

    `kv` is where the K head of the first row begins, and `value_at` the distance from there to its V head. Page numbers are
    loaded one tile ahead. If a tile lies in one page, K rows behind the last one are read, but not used.
    """
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_K == 0
    top = tl.full([q_GX.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_GX.shape[0]], tl.float32)
    acc = tl.zeros(q_GX.shape, tl.float32)
    in_tile = tl.arange(0, BLOCK_K)
    x = tl.arange(0, q_GX.shape[1])[None, :]
    at_KX = in_tile[:, None] * row_stride + x
    page = (
        tl.load(table + t0 * BLOCK_K // PAGE) if ONE_PAGE else _load_pages(table, t0 * BLOCK_K + in_tile, length, PAGE)
    )
    for t in range(t0, t1):
        k = t * BLOCK_K + in_tile
        live_k = k < length
        if ONE_PAGE:
            ahead = (t + 1) * BLOCK_K
            next_page = tl.load(table + ahead // PAGE, mask=ahead < length, other=0)
            key_KX = kv + (page.to(tl.int64) * PAGE + t * BLOCK_K % PAGE) * row_stride + at_KX
            keys = tl.load(key_KX)
        else:
            next_page = _load_pages(table, k + BLOCK_K, length, PAGE)
            key_KX = kv + (page.to(tl.int64) * PAGE + k % PAGE)[:, None] * row_stride + x
            keys = tl.load(key_KX, mask=live_k[:, None], other=0.0)
        page = next_page
        values = tl.load(key_KX + value_at, mask=live_k[:, None], other=0.0)
        # e4m3 is converted to the dtype of the computation, which represents it exactly.
        keys, values = keys.to(q_GX.dtype), values.to(q_GX.dtype)
        seen_GK = k[None, :] < (length_G[:, None] if QUERY_LENGTH > 1 else length)
        top, total, acc = _add_tile(q_GX, keys, values, seen_GK, top, total, acc, scale_log2, PRECISION, QUERY_LENGTH)
    return top, total, acc


@triton.jit
def decode_kernel(
    q,
    kv,
    tables,
    lengths,
    row_lengths,
    part_o,
    part_lse,
    pieces_of,
    o,
    lse,
    scale_log2,
    value_scale,
    ln2,
    table_stride,
    kv_heads,
    batch,
    parts,
    GROUP: tl.constexpr,
    X: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAST: tl.constexpr,
    SLACK: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_LENGTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Run one program per share of the batch, KV head and block of its queries; see partition.share and merge_kernel.

    `batch` counts requests. Queries of a KV head are GROUP heads of each of QUERY_LENGTH query rows; see
    plain_mla.plain_kernel.

    Programs of the same share run side by side, and read the K and V heads of the same rows. EARLY: see
    block_scaled.get_launch_options.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    QUERIES: tl.constexpr = QUERY_LENGTH * GROUP
    GROUP_BLOCKS: tl.constexpr = (QUERIES + BLOCK_G - 1) // BLOCK_G
    part = tl.program_id(0) // (kv_heads * GROUP_BLOCKS)
    block = tl.program_id(0) % (kv_heads * GROUP_BLOCKS)
    kv_head = block // GROUP_BLOCKS
    heads = kv_heads * QUERIES
    b_B = tl.arange(0, BLOCK_B)
    lengths_B = tl.load(lengths + b_B, mask=b_B < batch, other=0)
    first, start, begin, end, size = share(lengths_B, b_B, part, parts, batch, BLOCK_K, LEAST, SLACK)

    g = block % GROUP_BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
    h = g // GROUP * kv_heads * GROUP + kv_head * GROUP + g % GROUP
    x = tl.arange(0, X)
    live_h = g < QUERIES
    row_stride = 2 * kv_heads * X
    value_at = kv_heads * X
    b = first
    while start < end:
        length = tl.load(lengths + b)
        tiles = tl.cdiv(length, BLOCK_K)
        t0 = tl.maximum(begin - start, 0)
        t1 = tl.minimum(tiles, end - start)
        if t0 < t1:
            row_h = b.to(tl.int64) * heads + h
            q_GX = tl.load(q + row_h[:, None] * X + x[None, :], mask=live_h[:, None], other=0.0)
            length_G = tl.load(row_lengths + b * QUERY_LENGTH + g // GROUP, mask=live_h, other=0)
            table = tables + b.to(tl.int64) * table_stride
            top, total, acc = _attend_tiles(
                q_GX,
                kv + kv_head * X,
                value_at,
                table,
                t0,
                t1,
                length,
                length_G,
                row_stride,
                scale_log2,
                PAGE,
                BLOCK_K,
                PRECISION,
                QUERY_LENGTH,
            )

            safe = tl.where(total == 0.0, 1.0, total) if QUERY_LENGTH > 1 else total
            log2_sum = tl.where(total == 0.0, float("-inf"), top + tl.log2(safe))
            acc = acc * (value_scale / safe)[:, None]
            if (t0 == 0) & (t1 == tiles):
                tl.store(o + row_h[:, None] * X + x[None, :], acc.to(o.dtype.element_ty), mask=live_h[:, None])
                tl.store(lse + row_h, log2_sum * ln2, mask=live_h)
                tl.store(pieces_of + 2 * b + 1, 1)
            else:
                row_h = slot_of(part, t1 < tiles).to(tl.int64) * heads + h
                tl.store(part_o + row_h[:, None] * X + x[None, :], acc, mask=live_h[:, None])
                tl.store(part_lse + row_h, log2_sum, mask=live_h)
                if t0 == 0:
                    tl.store(pieces_of + 2 * b, part)
                    tl.store(pieces_of + 2 * b + 1, pieces(tiles, t1, size))
        start += tiles
        b += 1
