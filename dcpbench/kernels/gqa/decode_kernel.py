"""Paged decode attention with grouped query heads in Triton: for every GPU and dtype, and for the interpreter.

A program attends with all query heads that share a KV head, so that each K and V row is read once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcpbench.kernels.attention.partition import pieces, share, slot_of


@triton.jit
def _add_tile(q_GX, key_KX, value_KX, live_k, top, total, acc, scale_log2, PRECISION: tl.constexpr):
    """Advance the running softmax by a tile of rows. `top` is the maximum of the scores times log2(e)."""
    score = tl.dot(q_GX, tl.trans(key_KX), input_precision=PRECISION)
    score = tl.where(live_k[None, :], score * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))  # finite: each tile of a request has a live row
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(q_GX.dtype), value_KX, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _attend_tiles(
    q_GX,
    key_x,
    value_x,
    table,
    t0,
    t1,
    length,
    page_size,
    row_stride,
    scale_log2,
    BLOCK_K: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return top, total and acc of the tiles [t0, t1) of a request; see `_add_tile`."""
    top = tl.full([q_GX.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_GX.shape[0]], tl.float32)
    acc = tl.zeros(q_GX.shape, tl.float32)
    page = tl.load(table + t0 * BLOCK_K // page_size)
    for t in range(t0, t1):
        k = t * BLOCK_K + tl.arange(0, BLOCK_K)
        live_k = k < length
        if ONE_PAGE:
            ahead = (t + 1) * BLOCK_K
            next_page = tl.load(table + ahead // page_size, mask=ahead < length, other=0)
            row_k = page.to(tl.int64) * page_size + k % page_size
            page = next_page
        else:
            page_k = tl.load(table + k // page_size, mask=live_k, other=0)
            row_k = page_k.to(tl.int64) * page_size + k % page_size
        at_k = row_k[:, None] * row_stride
        # e4m3 is converted to the dtype of the computation, which represents it exactly.
        key_KX = tl.load(key_x[None, :] + at_k, mask=live_k[:, None], other=0.0).to(q_GX.dtype)
        value_KX = tl.load(value_x[None, :] + at_k, mask=live_k[:, None], other=0.0).to(q_GX.dtype)
        top, total, acc = _add_tile(q_GX, key_KX, value_KX, live_k, top, total, acc, scale_log2, PRECISION)
    return top, total, acc


@triton.jit
def decode_kernel(
    q,
    kv,
    tables,
    lengths,
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
    page_size,
    GROUP: tl.constexpr,
    X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    SLACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run one program per share of the batch, KV head and block of its query heads; see partition.share and merge_kernel.

    ONE_PAGE: a tile of BLOCK_K rows lies in one page. The page of the next tile is loaded one tile ahead.
    """
    GROUP_BLOCKS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    part = tl.program_id(0) // (kv_heads * GROUP_BLOCKS)
    block = tl.program_id(0) % (kv_heads * GROUP_BLOCKS)
    kv_head = block // GROUP_BLOCKS
    heads = kv_heads * GROUP
    b_B = tl.arange(0, BLOCK_B)
    lengths_B = tl.load(lengths + b_B, mask=b_B < batch, other=0)
    first, start, begin, end, size = share(lengths_B, b_B, part, parts, batch, BLOCK_K, LEAST, SLACK)

    g = block % GROUP_BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
    h = kv_head * GROUP + g
    x = tl.arange(0, X)
    live_h = g < GROUP
    row_stride = 2 * kv_heads * X
    key_x = kv + kv_head * X + x
    value_x = key_x + kv_heads * X
    b = first
    while start < end:
        length = tl.load(lengths + b)
        tiles = tl.cdiv(length, BLOCK_K)
        t0 = tl.maximum(begin - start, 0)
        t1 = tl.minimum(tiles, end - start)
        if t0 < t1:
            row_h = b.to(tl.int64) * heads + h
            q_GX = tl.load(q + row_h[:, None] * X + x[None, :], mask=live_h[:, None], other=0.0)
            table = tables + b.to(tl.int64) * table_stride
            top, total, acc = _attend_tiles(
                q_GX,
                key_x,
                value_x,
                table,
                t0,
                t1,
                length,
                page_size,
                row_stride,
                scale_log2,
                BLOCK_K,
                ONE_PAGE,
                PRECISION,
            )
            acc = acc * (value_scale / total)[:, None]
            log2_sum = top + tl.log2(total)
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
