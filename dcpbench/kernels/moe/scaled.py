"""Experts of one rank over e4m3 weights with scales (block_scaled.py), for decode batches and for prompts.

Both products are decode_experts.py's kernel. Tokens are quantised once, in front of it or by the norm that made them, and
hidden rows by the product that makes them. A decode batch is planned by one kernel; the many assignments of prompts are
sorted by three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcpbench.kernels.block_scaled import Rows, Scaled, quantize_rows
from dcpbench.kernels.e4m3 import get_capability
from dcpbench.kernels.moe import decode_experts
from dcpbench.kernels.moe.prefill_experts import merge_expert_outputs, sort_by_expert, split_tiles
from dcpbench.models.weight_formats import SCALE_BLOCK

if TYPE_CHECKING:
    from dcpbench.kernels.moe.decode_experts import Plan, Shape

HOPPER = 9  # major compute capability
MAX_ASSIGNMENTS = 6144  # up to this size a decode batch's plan is as fast as a prompt's (DeepSeek-V3 with EP, H200)
FEW_ROWS = 56  # maximum mean number of rows of an expert for tiles of 64 rows with prompts, from the same measurement


def plan_products(ids_Tk: torch.Tensor, first: int, local: int) -> Plan:
    """Return the plan of both products for the experts [first, first + local). No host sync, deterministic."""
    count = ids_Tk.numel()
    if count <= MAX_ASSIGNMENTS:
        return decode_experts.align_tokens_to_experts(ids_Tk, first, local)
    rows = 64 if count // local <= FEW_ROWS else 128
    source, place, ends = sort_by_expert(ids_Tk, first, local)
    tiles, total = split_tiles(ends, count, rows)
    from_tile_to_tile = rows == 128 and get_capability(ids_Tk.device)[0] == HOPPER
    return decode_experts.Plan(
        sorted_token_ids=source,
        inverse_permutation=place,
        tiles=tiles,
        rows=rows,
        total=total if from_tile_to_tile else None,
    )


def compute_gate_up(x: Scaled, weight: Scaled, plan: Plan, top_k: int) -> Scaled:
    """Return silu(x · gateᵀ) · (x · upᵀ) of the planned rows of tokens [T, D], quantised. 128 divides D and I."""
    columns = weight.data.shape[1] // 2
    data = torch.empty(len(plan.sorted_token_ids), columns, dtype=x.data.dtype, device=x.data.device)
    scale = torch.empty(len(plan.sorted_token_ids), columns // SCALE_BLOCK, device=x.data.device)
    operands = (x.data, x.scale), (weight.data, weight.scale), (data.view(torch.uint8), scale)
    decode_experts.launch_grouped_gemm(
        *operands, plan, top_k, gated=True, shape=choose_shape(plan.rows, weight.data.shape[-1], gated=True)
    )
    return Scaled(data, scale, (1, SCALE_BLOCK))


def compute_down(x: Scaled, weight: Scaled, plan: Plan, top_k: int) -> torch.Tensor:
    """Multiply planned rows by their expert's weights, in bf16. 128 divides I and D."""
    if plan.total is not None:
        # Imported only where it runs: Triton before 3.6 and its interpreter cannot import it.
        from dcpbench.kernels.moe import hopper_scaled

        return hopper_scaled.compute_grouped_gemm(x, weight, plan.tiles, plan.total)
    out = torch.empty(len(plan.sorted_token_ids), weight.data.shape[1], dtype=torch.bfloat16, device=x.data.device)
    shape = choose_shape(plan.rows, weight.data.shape[-1], gated=False)
    decode_experts.launch_grouped_gemm(
        (x.data, x.scale), (weight.data, weight.scale), (out, None), plan, top_k, gated=False, shape=shape
    )
    return out


def choose_shape(rows: int, depth: int, *, gated: bool) -> Shape:
    """Return the shape of a program of the kernel, for tiles of `rows` rows."""
    if rows >= 64:
        return 128, 3, 8, False
    if gated:
        return 128, 5, 4, True
    return 128, 2 if depth <= 256 else 3, 4, True


def apply_experts(
    x_TD: torch.Tensor | Rows,
    gate_up_weight: Scaled,
    down_weight: Scaled,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first_expert: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Implement kernels.moe.apply_experts."""
    local, top_k = len(gate_up_weight.data), ids_Tk.shape[1]
    found = plan_products(ids_Tk, first_expert, local)
    rows = x_TD.scaled if isinstance(x_TD, Rows) else quantize_rows(x_TD)
    hidden = compute_gate_up(rows, gate_up_weight, found, top_k)
    y_ID = compute_down(hidden, down_weight, found, top_k)
    return merge_expert_outputs(y_ID, weights_Tk, ids_Tk, found.inverse_permutation, shared_TD, first_expert, local)
