"""RMSNorm (Zhang and Sennrich 2019), slow and obvious."""

from __future__ import annotations

import torch


def rms_norm(x_BD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.rms_norm."""
    wide = x_BD.to(torch.promote_types(x_BD.dtype, torch.float32))
    return weight_D * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x_BD.dtype)


def add_rms_norm(x_BD: torch.Tensor, residual_BD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.add_rms_norm."""
    residual_BD += x_BD
    return rms_norm(residual_BD, weight_D, eps)
