"""RMSNorm, alone and with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rms_norm(x_BD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · x / sqrt(mean(x²) + eps), mean in fp32, result in x's dtype. Rows of x may be strided."""
    if x_BD.is_cuda:
        from dcpbench.kernels.norm.fused import rms_norm as chosen
    else:
        from dcpbench.kernels.norm.reference import rms_norm as chosen
    return chosen(x_BD, weight_D, eps)


def add_rms_norm(x_BD: torch.Tensor, residual_BD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place, then rms_norm(residual)."""
    if x_BD.is_cuda:
        from dcpbench.kernels.norm.fused import add_rms_norm as chosen
    else:
        from dcpbench.kernels.norm.reference import add_rms_norm as chosen
    return chosen(x_BD, residual_BD, weight_D, eps)
