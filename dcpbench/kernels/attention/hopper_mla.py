"""Paged MLA decode for Hopper in Gluon: a warpgroup loads rows, one scores them, two add up halves of the values."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpbench.kernels.attention import partition

share = gluon.jit(partition.share.fn)
slot_of = gluon.jit(partition.slot_of.fn)
count_pieces = gluon.jit(partition.pieces.fn)

HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(576)
# Two products of 128 columns, as ptxas refuses one of 256 where sixteen warps leave a thread 128 registers at entry.
MMA_O = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def _piece(length, start, begin, end, TILE: gl.constexpr):
    """Return the number of a request's tiles, and the range [t0, t1) of them in the share."""
    tiles = (length + (TILE - 1)) // TILE
    return tiles, gl.maximum(begin - start, 0), gl.minimum(tiles, end - start)


@gluon.jit
def _wait_full(bars, turn, SLOTS: gl.constexpr):
    mbarrier.wait(bars.index(turn % SLOTS), (turn // SLOTS) & 1)


@gluon.jit
def _wait_empty(bars, turn, SLOTS: gl.constexpr):
    mbarrier.wait(bars.index(turn % SLOTS), ((turn // SLOTS) & 1) ^ 1)


@gluon.jit
def _arrive(bars, turn, SLOTS: gl.constexpr):
    mbarrier.arrive(bars.index(turn % SLOTS), count=1)


@gluon.jit
def _page_ids(table, k, length, PAGE: gl.constexpr):
    return gl.load(table + k // PAGE, mask=k < length, other=0)


@gluon.jit
def _load(
    walk,
    sources,
    q_tiles,
    kv_tiles,
    q_bars,
    kv_bars,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Load the share's rows into a ring of tiles, and each piece's q before its first tile. Rows past the end are 0."""
    b, length, start, begin, end, lengths, batch, heads, head_block = walk
    q, kv, tables, table_stride = sources
    q_left, q_right, q_rope = q_tiles
    left, right, rope = kv_tiles
    q_full, q_empty = q_bars
    full, empty = kv_bars
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    wide = gl.arange(0, HALF, layout=columns)[None, :]
    narrow = gl.arange(0, ROPE, layout=columns)[None, :]
    h = head_block * HEADS + gl.arange(0, HEADS, layout=rows)
    r = gl.arange(0, BLOCK_K, layout=rows)
    done = 0
    nth = 0
    while start < end:
        tiles, t0, t1 = _piece(length, start, begin, end, BLOCK_K)
        if t0 < t1:
            table = tables + b.to(gl.int64) * table_stride
            ids = _page_ids(table, t0 * BLOCK_K + r, length, PAGE)
            next_ids = _page_ids(table, (t0 + 1) * BLOCK_K + r, length, PAGE)
            mbarrier.wait(q_empty, (nth & 1) ^ 1)
            q_rows = q + ((b.to(gl.int64) * heads + h) * WIDTH)[:, None]
            q_live = (h < heads)[:, None]
            async_copy.async_copy_global_to_shared(q_left, q_rows + wide, q_live)
            async_copy.async_copy_global_to_shared(q_right, q_rows + HALF + wide, q_live)
            async_copy.async_copy_global_to_shared(q_rope, q_rows + 2 * HALF + narrow, q_live)
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            for t in range(t0, t1):
                k = t * BLOCK_K + r
                kv_rows = kv + ((ids.to(gl.int64) * PAGE + k % PAGE) * WIDTH)[:, None]
                live = (k < length)[:, None]
                # Two tiles ahead, so that no copy waits for the number of its page.
                ids = next_ids
                next_ids = _page_ids(table, k + 2 * BLOCK_K, length, PAGE)
                i = done % STAGES
                _wait_empty(empty, done, STAGES)
                async_copy.async_copy_global_to_shared(left.index(i), kv_rows + wide, live)
                async_copy.async_copy_global_to_shared(right.index(i), kv_rows + HALF + wide, live)
                async_copy.async_copy_global_to_shared(rope.index(i), kv_rows + 2 * HALF + narrow, live)
                async_copy.mbarrier_arrive(full.index(i), increment_count=False)
                done += 1
            nth += 1
        start += tiles
        b += 1
        length = gl.load(lengths + b, mask=b < batch, other=0)


@gluon.jit
def _products(q_tiles, kv_tiles, full, done, zero, STAGES: gl.constexpr):
    """Return S = q · kᵀ of the next tile, once it has been loaded."""
    q_left, q_right, q_rope = q_tiles
    left, right, rope = kv_tiles
    i = done % STAGES
    _wait_full(full, done, STAGES)
    fence_async_shared()
    s = warpgroup_mma(q_left, left.index(i).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(q_right, right.index(i).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope, rope.index(i).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _hand_over(p, factor, hand, turn, SLOTS: gl.constexpr):
    """Pass the softmax weights and the rescaling factor to both halves, once they have consumed the earlier contents of
    the slot.
    """
    p_tile, factor_tile, p_full, p_empty = hand
    i = turn % SLOTS
    _wait_empty(p_empty, turn, SLOTS)
    p_tile.index(i).store(p)
    factor_tile.index(i).store(factor)
    fence_async_shared()
    _arrive(p_full, turn, SLOTS)


@gluon.jit
def _score_tiles(
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
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    P_SLOTS: gl.constexpr,
    MMA_S: gl.constexpr,
    LET_GO: gl.constexpr,
):
    """Run the softmax over a piece's tiles; return `top`, the maximum of scores times log2(e), `total`, and the next
    tile and turn.

    `scales_log2` [HEADS] scales scores. LET_GO: no warpgroup reads values from the scored tile, so it is released.
    """
    row: gl.constexpr = gl.SliceLayout(1, MMA_S)
    dtype: gl.constexpr = hand[0].dtype
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, MMA_S))
    zero = gl.zeros([HEADS, BLOCK_K], gl.float32, layout=MMA_S)
    top = gl.full([HEADS], float("-inf"), gl.float32, layout=row)
    total = gl.zeros([HEADS], gl.float32, layout=row)
    for t in range(t0, t1):
        s = _products(q_tiles, kv_tiles, full, done, zero, STAGES)
        if LET_GO:
            _arrive(empty, done, STAGES)
        if (t + 1) * BLOCK_K > length:
            s = gl.where((t * BLOCK_K + k < length)[None, :], s, float("-inf"))
        # Finite, as each tile has a live row.
        new_top = gl.maximum(top, gl.max(s, 1) * scales_log2)
        p = gl.exp2(s * scales_log2[:, None] - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        _hand_over(p.to(dtype), shrink, hand, turn, P_SLOTS)
        total = total * shrink + gl.sum(p, 1)
        top = new_top
        done += 1
        turn += 1
    return top, total, done, turn


@gluon.jit
def _end_piece(
    top,
    total,
    value_scale,
    hand,
    turn,
    outs,
    place,
    numbers,
    BLOCK_K: gl.constexpr,
    P_SLOTS: gl.constexpr,
    MMA_S: gl.constexpr,
):
    """Divide the sums of a finished piece by its weights' sum and store them with the log-sum-exps."""
    part_lse, pieces_of, lse = outs
    b, heads, head_block, tiles, t0, t1 = place
    part, size, ln2 = numbers
    h = head_block * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, MMA_S))
    _hand_over(gl.zeros([HEADS, BLOCK_K], hand[0].dtype, layout=MMA_S), value_scale / total, hand, turn, P_SLOTS)
    log2_sum = top + gl.log2(total)
    if (t0 == 0) & (t1 == tiles):
        gl.store(lse + b.to(gl.int64) * heads + h, log2_sum * ln2, mask=h < heads)
    else:
        gl.store(part_lse + slot_of(part, t1 < tiles) * heads + h, log2_sum, mask=h < heads)
    if t0 == 0:
        gl.store(pieces_of + 2 * b, part)
        gl.store(pieces_of + 2 * b + 1, count_pieces(tiles, t1, size))


@gluon.jit
def _score(
    walk,
    q_tiles,
    kv_tiles,
    q_bars,
    full,
    hand,
    outs,
    numbers,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    P_SLOTS: gl.constexpr,
):
    """Compute the scores, the running softmax and the log-sum-exps of each piece."""
    b, length, start, begin, end, lengths, batch, heads, head_block = walk
    part, size, scale_log2, ln2 = numbers
    q_full, q_empty = q_bars
    MMA_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    scales_log2 = gl.full([HEADS], 1.0, gl.float32, layout=gl.SliceLayout(1, MMA_S)) * scale_log2
    done = 0
    turn = 0
    nth = 0
    while start < end:
        tiles, t0, t1 = _piece(length, start, begin, end, BLOCK_K)
        if t0 < t1:
            mbarrier.wait(q_full, nth & 1)
            top, total, done, turn = _score_tiles(
                q_tiles,
                kv_tiles,
                full,
                full,
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
                False,
            )
            mbarrier.arrive(q_empty, count=1)
            nth += 1
            place = (b, heads, head_block, tiles, t0, t1)
            _end_piece(top, total, 1.0, hand, turn, outs, place, (part, size, ln2), BLOCK_K, P_SLOTS, MMA_S)
            turn += 1
        start += tiles
        b += 1
        length = gl.load(lengths + b, mask=b < batch, other=0)


@gluon.jit
def _add_values(
    walk,
    values,
    full,
    empty,
    hand,
    outs,
    part,
    COLUMN: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SLOTS: gl.constexpr,
    P_SLOTS: gl.constexpr,
    STEP: gl.constexpr,
    FIRST: gl.constexpr,
    WAIT: gl.constexpr,
):
    """Add up weighted values of 256 columns. Store a whole request in its output, and a piece in fp32 in its slot.

    Those of the tile `done` lie in a ring of SLOTS, as its number STEP · done + FIRST. WAIT: that they have landed does
    not follow from the weights being there.
    """
    b, length, start, begin, end, lengths, batch, heads, head_block = walk
    p_tile, factor_tile, p_full, p_empty = hand
    part_o, o = outs
    row: gl.constexpr = gl.SliceLayout(1, MMA_O)
    h = head_block * HEADS + gl.arange(0, HEADS, layout=row)
    c = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, MMA_O))[None, :]
    done = 0
    turn = 0
    while start < end:
        tiles, t0, t1 = _piece(length, start, begin, end, BLOCK_K)
        if t0 < t1:
            acc = gl.zeros([HEADS, HALF], gl.float32, layout=MMA_O)
            for _ in range(t0, t1):
                i = turn % P_SLOTS
                _wait_full(p_full, turn, P_SLOTS)
                acc = acc * factor_tile.index(i).load(row)[:, None]
                n = STEP * done + FIRST
                if WAIT:
                    _wait_full(full, n, SLOTS)
                acc = warpgroup_mma(p_tile.index(i), values.index(n % SLOTS), acc)
                _arrive(empty, n, SLOTS)
                _arrive(p_empty, turn, P_SLOTS)
                done += 1
                turn += 1
            i = turn % P_SLOTS
            _wait_full(p_full, turn, P_SLOTS)
            acc = acc * factor_tile.index(i).load(row)[:, None]
            _arrive(p_empty, turn, P_SLOTS)
            turn += 1
            live = (h < heads)[:, None]
            if (t0 == 0) & (t1 == tiles):
                out = (b.to(gl.int64) * heads + h) * (2 * HALF)
                gl.store(o + out[:, None] + c, acc.to(o.dtype.element_ty), mask=live)
            else:
                out = (slot_of(part, t1 < tiles).to(gl.int64) * heads + h) * (2 * HALF)
                gl.store(part_o + out[:, None] + c, acc, mask=live)
        start += tiles
        b += 1
        length = gl.load(lengths + b, mask=b < batch, other=0)


@gluon.jit
def _barriers(SLOTS: gl.constexpr, count: gl.constexpr):
    """Allocate the barriers of a ring of SLOTS. Each completes after `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit(do_not_specialize=["table_stride", "heads", "batch", "parts"])
def hopper_kernel(
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
    ln2,
    table_stride,
    heads,
    batch,
    parts,
    PAGE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
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

    dtype: gl.constexpr = kv.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    p_rows: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_K if BLOCK_K < 64 else 128, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [HEADS, HALF], rows)
    q_right = gl.allocate_shared_memory(dtype, [HEADS, HALF], rows)
    q_rope = gl.allocate_shared_memory(dtype, [HEADS, ROPE], rows)
    left = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HALF], rows)
    right = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HALF], rows)
    rope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, ROPE], rows)
    p_tile = gl.allocate_shared_memory(dtype, [P_SLOTS, HEADS, BLOCK_K], p_rows)
    factor_tile = gl.allocate_shared_memory(gl.float32, [P_SLOTS, HEADS], flat)
    full = _barriers(STAGES, 32 * LOAD_WARPS)
    empty = _barriers(STAGES, 2)
    p_full = _barriers(P_SLOTS, 1)
    p_empty = _barriers(P_SLOTS, 2)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=32 * LOAD_WARPS)
    mbarrier.init(q_empty, count=1)

    walk = (first, length, start, begin, end, lengths, batch, heads, head_block)
    hand = (p_tile, factor_tile, p_full, p_empty)
    q_tiles = (q_left, q_right, q_rope)
    kv_tiles = (left, right, rope)
    q_bars = (q_full, q_empty)
    lse_outs = (part_lse, pieces_of, lse)
    o_outs = (part_o, o)
    sources = (q, kv, tables, table_stride)
    kv_bars = (full, empty)
    numbers = (part, size, scale_log2, ln2)
    gl.warp_specialize(
        [
            (_add_values, (walk, left, full, empty, hand, o_outs, part, 0, BLOCK_K, STAGES, P_SLOTS, 1, 0, False)),
            (_add_values, (walk, right, full, empty, hand, o_outs, part, 256, BLOCK_K, STAGES, P_SLOTS, 1, 0, False)),
            (_score, (walk, q_tiles, kv_tiles, q_bars, full, hand, lse_outs, numbers, BLOCK_K, STAGES, P_SLOTS)),
            (_load, (walk, sources, q_tiles, kv_tiles, q_bars, kv_bars, BLOCK_K, STAGES, PAGE, LOAD_WARPS)),
        ],
        [4, 4, LOAD_WARPS],
        REGS,
    )
