"""Paged MLA decode over KV rows in e4m3, for Hopper in Gluon: scored in e4m3, values widened to fp16 on the chip.

A warpgroup loads rows and widens them, one rounds q and scores, two add up halves of the values. The tensor cores take
e4m3 for scores alone, as operands of e4m3 must lie along the sum: rows do for scores, and lie across it for values.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from dcpbench.kernels.attention.hopper_mla import (
    HALF,
    HEADS,
    ROPE,
    WIDTH,
    _add_values,
    _arrive,
    _barriers,
    _end_piece,
    _page_ids,
    _piece,
    _score_tiles,
    _wait_empty,
    _wait_full,
    share,
)

LARGEST = gl.constexpr(448.0)  # number of e4m3
CHUNK = gl.constexpr(128)  # columns of q that are rounded at once


@gluon.jit
def _widen(tiles, halves, full, v_bars, turn, STAGES: gl.constexpr, V_SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Convert a tile that has arrived to fp16, which represents e4m3 exactly: its left half, then its right half."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    v_full, v_empty = v_bars
    _wait_full(full, turn, STAGES)
    for half in gl.static_range(2):
        n = 2 * turn + half
        values = tiles[half].index(turn % STAGES).load(layout).to(gl.float16)
        _wait_empty(v_empty, n, V_SLOTS)
        halves.index(n % V_SLOTS).store(values)
        fence_async_shared()
        _arrive(v_full, n, V_SLOTS)


@gluon.jit
def _load(
    walk,
    sources,
    kv_tiles,
    halves,
    kv_bars,
    v_bars,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    V_SLOTS: gl.constexpr,
    PAGE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Load the rows of the share into a ring of tiles, widened STAGES - 1 tiles later. Rows past the end become 0."""
    b, length, start, begin, end, lengths, batch, _heads, _head_block = walk
    kv, tables, table_stride = sources
    left, right, rope = kv_tiles
    full, empty = kv_bars
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [WARPS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    wide = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    # The same rows to the same threads, four bytes each.
    thin: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    narrow = gl.arange(0, ROPE, layout=gl.SliceLayout(0, thin))[None, :]
    r = gl.arange(0, BLOCK_K, layout=rows)
    done = 0
    while start < end:
        tiles, t0, t1 = _piece(length, start, begin, end, BLOCK_K)
        if t0 < t1:
            table = tables + b.to(gl.int64) * table_stride
            ids = _page_ids(table, t0 * BLOCK_K + r, length, PAGE)
            next_ids = _page_ids(table, (t0 + 1) * BLOCK_K + r, length, PAGE)
            for t in range(t0, t1):
                k = t * BLOCK_K + r
                # Rows past the end are on no page: -1.
                at = gl.where(k < length, ids * PAGE + k % PAGE, -1)
                kv_rows = kv + (at.to(gl.int64) * WIDTH)[:, None]
                live = (at >= 0)[:, None]
                thin_at = gl.convert_layout(at, gl.SliceLayout(1, thin))
                thin_kv = kv + (thin_at.to(gl.int64) * WIDTH + 2 * HALF)[:, None]
                # Two tiles ahead, so that no copy waits for the number of its page.
                ids = next_ids
                next_ids = _page_ids(table, k + 2 * BLOCK_K, length, PAGE)
                i = done % STAGES
                _wait_empty(empty, done, STAGES)
                async_copy.async_copy_global_to_shared(left.index(i), kv_rows + wide, live)
                async_copy.async_copy_global_to_shared(right.index(i), kv_rows + HALF + wide, live)
                async_copy.async_copy_global_to_shared(rope.index(i), thin_kv + narrow, (thin_at >= 0)[:, None])
                async_copy.mbarrier_arrive(full.index(i), increment_count=False)
                done += 1
                if done >= STAGES:
                    _widen((left, right), halves, full, v_bars, done - STAGES, STAGES, V_SLOTS, WARPS)
        start += tiles
        b += 1
        length = gl.load(lengths + b, mask=b < batch, other=0)
    for turn in range(gl.maximum(done - (STAGES - 1), 0), done):
        _widen((left, right), halves, full, v_bars, turn, STAGES, V_SLOTS, WARPS)


@gluon.jit
def _columns(q_rows, live, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    c = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(q_rows + c, mask=live, other=0.0).to(gl.float32)


@gluon.jit
def _round_q(q_rows, live, q_tiles, layout: gl.constexpr):
    """Write a piece's q in e4m3 to shared memory; return the divisor of each head, which maps its largest number to
    448.
    """
    q_left, q_right, q_rope = q_tiles
    largest = gl.max(gl.abs(_columns(q_rows, live, 2 * HALF, ROPE, layout)), 1)
    for column in gl.static_range(0, 2 * HALF, CHUNK):
        largest = gl.maximum(largest, gl.max(gl.abs(_columns(q_rows, live, column, CHUNK, layout)), 1))
    scale = gl.where(largest > 0.0, largest / LARGEST, 1.0)
    inverse = (1.0 / scale)[:, None]
    q_rope.store((_columns(q_rows, live, 2 * HALF, ROPE, layout) * inverse).to(gl.float8e4nv))
    for column in gl.static_range(0, HALF, CHUNK):
        rounded = (_columns(q_rows, live, column, CHUNK, layout) * inverse).to(gl.float8e4nv)
        q_left.slice(column, CHUNK, dim=1).store(rounded)
        rounded = (_columns(q_rows, live, HALF + column, CHUNK, layout) * inverse).to(gl.float8e4nv)
        q_right.slice(column, CHUNK, dim=1).store(rounded)
    fence_async_shared()
    return scale


@gluon.jit
def _score(
    walk,
    q,
    q_tiles,
    kv_tiles,
    kv_bars,
    hand,
    outs,
    numbers,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    P_SLOTS: gl.constexpr,
):
    """Load q and compute the scores, the running softmax and the log-sum-exps of each piece."""
    b, length, start, begin, end, lengths, batch, heads, head_block = walk
    part, size, scale_log2, value_scale, ln2 = numbers
    full, empty = kv_bars
    MMA_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 32])
    row: gl.constexpr = gl.SliceLayout(1, MMA_S)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h = head_block * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, q_layout))
    done = 0
    turn = 0
    while start < end:
        tiles, t0, t1 = _piece(length, start, begin, end, BLOCK_K)
        if t0 < t1:
            q_rows = q + ((b.to(gl.int64) * heads + h) * WIDTH)[:, None]
            q_scales = _round_q(q_rows, (h < heads)[:, None], q_tiles, q_layout)
            scales_log2 = gl.convert_layout(q_scales, row) * scale_log2
            top, total, done, turn = _score_tiles(
                q_tiles,
                kv_tiles,
                full,
                empty,
                hand,
                scales_log2,
                length,
                t0,
                t1,
                done,
                turn,
                BLOCK_K,
                STAGES,
                P_SLOTS,
                MMA_S,
                True,
            )
            place = (b, heads, head_block, tiles, t0, t1)
            _end_piece(top, total, value_scale, hand, turn, outs, place, (part, size, ln2), BLOCK_K, P_SLOTS, MMA_S)
            turn += 1
        start += tiles
        b += 1
        length = gl.load(lengths + b, mask=b < batch, other=0)


