"""Merge partial attention outputs of DCP ranks by their log-sum-exp (natural log, fp32)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.kernels.merge.reference import merge

if TYPE_CHECKING:
    import torch

__all__ = ["correct", "merge", "merge_into"]


def correct(o_BHR: torch.Tensor, lse_NBH: torch.Tensor, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's share of the merged output: exp(lse_rank − lse*)·o, as [H, B, R] in `dtype`, heads first.

    lse* = logsumexp over N. A rank without rows (lse −inf) has weight 0, whatever its `o` holds, NaN included; where
    all ranks are empty the result is 0. Summed over ranks the shares are the merged output.
    """
    if o_BHR.is_cuda:
        from dcpbench.kernels.merge.fused import correct as chosen
    else:
        from dcpbench.kernels.merge.reference import correct as chosen
    return chosen(o_BHR, lse_NBH, rank, dtype)


def merge_into(o_ThV: torch.Tensor, lse_Th: torch.Tensor, more_ThV: torch.Tensor, more_Th: torch.Tensor) -> None:
    """Merge the attention of the same queries over more keys into `o_ThV` (fp32) and `lse_Th`, in place. No host sync.

    o* = Σ_n exp(lse_n − lse*)·o_n, lse* = logsumexp over the two. A side with lse −inf has weight 0, whatever its o
    holds, NaN included; where both have, the result is 0 and −inf. o_ThV is contiguous, the others may be strided, the
    last dimension of more_ThV excepted. Reads and writes 12 bytes for each number of o, in bf16 2 fewer.
    """
    if o_ThV.is_cuda:
        from dcpbench.kernels.merge.fused import merge_into as chosen
    else:
        from dcpbench.kernels.merge.reference import merge_into as chosen
    chosen(o_ThV, lse_Th, more_ThV, more_Th)
