"""Routing and experts, slow and obvious. Loops over experts and reads the routing on the host: CPU and tests only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, silu

if TYPE_CHECKING:
    from dcpbench.kernels.moe import Routing


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor, rule: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route."""
    scores_TE = logits_TE.float().sigmoid() if rule.sigmoid else logits_TE.float().softmax(-1)
    choice_TE = scores_TE + bias_E if rule.sigmoid else scores_TE
    if rule.groups > 1:
        choice_TGe = choice_TE.unflatten(-1, (rule.groups, -1))
        group_TG = choice_TGe.topk(2, -1).values.sum(-1) if rule.sigmoid else choice_TGe.amax(-1)
        kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        kept_TG.scatter_(1, group_TG.topk(rule.top_groups, -1).indices, True)
        choice_TE = choice_TGe.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)
    ids_Tk = choice_TE.topk(rule.top_k, -1).indices
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if rule.normalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return weights_Tk * rule.scale, ids_Tk.to(torch.int32)


def experts(
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first: int,
    shared_TD: torch.Tensor,
) -> torch.Tensor:
    """See kernels.moe.experts."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    total_TD = shared_TD.to(wide)
    for e in range(gate_up.shape[0]):
        weight_T = (weights_Tk * (ids_Tk == first + e)).sum(-1)
        chosen = weight_T.nonzero().squeeze(-1)
        gate, up = linear(x_TD[chosen], gate_up[e]).chunk(2, dim=-1)
        y = linear(silu(gate) * up, down[e])
        total_TD = total_TD.index_add(0, chosen, y.to(wide) * weight_T[chosen, None].to(wide))
    return total_TD.to(x_TD.dtype)
