"""LSE merge, slow and obvious."""

from __future__ import annotations

import torch


def weights(lse_NBH: torch.Tensor) -> torch.Tensor:
    """exp(lse_n − logsumexp_n lse_n), with 0 where everything is −inf."""
    total_BH = torch.logsumexp(lse_NBH, dim=0)
    nothing_BH = torch.isneginf(total_BH)
    return torch.exp(lse_NBH - total_BH.masked_fill(nothing_BH, 0.0))


def correct(o_BHR: torch.Tensor, lse_NBH: torch.Tensor, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.merge.correct."""
    weight_BH1 = weights(lse_NBH)[rank].unsqueeze(-1)
    share_BHR = torch.where(weight_BH1 > 0, weight_BH1 * o_BHR.float(), 0.0)
    return share_BHR.transpose(0, 1).to(dtype).contiguous()


def merge(o_NBHR: torch.Tensor, lse_NBH: torch.Tensor) -> torch.Tensor:
    """All ranks' partial outputs merged in one place, in o's dtype: what an exchange must agree with."""
    weight_NBH1 = weights(lse_NBH).unsqueeze(-1).to(o_NBHR.dtype)
    return torch.where(weight_NBH1 > 0, weight_NBH1 * o_NBHR, 0.0).sum(0)


def merge_into(o_ThV: torch.Tensor, lse_Th: torch.Tensor, more_ThV: torch.Tensor, more_Th: torch.Tensor) -> None:
    """See kernels.merge.merge_into."""
    lse_NTh = torch.stack((lse_Th, more_Th))
    weight_NTh1 = weights(lse_NTh).unsqueeze(-1).to(o_ThV.dtype)
    both_NThV = torch.stack((o_ThV, more_ThV.to(o_ThV.dtype)))
    o_ThV.copy_(torch.where(weight_NTh1 > 0, weight_NTh1 * both_NThV, 0.0).sum(0))
    lse_Th.copy_(torch.logsumexp(lse_NTh, dim=0))
