"""Mixture of experts: routing, and the experts of one rank applied to all tokens."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from dcpbench.kernels.block_scaled import Rows, Scaled, needs_quantized_input
from dcpbench.kernels.int4 import Int4
from dcpbench.kernels.linear import apply_linear_reference
from dcpbench.kernels.moe import decode_experts, int4_experts, prefill_experts, scaled
from dcpbench.kernels.moe.routing import select_experts
from dcpbench.models.weight_formats import FP8, INT4

__all__ = [
    "apply_experts",
    "apply_experts_reference",
    "apply_scaled_experts_reference",
    "compute_router_logits",
    "list_kernel_changes",
    "select_experts",
    "silu_mul",
]


def list_kernel_changes(local: int, top_k: int, weights: str) -> list[int]:
    """Return the maximum numbers of tokens up to which `local` experts of a rank use the same kernels, for weights in a format;
    beyond, the time jumps.
    """
    most = (scaled.MAX_ASSIGNMENTS if weights == FP8 else decode_experts.MAX_ASSIGNMENTS) // top_k
    rows = {FP8: [scaled.FEW_ROWS + 1], INT4: []}.get(
        weights, [prefill_experts.FEW_ROWS + 1, prefill_experts.SOME_ROWS + 1, prefill_experts.MANY_ROWS]
    )
    tiles = [(n * local - 1) // top_k for n in rows]
    return sorted({min(decode_experts.WIDE_TILES, most), most, *(n for n in tiles if n > most)})


def compute_router_logits(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """Return x · router.T as fp32 [T, E]: bf16 operands are multiplied unconverted and accumulated and kept in fp32."""
    if x_TD.dtype != torch.float32 and x_TD.is_cuda:
        return torch.mm(x_TD, router_ED.t(), out_dtype=torch.float32)
    return linear(x_TD.float(), router_ED.float())


def apply_experts(
    x_TD: torch.Tensor | Rows,
    gate_up: torch.Tensor | Scaled | Int4,
    down: torch.Tensor | Scaled | Int4,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first_expert: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Return shared + Σ_k weight · down_e(silu(gate_e x) · up_e x) over local experts [first, first + E_local).

    gate_up [E_local, 2·I, D] and down [E_local, D, I]; other ranks' experts contribute 0 here. Over e4m3 with scales
    tokens and hidden rows are quantised, too (block_scaled.py). On a GPU bf16, int4 and whole blocks of scales have kernels of
    their own, for decode batches and for prompts; other dtypes, which only comparisons use, run the reference and
    synchronise.
    """
    if isinstance(gate_up, Scaled):
        assert isinstance(down, Scaled)
        if isinstance(x_TD, Rows) or x_TD.is_cuda:
            return scaled.apply_experts(x_TD, gate_up, down, weights_Tk, ids_Tk, first_expert, shared_TD)
        return apply_scaled_experts_reference(x_TD, gate_up, down, weights_Tk, ids_Tk, first_expert, shared_TD)
    assert not isinstance(down, Scaled)
    assert not isinstance(x_TD, Rows)
    if isinstance(gate_up, Int4):
        assert isinstance(down, Int4)
        by = int4_experts.apply_experts if x_TD.is_cuda else int4_experts.apply_experts_reference
        return by(x_TD, gate_up, down, weights_Tk, ids_Tk, first_expert, shared_TD)
    assert not isinstance(down, Int4)
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
        fast = decode_experts if ids_Tk.numel() <= decode_experts.MAX_ASSIGNMENTS else prefill_experts
        return fast.apply_experts(x_TD, gate_up, down, weights_Tk, ids_Tk, first_expert, shared_TD)
    return apply_experts_reference(x_TD, gate_up, down, weights_Tk, ids_Tk, first_expert, shared_TD)


def apply_experts_reference(
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Compute the same slowly: loop over experts and read the routing on the host.

    As in the kernels, hidden rows are rounded once, behind the product of gate and up.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    total_TD = shared_TD.to(wide)
    for e in range(gate_up.shape[0]):
        weight_T = (weights_Tk * (ids_Tk == first + e)).sum(-1)
        chosen = weight_T.nonzero().squeeze(-1)
        if not len(chosen):
            continue
        gate, up = linear(x_TD[chosen].to(wide), gate_up[e].to(wide)).chunk(2, dim=-1)
        y = linear((silu(gate) * up).to(x_TD.dtype), down[e])
        total_TD = total_TD.index_add(0, chosen, y.to(wide) * weight_T[chosen, None].to(wide))
    return total_TD.to(x_TD.dtype)


def apply_scaled_experts_reference(
    x_TD: torch.Tensor,
    gate_up: Scaled,
    down: Scaled,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """Apply scaled experts with blocks of any size. Hidden rows are rounded once, to e4m3, and outputs to x's dtype."""
    total_TD = shared_TD.float()
    for e in range(len(gate_up.data)):
        weight_T = (weights_Tk * (ids_Tk == first + e)).sum(-1)
        chosen = weight_T.nonzero().squeeze(-1)
        if not len(chosen):
            continue
        one, other = (Scaled(w.data[e], w.scale[e], w.block) for w in (gate_up, down))
        gate, up = apply_linear_reference(x_TD[chosen].float(), one).chunk(2, dim=-1)
        y = apply_linear_reference(silu(gate) * up, other).to(x_TD.dtype)
        total_TD = total_TD.index_add(0, chosen, y.float() * weight_T[chosen, None].float())
    return total_TD.to(x_TD.dtype)


def silu_mul(gate_up_TI: torch.Tensor, feeds: torch.Tensor | Scaled | None = None) -> torch.Tensor | Rows:
    """Return silu(first half) · second half of the columns, rounded once, for a product with the weight `feeds`.

    Dense layers and shared experts use it. The result is quantised where kernels quantise the input of `feeds`.
    """
    if needs_quantized_input(feeds):
        return prefill_experts.silu_mul_rows(gate_up_TI)
    if gate_up_TI.is_cuda:
        return prefill_experts.silu_mul(gate_up_TI)
    gate_TI, up_TI = gate_up_TI.to(torch.promote_types(gate_up_TI.dtype, torch.float32)).chunk(2, dim=-1)
    return (silu(gate_TI) * up_TI).to(gate_up_TI.dtype)
