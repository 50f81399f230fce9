"""Merge partial attention outputs of DCP ranks by their log-sum-exp (natural log, fp32)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.kernels.merge.reference import correct as correct_reference
from dcpbench.kernels.merge.reference import merge

if TYPE_CHECKING:
    import torch

__all__ = ["correct", "merge"]


def correct(o_BHR: torch.Tensor, lse_NBH: torch.Tensor, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's share of the merged output: exp(lse_rank − lse*)·o, as [H, B, R] in `dtype`, heads first.

    lse* = logsumexp over N. A rank without rows (lse −inf) has weight 0, whatever its `o` holds, NaN included; where
    all ranks are empty the result is 0. Summed over ranks the shares are the merged output.
    """
    if o_BHR.is_cuda:
        from dcpbench.kernels.merge.fused import correct as correct_fused

        return correct_fused(o_BHR, lse_NBH, rank, dtype)
    return correct_reference(o_BHR, lse_NBH, rank, dtype)
