"""Routing: which experts a token takes, and with which weights. DeepSeek-V2 (arXiv 2405.04434), V3 (arXiv 2412.19437)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dcpbench.models.shapes import SIGMOID

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape


NO_EXPERT = -1  # expert number of tokens without an expert on any rank: no kernel has a row for it


def select_experts(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, rule: ModelShape, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k experts of each token by the rule of a model: weights_Tk fp32 and ids_Tk int32.

    sigmoid: score + bias chooses (group score = its best two), score weighs; softmax: score does both (group score =
    its best one). `live`, int64 [parts] on the device: T is so many parts of as many tokens, and of each part the tokens
    past its number go to NO_EXPERT, with weights of 0; None: there are none such.
    """
    return (select_experts_fused if logits_TE.is_cuda else select_experts_reference)(logits_TE, bias_E, rule, live)


def select_experts_reference(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, rule: ModelShape, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slow and obvious."""
    sigmoid = rule.routing == SIGMOID
    scores_TE = logits_TE.float().sigmoid() if sigmoid else logits_TE.float().softmax(-1)
    choice_TE = scores_TE + bias_E if sigmoid else scores_TE
    if rule.n_group > 1:
        choice_TGe = choice_TE.unflatten(-1, (rule.n_group, -1))
        group_TG = choice_TGe.topk(2, -1).values.sum(-1) if sigmoid else choice_TGe.amax(-1)
        kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        kept_TG.scatter_(1, group_TG.topk(rule.topk_group, -1).indices, True)
        choice_TE = choice_TGe.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)
    ids_Tk = choice_TE.topk(rule.top_k, -1).indices
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if rule.normalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    weights_Tk, ids_Tk = weights_Tk * rule.routed_scaling_factor, ids_Tk.to(torch.int32)
    if live is not None:
        part = torch.arange(len(ids_Tk) // len(live), device=live.device)
        idle_T1 = (part >= live[:, None]).view(-1, 1)
        weights_Tk, ids_Tk = weights_Tk.masked_fill(idle_T1, 0.0), ids_Tk.masked_fill(idle_T1, NO_EXPERT)
    return weights_Tk, ids_Tk


@triton.jit
def _route_kernel(
    logits,
    bias,
    weights,
    ids,
    counts,
    part,
    experts,
    scale,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NO_EXPERT: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    if PARTS and t % part >= tl.load(counts + t // part):
        tl.store(ids + t * TOP_K + slot, tl.full([SLOTS], NO_EXPERT, tl.int32), mask=slot < TOP_K)
        tl.store(weights + t * TOP_K + slot, tl.zeros([SLOTS], tl.float32), mask=slot < TOP_K)
        return
    e = tl.arange(0, BLOCK)
    live = e < experts
    x = tl.load(logits + t * experts + e, mask=live, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(x)
        choice = score + tl.load(bias + e, mask=live, other=0.0)
    else:
        power = tl.exp(x - tl.max(x, 0))
        score = power / tl.sum(power, 0)
        choice = score
    choice = tl.where(live, choice, float("-inf"))

    if GROUPS > 1:
        size = experts // GROUPS
        g = tl.arange(0, GROUP_BLOCK)
        group_score = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for i in tl.static_range(GROUPS):
            mine = tl.where(e // size == i, choice, float("-inf"))
            best = tl.max(mine, 0)
            if SIGMOID:
                best += tl.max(tl.where(e == tl.argmax(mine, 0), float("-inf"), mine), 0)
            group_score = tl.where(g == i, best, group_score)
        kept = tl.zeros([BLOCK], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            winner = tl.argmax(group_score, 0)
            kept = tl.where(e // size == winner, 1, kept)
            group_score = tl.where(g == winner, float("-inf"), group_score)
        choice = tl.where(kept == 1, choice, float("-inf"))

    picked = tl.zeros([SLOTS], tl.float32)
    for k in tl.static_range(TOP_K):
        winner = tl.argmax(choice, 0)
        picked = tl.where(slot == k, tl.sum(tl.where(e == winner, score, 0.0), 0), picked)
        tl.store(ids + t * TOP_K + k, winner.to(tl.int32))
        choice = tl.where(e == winner, float("-inf"), choice)
    if NORMALISE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    tl.store(weights + t * TOP_K + slot, picked * scale, mask=slot < TOP_K)


def select_experts_fused(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, rule: ModelShape, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select with one kernel: one program per token, top-k by repeated argmax in registers."""
    tokens, experts = logits_TE.shape
    weights_Tk = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_TE.device)
    ids_Tk = torch.empty(tokens, rule.top_k, dtype=torch.int32, device=logits_TE.device)
    _route_kernel[(tokens,)](
        logits_TE,
        bias_E,
        weights_Tk,
        ids_Tk,
        live,
        tokens if live is None else tokens // len(live),
        experts,
        rule.routed_scaling_factor,
        SIGMOID=rule.routing == SIGMOID,
        GROUPS=rule.n_group,
        GROUP_BLOCK=triton.next_power_of_2(rule.n_group),
        TOP_GROUPS=rule.topk_group,
        TOP_K=rule.top_k,
        NORMALISE=rule.normalise,
        SLOTS=triton.next_power_of_2(rule.top_k),
        BLOCK=triton.next_power_of_2(experts),
        PARTS=live is not None,
        NO_EXPERT=NO_EXPERT,
        num_warps=1,
    )
    return weights_Tk, ids_Tk
