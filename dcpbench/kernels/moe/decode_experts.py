"""The experts of one rank for decode batches: each expert that is hit is read once, as fast as memory gives it.

    plan       sorts assignments by expert and cuts each expert's rows into tiles; one kernel
    gate-up    a tile times a block of columns of gate and of up; their silu and product are its epilogue
    down       the same for the second matrix
    combine    shared + Σ weight · row, in the order of k (prefill_experts.py)

A program streams the weights of one block of columns through shared memory. They are the first operand of the product,
so that a tile of 16 rows is the narrow side of a wgmma and not three quarters of padding. Shapes never depend on data:
there are as many programs as tiles can be, and those of tiles that do not exist return at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from dcpbench.kernels import block_scaled
from dcpbench.kernels.block_scaled import SCALE_STRIDES
from dcpbench.kernels.e4m3 import LARGEST, e4m3_byte, has_cast
from dcpbench.kernels.moe.prefill_experts import allocate_tiles, merge_expert_outputs

MAX_ASSIGNMENTS = 4096  # maximum assignments per call: 512 requests · 8 experts; each is compared with all others
WIDE_TILES = 256  # tokens past which a tile has 32 rows: with 16, experts begin to be read more than once
BLOCK = 16  # assignments, or tiles, that a program of the plan places


@triton.jit(do_not_specialize=["count", "first"])
def _plan_kernel(
    ids,
    sorted_token_ids,
    inverse_permutation,
    tiles,
    count,
    first,
    LOCAL: tl.constexpr,
    BINS: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j = tl.arange(0, ALL)
    key = tl.load(ids + j, mask=j < count, other=0) - first
    key = tl.where((key >= 0) & (key < LOCAL), key, LOCAL)
    key = tl.where(j < count, key, LOCAL + 1)
    program = tl.program_id(0)
    of_assignments = tl.cdiv(count, BLOCK)
    if program < of_assignments:
        i = program * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(ids + i, mask=i < count, other=0) - first
        mine = tl.where((mine >= 0) & (mine < LOCAL), mine, LOCAL)
        before = (key[None, :] < mine[:, None]) | ((key[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        row = tl.sum(before.to(tl.int32), 1)
        tl.store(inverse_permutation + i, row, mask=i < count)
        tl.store(sorted_token_ids + row, i, mask=i < count)
    else:
        e = tl.arange(0, BINS)
        rows = tl.where(e < LOCAL, tl.histogram(key, BINS), 0)
        ends = tl.cumsum(rows, 0)
        tiles_until = tl.cumsum(tl.cdiv(rows, ROWS), 0)
        t = (program - of_assignments) * BLOCK + tl.arange(0, BLOCK)
        passed = tiles_until[None, :] <= t[:, None]
        expert = tl.sum(passed.to(tl.int32), 1)
        chosen = e[None, :] == expert[:, None]
        end = tl.sum(tl.where(chosen, ends[None, :], 0), 1)
        begin = end - tl.sum(tl.where(chosen, rows[None, :], 0), 1)
        first_tile = tl.max(tl.where(passed, tiles_until[None, :], 0), 1)
        inside = t < TILES
        tl.store(tiles + t, tl.where(expert < LOCAL, expert, -1), mask=inside)
        tl.store(tiles + TILES + t, begin + (t - first_tile) * ROWS, mask=inside)
        tl.store(tiles + 2 * TILES + t, end, mask=inside)


@triton.jit
def _accumulate(x_MK, w_NK, y, scale_M, WEIGHT_FIRST: tl.constexpr, SCALED: tl.constexpr):
    """Return y + x · wᵀ, or its transpose. SCALED: add the product of a group of columns times `scale_M` in fp32."""
    if SCALED:
        if WEIGHT_FIRST:
            y += tl.dot(w_NK, tl.trans(x_MK)) * scale_M[None, :]
        else:
            y += tl.dot(x_MK, tl.trans(w_NK)) * scale_M[:, None]
    elif WEIGHT_FIRST:
        y = tl.dot(w_NK, tl.trans(x_MK), y, input_precision="ieee")
    else:
        y = tl.dot(x_MK, tl.trans(w_NK), y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=SCALE_STRIDES)
def _product_kernel(
    x,
    x_scale,
    scale_row,
    scale_group,
    weight,
    weight_scale,
    sorted_token_ids,
    tiles,
    out,
    out_scale,
    experts,
    columns,
    depth,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTISED: tl.constexpr,
    NATIVE: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Multiply tokens by expert weights. SCALED: e4m3 operands with scales (block_scaled.py); BLOCK_N divides a block.

    QUANTISED: so are results, and BLOCK_N is a group of them.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles + tile)
    if (expert < 0) | (expert >= experts):
        return
    begin, end = tl.load(tiles + TILES + tile), tl.load(tiles + 2 * TILES + tile)
    row = begin + tl.arange(0, ROWS)
    live = row < end
    read = tl.load(sorted_token_ids + row, mask=live, other=0) // TOP_K if GATED else tl.where(live, row, begin)
    k = tl.arange(0, BLOCK_K)
    x_at = x + read.to(tl.int64)[:, None] * depth + k[None, :]

    block = tl.program_id(0) % blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    height = 2 * columns if GATED else columns
    w_row = expert.to(tl.int64) * height + tl.minimum(n, columns - 1)
    w_at = weight + w_row[:, None] * depth + k[None, :]
    up_at = w_at + columns.to(tl.int64) * depth
    groups = tl.cdiv(depth, BLOCK_K)
    if SCALED:
        x_scale_at = x_scale + read.to(tl.int64) * scale_row
        w_scale_at = weight_scale + (expert.to(tl.int64) * (height // 128) + block * BLOCK_N // 128) * groups
        up_scale_at = w_scale_at + columns // 128 * groups
    y = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
    for group in tl.range(0, groups, num_stages=STAGES):
        at = group * BLOCK_K
        inside = (at + k < depth)[None, :]
        # With few rows many of a tile may be missing. All of their programs would read the first row repeatedly.
        x_MK = tl.load(x_at + at, mask=inside & live[:, None] if ROWS == 16 else inside, other=0.0)
        scale_M = tl.load(x_scale_at + group * scale_group) if SCALED else 1.0
        of_w = scale_M * tl.load(w_scale_at + group) if SCALED else 1.0
        y = _accumulate(x_MK, tl.load(w_at + at, mask=inside, other=0.0), y, of_w, WEIGHT_FIRST, SCALED)
        if GATED:
            of_up = scale_M * tl.load(up_scale_at + group) if SCALED else 1.0
            up = _accumulate(x_MK, tl.load(up_at + at, mask=inside, other=0.0), up, of_up, WEIGHT_FIRST, SCALED)
    if GATED:
        y *= tl.sigmoid(y) * up
    if WEIGHT_FIRST:
        y = tl.trans(y)
    if QUANTISED:
        scale_M = tl.maximum(tl.max(tl.abs(y), 1), LEAST) / LARGEST
        tl.store(out_scale + row.to(tl.int64) * blocks + block, scale_M, mask=live)
        result = e4m3_byte(y / scale_M[:, None], NATIVE)
    else:
        result = y.to(out.dtype.element_ty)
    to = out + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(to, result, mask=live[:, None] & (n < columns)[None, :])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sorted position of each assignment (token · top_k + k) by local expert, and the tiles of the experts' rows."""

    sorted_token_ids: torch.Tensor  # int32 [assignments]: assignment of each sorted row; other ranks' come last
    inverse_permutation: torch.Tensor  # int32 [assignments]: sorted row of each assignment, the inverse
    tiles: torch.Tensor  # int32 [3, most tiles]: expert, first row, row behind its last; no local expert if unused
    rows: int  # maximum number of rows of a tile
    total: torch.Tensor | None = None  # int32 [1]: number of tiles, for programs that loop over tiles; None otherwise


