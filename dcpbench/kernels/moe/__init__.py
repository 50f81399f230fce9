"""Mixture of experts: routing, and the experts of one rank applied to all tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dcpbench.points.shapes import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose experts; see ModelShape for the fields."""

    top_k: int
    sigmoid: bool
    groups: int
    top_groups: int
    normalise: bool
    scale: float

    @staticmethod
    def of(shape: ModelShape) -> Routing:
        """The routing rule of a model."""
        return Routing(
            top_k=shape.top_k,
            sigmoid=shape.routing == "sigmoid",
            groups=shape.groups,
            top_groups=shape.top_groups,
            normalise=shape.normalise,
            scale=shape.routed_scale,
        )


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor, rule: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k experts of each token: weights_Tk fp32 and ids_Tk int32.

    sigmoid: score + bias chooses (group score = its best two), score weighs; softmax: score does both (group score =
    its best one). DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437).
    """
    if logits_TE.is_cuda:
        from dcpbench.kernels.moe.routing import route as chosen
    else:
        from dcpbench.kernels.moe.reference import route as chosen
    return chosen(logits_TE, bias_E, rule)


def router_logits(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """x · router.T as fp32 [T, E]: bf16 operands are multiplied as they are and accumulated and kept in fp32."""
    if x_TD.dtype == torch.float32:
        return torch.nn.functional.linear(x_TD, router_ED)
    if x_TD.is_cuda:
        return torch.mm(x_TD, router_ED.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(x_TD.float(), router_ED.float())


def experts(
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """shared + Σ_k weight · down_e(silu(gate_e x) · up_e x) over this rank's experts [first, first + E_local).

    gate_up [E_local, 2·I, D] and down [E_local, D, I]; other ranks' experts contribute 0 here. On a GPU bf16 has
    kernels of its own, one for decode batches and one for prompts; other dtypes, which only comparisons use, run the
    reference and synchronise.
    """
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
        from dcpbench.kernels.moe import decode, prompts

        fast = decode if ids_Tk.numel() <= decode.MOST_ASSIGNMENTS else prompts
        return fast.experts(x_TD, gate_up, down, weights_Tk, ids_Tk, first, shared_TD)
    from dcpbench.kernels.moe.reference import experts as experts_reference

    return experts_reference(x_TD, gate_up, down, weights_Tk, ids_Tk, first, shared_TD)


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """silu(first half) · second half of the columns."""
    if gate_up_TI.is_cuda:
        from dcpbench.kernels.moe.prompts import silu_mul as silu_mul_fused

        return silu_mul_fused(gate_up_TI)
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
