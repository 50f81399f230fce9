"""Decode attention with grouped query heads, slow and obvious: the truth that every backend is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcpbench.kernels.attention.reference import RequestLoop
from dcpbench.kernels.gqa import split_rows

if TYPE_CHECKING:
    from dcpbench.kernels.gqa import GqaSpec


def compute_gqa_decode(
    q_HX: torch.Tensor, rows_KW: torch.Tensor, kv_heads: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one request's heads over its KV rows in q's dtype.

    Each KV head is repeated for the query heads of its group. Returns o_HX and lse_H (natural log); zeros and -inf
    where K = 0.
    """
    heads = q_HX.shape[0]
    if rows_KW.shape[0] == 0:
        return torch.zeros_like(q_HX), q_HX.new_full((heads,), float("-inf"))
    k_KHX, v_KHX = (part.repeat_interleave(heads // kv_heads, dim=1) for part in split_rows(rows_KW, kv_heads))
    scores_HK = torch.einsum("hx,khx->hk", q_HX, k_KHX) * scale
    return torch.einsum("hk,khx->hx", torch.softmax(scores_HK, dim=-1), v_KHX), torch.logsumexp(scores_HK, dim=-1)


class ReferenceGqa(RequestLoop):
    """Computes in fp32 (fp64 for fp64 input)."""

    spec: GqaSpec

    def run(self, q_BHX: torch.Tensor, kv: torch.Tensor, o_BHX: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run."""
        spec, wide = self.spec, torch.promote_types(q_BHX.dtype, torch.float32)
        for b, (pages, length) in enumerate(self.shards):
            rows_KW = kv[pages].flatten(0, 1)[:length].to(wide) * spec.kv_scale
            o_BHX[b], lse_BH[b] = compute_gqa_decode(q_BHX[b].to(wide), rows_KW, spec.kv_heads, spec.scale)
