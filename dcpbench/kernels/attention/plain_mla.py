"""Paged MLA decode in plain Triton: for every GPU and dtype, and for the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from dcpbench.kernels.attention.partition import pieces, share, slot_of

MIN_TOP = tl.constexpr(-1e30)  # floor of a row's maximum: a row that sees nothing has -inf, and -inf - -inf is NaN


@triton.jit
def _add_tile(
    q_latent,
    q_rope,
    row_k,
    live_k,
    seen_hk,
    top,
    total,
    acc,
    scale_log2,
    R: tl.constexpr,
    P: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_LENGTH: tl.constexpr,
):
    """Advance the running softmax by the rows at `row_k`, of which query row h sees those in `seen_hk`. `top` is the
    maximum of the scores times log2(e).
    """
    r = tl.arange(0, R)
    p = tl.arange(0, P)
    # e4m3 is converted to the dtype of the computation, which represents it exactly.
    latent = tl.load(row_k[:, None] + r[None, :], mask=live_k[:, None], other=0.0).to(q_latent.dtype)
    rope = tl.load(row_k[:, None] + R + p[None, :], mask=live_k[:, None], other=0.0).to(q_latent.dtype)
    score = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
    score += tl.dot(q_rope, tl.trans(rope), input_precision=PRECISION)
    score = tl.where(seen_hk, score * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))  # of one query row finite: each tile of a request has a live row
    if QUERY_LENGTH > 1:
        new_top = tl.maximum(new_top, MIN_TOP)
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def plain_kernel(
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
    heads,
    batch,
    parts,
    page_size,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAST: tl.constexpr,
    SLACK: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_LENGTH: tl.constexpr,
):
    """Run one program per share of the batch and block of heads; see partition.share and merge_kernel.

    `batch` counts requests, and `heads` the heads of all QUERY_LENGTH query rows of a request, row after row, so that
    each tile of KV rows is loaded once for all of them. Row i sees the first `row_lengths[b, i]` KV rows, and `lengths`
    holds the number that the last one sees.
    """
    head_blocks = tl.cdiv(heads, BLOCK_H)
    part = tl.program_id(0) // head_blocks
    Q: tl.constexpr = R + P
    b_B = tl.arange(0, BLOCK_B)
    lengths_B = tl.load(lengths + b_B, mask=b_B < batch, other=0)
    first, start, begin, end, size = share(lengths_B, b_B, part, parts, batch, BLOCK_K, LEAST, SLACK)

    h = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    r = tl.arange(0, R)
    p = tl.arange(0, P)
    live_h = h < heads
    b = first
    while start < end:
        length = tl.load(lengths + b)
        tiles = tl.cdiv(length, BLOCK_K)
        t0 = tl.maximum(begin - start, 0)
        t1 = tl.minimum(tiles, end - start)
        if t0 < t1:
            row_h = b.to(tl.int64) * heads + h
            q_latent = tl.load(q + row_h[:, None] * Q + r[None, :], mask=live_h[:, None], other=0.0)
            q_rope = tl.load(q + row_h[:, None] * Q + R + p[None, :], mask=live_h[:, None], other=0.0)
            length_h = tl.load(row_lengths + b * QUERY_LENGTH + h // (heads // QUERY_LENGTH), mask=live_h, other=0)
            top = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, R], tl.float32)
            for t in range(t0, t1):
                k = t * BLOCK_K + tl.arange(0, BLOCK_K)
                page = tl.load(tables + b.to(tl.int64) * table_stride + k // page_size, mask=k < length, other=0)
                row_k = kv + (page.to(tl.int64) * page_size + k % page_size) * Q
                seen_hk = k[None, :] < (length_h[:, None] if QUERY_LENGTH > 1 else length)
                top, total, acc = _add_tile(
                    q_latent,
                    q_rope,
                    row_k,
                    k < length,
                    seen_hk,
                    top,
                    total,
                    acc,
                    scale_log2,
                    R,
                    P,
                    PRECISION,
                    QUERY_LENGTH,
                )

            safe = tl.where(total == 0.0, 1.0, total) if QUERY_LENGTH > 1 else total
            log2_sum = tl.where(total == 0.0, float("-inf"), top + tl.log2(safe))
            acc = acc * (value_scale / safe)[:, None]
            if (t0 == 0) & (t1 == tiles):
                tl.store(o + row_h[:, None] * R + r[None, :], acc.to(o.dtype.element_ty), mask=live_h[:, None])
                tl.store(lse + row_h, log2_sum * ln2, mask=live_h)
                tl.store(pieces_of + 2 * b + 1, 1)
            else:
                row_h = slot_of(part, t1 < tiles).to(tl.int64) * heads + h
                tl.store(part_o + row_h[:, None] * R + r[None, :], acc, mask=live_h[:, None])
                tl.store(part_lse + row_h, log2_sum, mask=live_h)
                if t0 == 0:
                    tl.store(pieces_of + 2 * b, part)
                    tl.store(pieces_of + 2 * b + 1, pieces(tiles, t1, size))
        start += tiles
        b += 1
