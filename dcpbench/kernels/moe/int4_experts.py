"""Experts of one rank over int4 weights and bf16 rows (W4A16), for decode batches and for prompts.

The steps are those of decode_experts.py; a program unpacks a block of weights (kernels/int4.py) in registers and multiplies it. Hidden rows
are in bf16, and so are unpacked weights: their product with the scale is rounded once. On a GPU PTX instructions unpack weights for rows in
bf16 (NATIVE); other rows, and Triton's interpreter, have plain operations with the same result.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear, silu

from dcpbench.kernels.e4m3 import get_capability
from dcpbench.kernels.int4 import BLOCK, SHRINK, SPANS, Int4, dequantize, unpack_block
from dcpbench.kernels.moe.decode_experts import MAX_ASSIGNMENTS, Plan, align_tokens_to_experts
from dcpbench.kernels.moe.prefill_experts import merge_expert_outputs, sort_by_expert, split_tiles

FEW_ROWS = 8  # rows of a tile for up to FEW_TOKENS tokens, the fewest that a matrix instruction has
FEW_TOKENS = 128  # tokens of which experts, such as DeepSeek-V3's 256, mostly have at most FEW_ROWS
SHORT_DEPTH = 256  # inputs of a product that a program keeps in registers
SHORT_ROWS = 16  # largest number of rows of a tile of which it does
FEW_ASSIGNMENTS = 256  # assignments of which experts mostly have one or two
NARROW = 256  # columns of gate-up of which a program per 64 would leave multiprocessors idle with FEW_ASSIGNMENTS
PROMPT_ROWS = 64  # rows of a tile with more than MAX_ASSIGNMENTS assignments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiling and launch parameters of a product."""

    columns: int
    stages: int
    warps: int
    weight_first: bool = True  # True if weights are the first operand, so that rows are the narrow side
    blocks: int | None = None  # blocks of columns of a program of SHORT_DEPTH; None: chosen by `programs`
    programs: int = 1024  # programs of SHORT_DEPTH in all, about as many as an H200 runs at once

    def count_blocks(self, columns: int, tiles: int) -> int:
        """Return the blocks of columns of a program of SHORT_DEPTH, for at most `tiles` tiles of rows."""
        return self.blocks or triton.cdiv(triton.cdiv(columns, self.columns), max(1, round(self.programs / tiles)))


@triton.jit
def _dot(x_MK, w_NK, y, WEIGHT_FIRST: tl.constexpr):
    """Return y + x · wᵀ, or its transpose."""
    if WEIGHT_FIRST:
        y = tl.dot(w_NK.to(x_MK.dtype), tl.trans(x_MK), y, input_precision="ieee")
    else:
        y = tl.dot(x_MK, tl.trans(w_NK.to(x_MK.dtype)), y, input_precision="ieee")
    return y


@triton.jit
def _add_product(
    x_parts,
    word_NK,
    scale_N,
    y,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Return y and the product of a block of columns of the rows with the same block of the weights."""
    x0, x1, x2, x3 = x_parts
    w0, w1, w2, w3 = unpack_block(word_NK, scale_N, BLOCK, GROUP, NATIVE)
    y = _dot(x0, w0, y, WEIGHT_FIRST)
    y = _dot(x1, w1, y, WEIGHT_FIRST)
    y = _dot(x2, w2, y, WEIGHT_FIRST)
    return _dot(x3, w3, y, WEIGHT_FIRST)


@triton.jit
def _load_part(x_at, column, depth, live_M, k, EVEN: tl.constexpr):
    inside = live_M[:, None] if EVEN else live_M[:, None] & (column + k < depth)[None, :]
    return tl.load(x_at + column, mask=inside, other=0.0)


@triton.jit
def _load_rows(x_at, column, depth, live_M, k, EVEN: tl.constexpr):
    """Return the four parts of a block of columns of the rows, [rows, 32] each. EVEN: the block is whole."""
    x0 = _load_part(x_at, column, depth, live_M, k, EVEN)
    x1 = _load_part(x_at, column + 32, depth, live_M, k, EVEN)
    x2 = _load_part(x_at, column + 64, depth, live_M, k, EVEN)
    x3 = _load_part(x_at, column + 96, depth, live_M, k, EVEN)
    return x0, x1, x2, x3


@triton.jit
def _product_kernel(
    x,
    weight,
    scale,
    source,
    tiles,
    out,
    experts,
    columns,
    depth,
    spans,
    most_tiles,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Multiply rows by their expert's weights, a tile and BLOCK_N columns of results a program."""
    across = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // across
    expert = tl.load(tiles + tile)
    if (expert < 0) | (expert >= experts):
        return
    begin, end = tl.load(tiles + most_tiles + tile), tl.load(tiles + 2 * most_tiles + tile)
    row = begin + tl.arange(0, ROWS)
    live = row < end
    read = tl.load(source + row, mask=live, other=0) // TOP_K if GATED else tl.where(live, row, begin)
    k = tl.arange(0, 32)
    x_at = x + read.to(tl.int64)[:, None] * depth + k[None, :]

    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    height = 2 * columns if GATED else columns
    inside = tl.minimum(n, columns - 1)
    word_at = weight + (expert.to(tl.int64) * spans * TOGETHER * height + inside)[:, None] * 32 + k[None, :]
    scale_at = scale + expert.to(tl.int64) * spans * height + inside
    y = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
    for span in tl.range(0, spans, num_stages=STAGES):
        for block in tl.static_range(TOGETHER):
            at = span * TOGETHER + block
            # Weights come before rows, which wait for their indices at the start of a program.
            words, scales = tl.load(word_at + at * height * 32), tl.load(scale_at + span * height)
            if GATED:
                up_words = tl.load(word_at + (at * height + columns) * 32)
                up_scales = tl.load(scale_at + span * height + columns)
            x_parts = _load_rows(x_at, at * 128, depth, live, k, EVEN)
            y = _add_product(x_parts, words, scales, y, block, GROUP, NATIVE, WEIGHT_FIRST)
            if GATED:
                up = _add_product(x_parts, up_words, up_scales, up, block, GROUP, NATIVE, WEIGHT_FIRST)
    if NATIVE:
        y *= 1 << SHRINK
        up *= 1 << SHRINK
    if GATED:
        y *= tl.sigmoid(y) * up
    if WEIGHT_FIRST:
        y = tl.trans(y)
    to = out + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["per_program"])