@gluon.jit(do_not_specialize=["table_stride", "heads", "batch", "parts"])
def hopper_fp8_kernel(
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
    heads,
    batch,
    parts,
    PAGE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    V_SLOTS: gl.constexpr,
    P_SLOTS: gl.constexpr,
    LEAST: gl.constexpr,
    SLACK: gl.constexpr,
    LOAD_WARPS: gl.constexpr,
    REGS: gl.constexpr,
):
    """Run one program per share and block of 64 heads. Neighbours share rows, which the second one finds in L2."""
    head_blocks = gl.cdiv(heads, HEADS)
    part = gl.program_id(0) // head_blocks
    head_block = gl.program_id(0) % head_blocks
    # Every warp holds all lengths, so that their sums need no shared memory.
    b_B = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([BLOCK_B // 32], [32], [4], [0]))
    lengths_B = gl.load(lengths + b_B, mask=b_B < batch, other=0)
    first, start, begin, end, size = share(lengths_B, b_B, part, parts, batch, BLOCK_K, LEAST, SLACK)
    length = gl.sum(gl.where(b_B == first, lengths_B, 0), 0)

    e4m3: gl.constexpr = gl.float8e4nv
    rows8: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    rope8: gl.constexpr = gl.NVMMASharedLayout(64, 8, rank=2)
    rows16: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = (
        gl.allocate_shared_memory(e4m3, [HEADS, HALF], rows8),
        gl.allocate_shared_memory(e4m3, [HEADS, HALF], rows8),
        gl.allocate_shared_memory(e4m3, [HEADS, ROPE], rope8),
    )
    kv_tiles = (
        gl.allocate_shared_memory(e4m3, [STAGES, BLOCK_K, HALF], rows8),
        gl.allocate_shared_memory(e4m3, [STAGES, BLOCK_K, HALF], rows8),
        gl.allocate_shared_memory(e4m3, [STAGES, BLOCK_K, ROPE], rope8),
    )
    halves = gl.allocate_shared_memory(gl.float16, [V_SLOTS, BLOCK_K, HALF], rows16)
    p_tile = gl.allocate_shared_memory(gl.float16, [P_SLOTS, HEADS, BLOCK_K], rows16)
    factor_tile = gl.allocate_shared_memory(gl.float32, [P_SLOTS, HEADS], flat)
    full = _barriers(STAGES, 32 * LOAD_WARPS)
    empty = _barriers(STAGES, 1)
    v_full = _barriers(V_SLOTS, 1)
    v_empty = _barriers(V_SLOTS, 1)
    p_full = _barriers(P_SLOTS, 1)
    p_empty = _barriers(P_SLOTS, 2)

    walk = (first, length, start, begin, end, lengths, batch, heads, head_block)
    hand = (p_tile, factor_tile, p_full, p_empty)
    kv_bars = (full, empty)
    numbers = (part, size, scale_log2, value_scale, ln2)
    o_outs = (part_o, o)
    lse_outs = (part_lse, pieces_of, lse)
    sources = (kv, tables, table_stride)
    gl.warp_specialize(
        [
            (
                _add_values,
                (walk, halves, v_full, v_empty, hand, o_outs, part, 0, BLOCK_K, V_SLOTS, P_SLOTS, 2, 0, True),
            ),
            (
                _add_values,
                (walk, halves, v_full, v_empty, hand, o_outs, part, HALF, BLOCK_K, V_SLOTS, P_SLOTS, 2, 1, True),
            ),
            (_score, (walk, q, q_tiles, kv_tiles, kv_bars, hand, lse_outs, numbers, BLOCK_K, STAGES, P_SLOTS)),
            (
                _load,
                (
                    walk,
                    sources,
                    kv_tiles,
                    halves,
                    kv_bars,
                    (v_full, v_empty),
                    BLOCK_K,
                    STAGES,
                    V_SLOTS,
                    PAGE,
                    LOAD_WARPS,
                ),
            ),
        ],
        [4, 4, LOAD_WARPS],
        REGS,
    )