def align_tokens_to_experts(
    ids_Tk: torch.Tensor, first_expert: int, num_local_experts: int, rows: int | None = None
) -> Plan:
    """Return the plan of `compute_grouped_gemm` for the experts [first, first + local). One kernel, no host sync, deterministic."""
    count = ids_Tk.numel()
    if rows is None:
        rows = 16 if len(ids_Tk) <= WIDE_TILES else 32
    most = min(num_local_experts, count) + count // rows
    sorted_token_ids, inverse_permutation = (
        torch.empty(count, dtype=torch.int32, device=ids_Tk.device) for _ in range(2)
    )
    tiles = allocate_tiles(most, ids_Tk.device)
    _plan_kernel[(triton.cdiv(count, BLOCK) + triton.cdiv(most, BLOCK),)](
        ids_Tk,
        sorted_token_ids,
        inverse_permutation,
        tiles,
        count,
        first_expert,
        LOCAL=num_local_experts,
        BINS=triton.next_power_of_2(num_local_experts + 2),
        ALL=triton.next_power_of_2(count),
        ROWS=rows,
        TILES=tiles.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return Plan(sorted_token_ids=sorted_token_ids, inverse_permutation=inverse_permutation, tiles=tiles, rows=rows)


def compute_grouped_gemm(x: torch.Tensor, weight: torch.Tensor, plan: Plan, top_k: int, *, gated: bool) -> torch.Tensor:
    """Return sorted rows of the products with each row's expert, [assignments, columns]; other ranks' rows are
    undefined.

    Args:
        x: gated: the tokens [T, D], gathered while they are read; else sorted rows [assignments, I].
        weight: gated: [E_local, 2·I, D], for silu(x · gateᵀ) · (x · upᵀ); else [E_local, D, I].
        plan: plan of the same assignments.
        top_k: experts per token.
        gated: True for the first product, False for the second.
    """
    out = torch.empty(len(plan.sorted_token_ids), _count_columns(weight, gated), dtype=x.dtype, device=x.device)
    launch_grouped_gemm(
        (x, None), (weight, None), (out, None), plan, top_k, gated, choose_shape(plan.rows, weight.shape[-1], gated)
    )
    return out


Operand = tuple[torch.Tensor, torch.Tensor | None]  # numbers, and the scales of e4m3
Shape = tuple[int, int, int, bool]  # columns of a program, stages, warps, whether weights are the first operand


def _count_columns(weight: torch.Tensor, gated: bool) -> int:
    return weight.shape[1] // 2 if gated else weight.shape[1]


def launch_grouped_gemm(
    x: Operand, weight: Operand, out: Operand, plan: Plan, top_k: int, gated: bool, shape: Shape
) -> None:
    """Run one product of the planned rows into `out`; see `compute_grouped_gemm`."""
    columns, depth = out[0].shape[1], weight[0].shape[-1]
    block_n, stages, warps, weight_first = shape
    _product_kernel[(plan.tiles.shape[1] * triton.cdiv(columns, block_n),)](
        *x,
        *(x[1].stride() if x[1] is not None else (0, 0)),
        *weight,
        plan.sorted_token_ids,
        plan.tiles,
        *out,
        weight[0].shape[0],
        columns,
        depth,
        GATED=gated,
        TOP_K=top_k,
        TILES=plan.tiles.stride(0),
        ROWS=plan.rows,
        WEIGHT_FIRST=weight_first,
        BLOCK_N=block_n,
        BLOCK_K=128,
        STAGES=stages,
        SCALED=weight[1] is not None,
        QUANTISED=out[1] is not None,
        NATIVE=has_cast(out[0].device),
        LEAST=block_scaled.MIN_ABS_MAX,
        LARGEST=LARGEST,
        num_warps=warps,
    )


def choose_shape(rows: int, depth: int, gated: bool) -> Shape:
    """Return the shape of the bf16 kernel, in steps of 128 numbers.

    It is the fastest of some 500 on an H200 with DeepSeek-V3's experts whole and divided by 2, 4 and 8;
    docs/kernels-moe.md.
    """
    if gated:
        return 64, 5, 4, True
    if rows > 16:
        return 256, 3, 8, True
    return (128, 2, 4, False) if depth <= 256 else (128, 3, 4, depth > 512)


def apply_experts(
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first_expert: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Implement kernels.moe.apply_experts. At most MAX_ASSIGNMENTS assignments."""
    num_local_experts, top_k = len(gate_up), ids_Tk.shape[1]
    found = align_tokens_to_experts(ids_Tk, first_expert, num_local_experts)
    hidden_II = compute_grouped_gemm(x_TD, gate_up, found, top_k, gated=True)
    y_ID = compute_grouped_gemm(hidden_II, down, found, top_k, gated=False)
    return merge_expert_outputs(
        y_ID, weights_Tk, ids_Tk, found.inverse_permutation, shared_TD, first_expert, num_local_experts
    )
