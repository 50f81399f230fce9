"""Attention of prompts, one query at a time, in fp64: the truth that every backend is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def compute_attention(
    q_ThX: torch.Tensor,
    k_ShX: torch.Tensor,
    v_ShV: torch.Tensor,
    q_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [T, h, V], lse [T, h]) in fp64; see PrefillBackend.plan. Zeros and -inf if a query sees no key.

    Fewer heads of k and v than of q are repeated for groups of consecutive query heads.
    """
    rows = sum(q_lengths)
    k_ShX, v_ShV = (x.repeat_interleave(q_ThX.shape[1] // x.shape[1], dim=1) for x in (k_ShX, v_ShV))
    o_ThV = torch.zeros(rows, v_ShV.shape[1], v_ShV.shape[2], dtype=torch.float64, device=q_ThX.device)
    lse_Th = torch.full(o_ThV.shape[:2], float("-inf"), dtype=torch.float64, device=q_ThX.device)
    row = first = 0
    for queries, keys in zip(q_lengths, kv_lengths, strict=True):
        for i in range(queries):
            seen = max(keys - queries + i + 1, 0) if causal else keys
            if seen:
                k_ShX64, v_ShV64 = (x[first : first + seen].double() for x in (k_ShX, v_ShV))
                score_hS = torch.einsum("hx,shx->hs", q_ThX[row + i].double(), k_ShX64) * scale
                o_ThV[row + i] = torch.einsum("hs,shv->hv", score_hS.softmax(-1), v_ShV64)
                lse_Th[row + i] = score_hS.logsumexp(-1)
        row += queries
        first += keys
    return o_ThV, lse_Th
