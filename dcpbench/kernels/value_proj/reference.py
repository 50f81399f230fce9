"""W_UV, slow and obvious."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def project_values(o_hBR: torch.Tensor, w_uv: torch.Tensor, out_BhV: torch.Tensor) -> None:
    """See kernels.value_proj.project_values; computed in o's dtype."""
    out_BhV.copy_((o_hBR @ w_uv.to(o_hBR.dtype)).transpose(0, 1))
