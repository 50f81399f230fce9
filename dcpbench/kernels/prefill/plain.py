"""Attention of prompts as matrix products in fp32, a block of queries at a time: for CPUs, and for fp32 on GPUs."""

from __future__ import annotations

import dataclasses

import torch

SCORES = 1 << 24
"""Most scores that are held at once."""


@dataclasses.dataclass(frozen=True)
class PlainRagged:
    """See Ragged. No call waits for the device."""

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    causal: bool
    scale: float
    value: int

    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ragged."""
        rows, heads = sum(self.q_lengths), q_ThX.shape[1]
        o_ThV = q_ThX.new_zeros(rows, heads, self.value)
        lse_Th = q_ThX.new_full((rows, heads), float("-inf"), dtype=torch.float32)
        row = first = 0
        for queries, keys in zip(self.q_lengths, self.kv_lengths, strict=True):
            mine, seen = slice(row, row + queries), slice(first, first + keys)
            if keys:
                self._request(q_ThX[mine], k_ShX[seen], v_ShW[seen, :, : self.value], o_ThV[mine], lse_Th[mine])
            row += queries
            first += keys
        return o_ThV, lse_Th

    def _request(
        self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShV: torch.Tensor, o_ThV: torch.Tensor, lse_Th: torch.Tensor
    ) -> None:
        queries, heads = q_ThX.shape[:2]
        keys = len(k_ShX)
        wide = torch.promote_types(q_ThX.dtype, torch.float32)
        k_hXS, v_hSV = k_ShX.to(wide).permute(1, 2, 0), v_ShV.to(wide).transpose(0, 1)
        block = max(1, SCORES // (heads * keys))
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            scores_hTS = q_ThX[start:stop].to(wide).transpose(0, 1) @ k_hXS * self.scale
            if self.causal:
                last_T = torch.arange(start, stop, device=q_ThX.device) + keys - queries
                hidden_TS = torch.arange(keys, device=q_ThX.device) > last_T.unsqueeze(1)
                scores_hTS.masked_fill_(hidden_TS, float("-inf"))
            lse_hT = scores_hTS.logsumexp(-1)
            weights_hTS = (scores_hTS - lse_hT.masked_fill(lse_hT.isneginf(), 0.0).unsqueeze(-1)).exp_()
            o_ThV[start:stop] = (weights_hTS @ v_hSV).transpose(0, 1)
            lse_Th[start:stop] = lse_hT.T