def _short_product_kernel(
    x,
    weight,
    scale,
    tiles,
    out,
    experts,
    columns,
    depth,
    most_tiles,
    per_program,
    ROWS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Multiply rows of few inputs, which a program keeps in registers, by `per_program` blocks of columns of their expert."""
    blocks = tl.cdiv(columns, BLOCK_N)
    across = tl.cdiv(blocks, per_program)
    tile = tl.program_id(0) // across
    expert = tl.load(tiles + tile)
    if (expert < 0) | (expert >= experts):
        return
    begin, end = tl.load(tiles + most_tiles + tile), tl.load(tiles + 2 * most_tiles + tile)
    row = begin + tl.arange(0, ROWS)
    live = row < end
    k = tl.arange(0, 32)
    x_at = x + tl.where(live, row, begin).to(tl.int64)[:, None] * depth + k[None, :]
    x_parts = ()
    for at in tl.static_range(SPANS * TOGETHER):
        x_parts = x_parts + (_load_rows(x_at, at * 128, depth, live, k, EVEN),)  # type: ignore[assignment]  # noqa: RUF005 - Triton cannot unpack

    word_at = weight + expert.to(tl.int64) * SPANS * TOGETHER * columns * 32 + k[None, :]
    scale_at = scale + expert.to(tl.int64) * SPANS * columns
    to = out + row.to(tl.int64)[:, None] * columns
    first = tl.program_id(0) % across * per_program
    for block_n in tl.range(first, tl.minimum(first + per_program, blocks), num_stages=STAGES):
        n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.minimum(n, columns - 1)
        y = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
        for span in tl.static_range(SPANS):
            scales = tl.load(scale_at + span * columns + inside)
            for block in tl.static_range(TOGETHER):
                words = tl.load(word_at + ((span * TOGETHER + block) * columns + inside)[:, None] * 32)
                y = _add_product(x_parts[span * TOGETHER + block], words, scales, y, block, GROUP, NATIVE, WEIGHT_FIRST)
        if NATIVE:
            y *= 1 << SHRINK
        if WEIGHT_FIRST:
            y = tl.trans(y)
        tl.store(to + n[None, :], y.to(out.dtype.element_ty), mask=live[:, None] & (n < columns)[None, :])


def plan_products(ids_Tk: torch.Tensor, first: int, local: int) -> Plan:
    """Return the plan of both products for the experts [first, first + local). No host sync, deterministic."""
    count = ids_Tk.numel()
    if count <= MAX_ASSIGNMENTS:
        return align_tokens_to_experts(ids_Tk, first, local, choose_rows(len(ids_Tk)))
    source, place, ends = sort_by_expert(ids_Tk, first, local)
    tiles, _ = split_tiles(ends, count, PROMPT_ROWS)
    return Plan(sorted_token_ids=source, inverse_permutation=place, tiles=tiles, rows=PROMPT_ROWS)


def choose_rows(tokens: int) -> int | None:
    """Return the rows of a tile, or None for those of the bf16 kernel: with more tokens most experts would have several tiles."""
    return FEW_ROWS if tokens <= FEW_TOKENS else None


def choose_tiling(rows: int, depth: int, columns: int, assignments: int, *, gated: bool) -> Tiling:
    """Return the tiling of a product for tiles of `rows` rows, `depth` inputs and `columns` outputs.

    Up to SHORT_ROWS it is the fastest of six, or within 1 % of it, on an H200 with DeepSeek-V3's experts, whole and divided by 8, at 256
    and 1,024 assignments; docs/kernels-moe.md. Others are not measured; `python -m tools.int4_tilings` compares tilings.
    """
    if rows >= PROMPT_ROWS:
        return Tiling(columns=128, stages=3, warps=8)
    if rows > SHORT_ROWS:
        return Tiling(columns=64, stages=4, warps=4) if gated else Tiling(columns=128, stages=3, warps=4)
    few = assignments <= FEW_ASSIGNMENTS
    if gated:
        return (
            Tiling(columns=32, stages=4, warps=1)
            if few and columns <= NARROW
            else Tiling(columns=64, stages=3, warps=2)
        )
    if depth > SHORT_DEPTH:
        return Tiling(columns=128, stages=3, warps=2)
    if few:
        return Tiling(columns=128, stages=3, warps=4)
    return Tiling(columns=64, stages=3, warps=2, programs=6144)


def compute_grouped_gemm(
    x: torch.Tensor, weight: Int4, plan: Plan, top_k: int, *, gated: bool, tiling: Tiling | None = None
) -> torch.Tensor:
    """Return sorted rows of the products with each row's expert; see decode_experts.compute_grouped_gemm."""
    experts, height, depth = weight.shape
    columns = height // 2 if gated else height
    chosen = tiling or choose_tiling(plan.rows, depth, columns, len(plan.sorted_token_ids), gated=gated)
    out = torch.empty(len(plan.sorted_token_ids), columns, dtype=x.dtype, device=x.device)
    blocks, most_tiles, spans = triton.cdiv(columns, chosen.columns), plan.tiles.shape[1], weight.scale.shape[1]
    options = {
        "ROWS": plan.rows,
        "WEIGHT_FIRST": chosen.weight_first,
        "BLOCK_N": chosen.columns,
        "GROUP": weight.group,
        "TOGETHER": SPANS[weight.group] // BLOCK,
        "STAGES": chosen.stages,
        "EVEN": depth % SPANS[weight.group] == 0,
        "NATIVE": x.dtype == torch.bfloat16 and get_capability(x.device) >= (8, 0),
        "SHRINK": SHRINK,
        "num_warps": chosen.warps,
    }
    sizes = (experts, columns, depth)
    if not gated and depth <= SHORT_DEPTH and plan.rows <= SHORT_ROWS:
        per_program = chosen.count_blocks(columns, most_tiles)
        _short_product_kernel[(most_tiles * triton.cdiv(blocks, per_program),)](
            *(x, weight.data, weight.scale, plan.tiles, out, *sizes, plan.tiles.stride(0), per_program),
            SPANS=spans,
            **options,
        )
    else:
        _product_kernel[(most_tiles * blocks,)](
            *(
                x,
                weight.data,
                weight.scale,
                plan.sorted_token_ids,
                plan.tiles,
                out,
                *sizes,
                spans,
                plan.tiles.stride(0),
            ),
            GATED=gated,
            TOP_K=top_k,
            **options,
        )
    return out


def apply_experts(
    x_TD: torch.Tensor,
    gate_up: Int4,
    down: Int4,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first_expert: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Implement kernels.moe.apply_experts."""
    local, top_k = gate_up.shape[0], ids_Tk.shape[1]
    plan = plan_products(ids_Tk, first_expert, local)
    hidden_II = compute_grouped_gemm(x_TD, gate_up, plan, top_k, gated=True)
    y_ID = compute_grouped_gemm(hidden_II, down, plan, top_k, gated=False)
    return merge_expert_outputs(y_ID, weights_Tk, ids_Tk, plan.inverse_permutation, shared_TD, first_expert, local)


def apply_experts_reference(
    x_TD: torch.Tensor,
    gate_up: Int4,
    down: Int4,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Compute the same slowly: dequantise an expert to fp32 and multiply. Hidden rows are rounded once, as in the kernel."""
    total_TD = shared_TD.float()
    for e in range(gate_up.shape[0]):
        weight_T = (weights_Tk * (ids_Tk == first + e)).sum(-1)
        chosen = weight_T.nonzero().squeeze(-1)
        if not len(chosen):
            continue
        one, other = (dequantize(w.select_expert(e))[0] for w in (gate_up, down))
        gate, up = linear(x_TD[chosen].float(), one).chunk(2, dim=-1)
        y = linear((silu(gate) * up).to(x_TD.dtype).float(), other)
        total_TD = total_TD.index_add(0, chosen, y * weight_T[chosen, None].float())
    return total_TD.to(x_TD.dtype)
