"""The experts of one rank for prompts: tokens are sorted by expert, and tensor descriptors fetch both operands.

    sort       place of each assignment among those sorted by expert, three kernels; their rows are gathered in that order
    tiles      each expert's rows cut into tiles; one kernel
    gate-up    a tile times a block of columns of gate and of up; their silu and product are its epilogue
    down       the same for the second matrix
    combine    shared + Σ weight · row, in the order of k

Shapes never depend on data: there are as many programs as tiles can be, and those of tiles that do not exist return at
once. Rows past an expert's last one are computed and not stored.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dcpbench.kernels.block_scaled import (
    SCALE_STRIDES,
    Rows,
    Scaled,
    allocate_rows,
    make_store_arguments,
    store_quantised,
)
from dcpbench.kernels.linear import count_multiprocessors

BLOCK_K = 64
FEW_ROWS, SOME_ROWS, MANY_ROWS = 56, 112, 192
"""Rows of an expert, on average, up to which a tile has 64; up to which `down` is cut finely; from which on an expert
has several tiles that should share its weights."""
WIDE = 2048  # depth of `down` from which on a tile is long enough to begin and end as a separate program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiling and launch parameters of one product."""

    rows: int
    columns: int
    stages: int
    warps: int
    step: int = BLOCK_K  # depth of a stage
    persistent: bool = False  # True for one program per multiprocessor, which loops over tiles
    group: int = 1  # tiles that go through their blocks of columns together, so that an expert's share its weights
    more: int = 0  # extra rows of an expert's last tile, so that a few need not fetch its weights again


