"""W_UV: the merged latent output of each head to its value columns."""

from __future__ import annotations

import torch


def project_values(o_hBR: torch.Tensor, w_uv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """o_hBR @ w_uv[h, R, V] as [B, h, V] in `dtype`.

    An exchange may deliver o in fp32 while the weights are bf16: then the product takes o as it is (tf32), because
    rounding it to bf16 first would add as much error as the attention kernel's own output rounding.
    """
    heads, batch, _ = o_hBR.shape
    out_BhV = torch.empty(batch, heads, w_uv.shape[2], dtype=dtype, device=o_hBR.device)
    if o_hBR.dtype == w_uv.dtype:
        torch.bmm(o_hBR, w_uv, out=out_BhV.transpose(0, 1))
    elif o_hBR.is_cuda:
        from dcpbench.kernels.value_proj.fused import project_values as project_values_fused

        project_values_fused(o_hBR, w_uv, out_BhV)
    else:
        from dcpbench.kernels.value_proj.reference import project_values as project_values_reference

        project_values_reference(o_hBR, w_uv, out_BhV)
    return out_BhV