@triton.jit
def _scatter_kernel(x, ids, place, out, first, width, TOP_K: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    key = tl.load(ids + i) - first
    mine = (key >= 0) & (key < LOCAL)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (d < width) & mine
    row = tl.load(place + i).to(tl.int64)
    tl.store(out + row * width + d, tl.load(x + i // TOP_K * width + d, mask=inside), mask=inside)


@triton.jit(do_not_specialize=SCALE_STRIDES)
def _silu_mul_kernel(
    x,
    out,
    width,
    data,
    scale,
    scale_row,
    scale_group,
    QUANTISED: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute silu(gate) · up. QUANTISED: store the results quantised only."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(x + t * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty)
    if QUANTISED:
        store_quantised(
            y.to(tl.float32), data, scale, scale_row, scale_group, t, first, width, BLOCK, LEAST, LARGEST, NATIVE
        )
    else:
        tl.store(out + t * width + i, y, mask=inside)


@triton.jit
def _combine_kernel(
    y, weights, ids, place, shared, out, first, width, TOP_K: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    acc = tl.load(shared + t * width + d, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        key = tl.load(ids + t * TOP_K + k) - first
        mine = (key >= 0) & (key < LOCAL)
        row = tl.load(place + t * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + t * TOP_K + k)
        acc += weight * tl.load(y + row * width + d, mask=inside & mine, other=0.0).to(tl.float32)
    tl.store(out + t * width + d, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keys(ids, i, count, first, LOCAL: tl.constexpr):
    """Local expert of each assignment; LOCAL where it is another rank's, LOCAL + 1 past the last one."""
    key = tl.load(ids + i, mask=i < count, other=0).to(tl.int32) - first
    key = tl.where((key >= 0) & (key < LOCAL), key, LOCAL)
    return tl.where(i < count, key, LOCAL + 1)


@triton.jit(do_not_specialize=["count", "first"])
def _count_kernel(ids, counts, count, first, LOCAL: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    key = _keys(ids, block * BLOCK + tl.arange(0, BLOCK), count, first, LOCAL)
    tl.store(counts + block * BINS + tl.arange(0, BINS), tl.histogram(key, BINS))


@triton.jit(do_not_specialize=["blocks"])
def _before_kernel(counts, totals, blocks, BINS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Replace each block's count of an expert by the count in earlier blocks."""
    e = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    before = tl.zeros([WIDTH], tl.int32)
    for top in range(0, blocks, ROWS):
        block = top + tl.arange(0, ROWS)
        at = counts + block[:, None] * BINS + e[None, :]
        inside = (block < blocks)[:, None]
        own = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        before += tl.sum(own, 0)
    tl.store(totals + e, before)


@triton.jit(do_not_specialize=["count", "first"])
def _place_kernel(
    ids,
    before,
    totals,
    source,
    place,
    ends,
    count,
    first,
    LOCAL: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    key = _keys(ids, i, count, first, LOCAL)
    e = tl.arange(0, BINS)
    total = tl.load(totals + e)
    end = tl.cumsum(total, 0)
    begin = end - total + tl.load(before + block * BINS + e)
    earlier = tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None]
    rank = tl.sum(((key[:, None] == key[None, :]) & earlier).to(tl.int32), 1)
    row = rank + tl.sum(tl.where(key[:, None] == e[None, :], begin[None, :], 0), 1)
    tl.store(place + i, row, mask=i < count)
    tl.store(source + row, i, mask=i < count)
    tl.store(ends + e, end, mask=(e < LOCAL) & (block == 0))


SORT_BLOCK, SORT_WIDTH, SORT_ROWS = 128, 16, 64  # assignments of a program; experts and blocks added up at a time


def sort_by_expert(ids_Tk: torch.Tensor, first: int, local: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (source, place, ends): the assignment of each row sorted by local expert, row of each assignment, each local
    expert's last row + 1.

    Other ranks' assignments come last. All int32; stable, so the same on every run. Three kernels, no host sync.
    """
    count, device = ids_Tk.numel(), ids_Tk.device
    bins, blocks = max(triton.next_power_of_2(local + 2), SORT_WIDTH), triton.cdiv(count, SORT_BLOCK)

    def allocate_empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    counts, totals, source, place, ends = (
        allocate_empty(blocks, bins),
        allocate_empty(bins),
        allocate_empty(count),
        allocate_empty(count),
        allocate_empty(local),
    )
    ids = ids_Tk.contiguous()
    _count_kernel[(blocks,)](ids, counts, count, first, LOCAL=local, BINS=bins, BLOCK=SORT_BLOCK, num_warps=4)
    _before_kernel[(bins // SORT_WIDTH,)](
        counts, totals, blocks, BINS=bins, WIDTH=SORT_WIDTH, ROWS=SORT_ROWS, num_warps=4
    )
    _place_kernel[(blocks,)](
        ids, counts, totals, source, place, ends, count, first, LOCAL=local, BINS=bins, BLOCK=SORT_BLOCK, num_warps=4
    )
    return source, place, ends


def sort_by_expert_reference(
    ids_Tk: torch.Tensor, first: int, local: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slow and obvious."""
    key = ids_Tk.flatten() - first
    ordered, source = torch.sort(torch.where((key < 0) | (key >= local), local, key), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(local, dtype=ordered.dtype), right=True)
    return source.int(), torch.argsort(source).int(), ends.int()


def merge_expert_outputs(
    y_ID: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    place: torch.Tensor,
    shared_TD: torch.Tensor,
    first: int,
    local: int,
) -> torch.Tensor:
    """Return shared + Σ_k weight · y[place] over experts [first, first + local), summed in fp32 in the order of k."""
    out_TD = torch.empty_like(shared_TD)
    tokens, width = shared_TD.shape
    block = min(2048, triton.next_power_of_2(width))
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        y_ID,
        weights_Tk,
        ids_Tk,
        place,
        shared_TD,
        out_TD,
        first,
        width,
        TOP_K=ids_Tk.shape[1],
        LOCAL=local,
        BLOCK=block,
        num_warps=4,
    )
    return out_TD


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up of dense layers and shared experts."""
    tokens, both = gate_up_TI.shape
    out = torch.empty(tokens, both // 2, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    _launch_silu_mul(gate_up_TI, out, None)
    return out


def silu_mul_rows(gate_up_TI: torch.Tensor) -> Rows:
    """Compute silu_mul and quantize_rows in one kernel, bit-identical. The columns must be a multiple of 128."""
    tokens, both = gate_up_TI.shape
    rows = allocate_rows(tokens, both // 2, gate_up_TI.device)
    _launch_silu_mul(gate_up_TI, None, rows)
    return Rows(rows, gate_up_TI.dtype)


def _launch_silu_mul(gate_up_TI: torch.Tensor, out: torch.Tensor | None, rows: Scaled | None) -> None:
    tokens, width = len(gate_up_TI), gate_up_TI.shape[1] // 2
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(tokens, triton.cdiv(width, block))](
        gate_up_TI, out, width, BLOCK=block, num_warps=4, **make_store_arguments(rows)
    )


@triton.jit
def _tiles_kernel(
    ends,
    tiles,
    total,
    LOCAL: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e = tl.arange(0, BINS)
    end_of = tl.load(ends + tl.minimum(e, LOCAL - 1))
    begin_of = tl.where(e > 0, tl.load(ends + tl.minimum(tl.maximum(e - 1, 0), LOCAL - 1)), 0)
    rows = end_of - begin_of
    until = tl.cumsum(tl.where(rows > MORE, tl.cdiv(rows - MORE, ROWS), tl.minimum(rows, 1)), 0)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = until[None, :] <= t[:, None]
    expert = tl.sum(passed.to(tl.int32), 1)
    chosen = e[None, :] == expert[:, None]
    end = tl.sum(tl.where(chosen, end_of[None, :], 0), 1)
    begin = tl.sum(tl.where(chosen, begin_of[None, :], 0), 1)
    first_tile = tl.max(tl.where(passed, until[None, :], 0), 1)
    inside = t < TILES
    tl.store(tiles + t, expert, mask=inside)
    tl.store(tiles + TILES + t, begin + (t - first_tile) * ROWS, mask=inside)
    tl.store(tiles + 2 * TILES + t, end, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(total, tl.max(until, 0))


@triton.jit
def _store(y, out, row, column, end, columns):
    to = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _multiply(
    tensors,
    where,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    # For the surplus rows the weights are the first operand, so that the rows are the narrow side of a wgmma.
    x, x_more, weight, _, out = tensors
    w_row, n, begin, end, columns, depth = where
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if MORE > 0:
        more = tl.zeros([BLOCK_N, MORE], tl.float32)
        more_up = tl.zeros([BLOCK_N, MORE], tl.float32)
    for at in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        x_MK = x.load([begin, at])
        if MORE > 0:
            more_MK = x_more.load([begin + ROWS, at])
        w_NK = weight.load([w_row, at])
        y = tl.dot(x_MK, w_NK.T, y, input_precision="ieee")
        if MORE > 0:
            more = tl.dot(w_NK, more_MK.T, more, input_precision="ieee")
        if GATED:
            up_NK = weight.load([w_row + columns, at])
            up = tl.dot(x_MK, up_NK.T, up, input_precision="ieee")
            if MORE > 0:
                more_up = tl.dot(up_NK, more_MK.T, more_up, input_precision="ieee")
    if GATED:
        y *= tl.sigmoid(y) * up
        if MORE > 0:
            more *= tl.sigmoid(more) * more_up
    _store(y, out, begin + tl.arange(0, ROWS), n + tl.arange(0, BLOCK_N), end, columns)
    if MORE > 0:
        _store(tl.trans(more), out, begin + ROWS + tl.arange(0, MORE), n + tl.arange(0, BLOCK_N), end, columns)


@triton.jit
def _tile(
    tensors,
    columns,
    depth,
    total,
    program,
    GATED: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles = tensors[3]
    in_group = GROUP * tl.cdiv(columns, BLOCK_N)
    first = program // in_group * GROUP
    size = tl.minimum(total - first, GROUP)
    tile = first + program % in_group % size
    n = program % in_group // size * BLOCK_N
    begin, end = tl.load(tiles + TILES + tile), tl.load(tiles + 2 * TILES + tile)
    w_row = tl.load(tiles + tile) * (2 * columns if GATED else columns) + n
    where = (w_row, n, begin, end, columns, depth)
    if MORE == 0:
        _multiply(tensors, where, GATED, ROWS, 0, BLOCK_N, BLOCK_K, STAGES)
    elif (end - begin > ROWS) & (end - begin <= ROWS + MORE):
        _multiply(tensors, where, GATED, ROWS, MORE, BLOCK_N, BLOCK_K, STAGES)
    else:
        _multiply(tensors, where, GATED, ROWS, 0, BLOCK_N, BLOCK_K, STAGES)


@triton.jit
def _product_kernel(
    x,
    x_more,
    weight,
    tiles,
    total,
    out,
    columns,
    depth,
    GATED: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    found = tl.load(total)
    last = found * tl.cdiv(columns, BLOCK_N)
    tensors = (x, x_more, weight, tiles, out)
    program = tl.program_id(0)
    if PROGRAMS == 0:
        if program < last:
            _tile(tensors, columns, depth, found, program, GATED, TILES, ROWS, MORE, BLOCK_N, BLOCK_K, STAGES, GROUP)
    else:
        for tile in tl.range(program, last, PROGRAMS, flatten=True):
            _tile(tensors, columns, depth, found, tile, GATED, TILES, ROWS, MORE, BLOCK_N, BLOCK_K, STAGES, GROUP)


def allocate_tiles(max_tiles: int, device: torch.device) -> torch.Tensor:
    """Allocate int32 [3, most] for tiles: expert, first row, and the row after the expert's last one.

    How far its rows are apart is a constant of kernels, thus a power of two: prompts of any length need few of them compiled.
    """
    return torch.empty(3, triton.next_power_of_2(max_tiles), dtype=torch.int32, device=device)[:, :max_tiles]


def split_tiles(ends: torch.Tensor, assignments: int, rows: int, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tiles, total) of rows sorted by expert; `ends` holds each expert's last row + 1. No host sync.

    A tile has `rows` rows; an expert's last one has any number up to rows + more.

    tiles is int32 [3, most]: expert, first row, and row behind the expert's last one, for the first total[0] of them.
    """
    local = ends.numel()
    most = min(local, assignments) + assignments // rows
    tiles = allocate_tiles(most, ends.device)
    total = torch.empty(1, dtype=torch.int32, device=ends.device)
    block = 16
    _tiles_kernel[(triton.cdiv(most, block),)](
        ends,
        tiles,
        total,
        LOCAL=local,
        BINS=triton.next_power_of_2(local),
        ROWS=rows,
        MORE=more,
        TILES=tiles.stride(0),
        BLOCK=block,
    )
    return tiles, total


def compute_grouped_gemm(x_ID: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Return sorted rows [rows, in] times their expert's weights: [rows, columns]; rows past the last end are
    undefined.

    Args:
        x_ID: rows, those of expert e being [ends[e − 1], ends[e]).
        weight: gated: [E, 2·I, in], for silu(x · gateᵀ) · (x · upᵀ); else [E, out, in].
        ends: int32 [E].
        gated: True for the first product, False for the second.
    """
    _, height, depth = weight.shape
    columns = height // 2 if gated else height
    how = choose_tiling(len(x_ID) // len(weight), depth, gated=gated)
    tiles, total = split_tiles(ends, len(x_ID), how.rows, how.more)
    out = torch.empty(len(x_ID), columns, dtype=x_ID.dtype, device=x_ID.device)
    flat = weight.flatten(0, 1)
    programs = count_multiprocessors(x_ID.device, interpreted=3) if how.persistent else 0
    _product_kernel[(programs or tiles.shape[1] * triton.cdiv(columns, how.columns),)](
        TensorDescriptor.from_tensor(x_ID, [how.rows, how.step]),
        TensorDescriptor.from_tensor(x_ID, [how.more or how.rows, how.step]),
        TensorDescriptor.from_tensor(flat, [how.columns, how.step]),
        tiles,
        total,
        out,
        columns,
        depth,
        GATED=gated,
        TILES=tiles.stride(0),
        ROWS=how.rows,
        MORE=how.more,
        BLOCK_N=how.columns,
        BLOCK_K=how.step,
        STAGES=how.stages,
        GROUP=how.group,
        PROGRAMS=programs,
        num_warps=how.warps,
    )
    return out


def choose_tiling(rows: int, depth: int, *, gated: bool) -> Tiling:
    """Return the tiling of a product with `rows` rows per expert on average.

    It is the fastest of 66 on an H200 with DeepSeek-V3's experts whole and divided by 2 and 8; docs/kernels-moe.md.
    """
    if gated:
        if rows <= FEW_ROWS:
            return Tiling(rows=64, columns=64, stages=4, warps=4, step=128)
        return Tiling(rows=128, columns=128, stages=4, warps=8, more=32, group=1 if rows < MANY_ROWS else 2)
    if rows <= FEW_ROWS:
        return Tiling(rows=64, columns=128, stages=3, warps=8)
    if rows <= SOME_ROWS:
        return Tiling(rows=128, columns=128, stages=3, warps=4)
    if rows < MANY_ROWS and depth >= WIDE:
        return Tiling(rows=128, columns=256, stages=4, warps=8, more=32, group=4)
    return Tiling(rows=128, columns=256, stages=4, warps=8, persistent=True, group=4)


def apply_experts(
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first_expert: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Implement kernels.moe.apply_experts. Rows of x, gate_up and down are multiples of 16 bytes."""
    tokens, width = x_TD.shape
    local, top_k = gate_up.shape[0], ids_Tk.shape[1]
    _, place, ends = sort_by_expert(ids_Tk, first_expert, local)
    sorted_ID = torch.empty(tokens * top_k, width, dtype=x_TD.dtype, device=x_TD.device)
    block = min(2048, triton.next_power_of_2(width))
    columns = triton.cdiv(width, block)
    _scatter_kernel[(tokens * top_k, columns)](
        x_TD, ids_Tk, place, sorted_ID, first_expert, width, TOP_K=top_k, LOCAL=local, BLOCK=block, num_warps=4
    )
    hidden_II = compute_grouped_gemm(sorted_ID, gate_up, ends, gated=True)
    del sorted_ID  # its memory is y's: with the tokens of a prompt they are the largest tensors of a step
    y_ID = compute_grouped_gemm(hidden_II, down, ends, gated=False)
    return merge_expert_outputs(y_ID, weights_Tk, ids_Tk, place, shared_TD, first_expert, local)
