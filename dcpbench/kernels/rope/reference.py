"""Rotary embedding, slow and obvious."""

from __future__ import annotations

import torch


def rope(
    x_BhP: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor, out_BhP: torch.Tensor, *, interleaved: bool
) -> None:
    """See kernels.rope.rope."""
    cos_B1p, sin_B1p = table[positions_B].unsqueeze(1).chunk(2, dim=-1)
    first, second = (x_BhP[..., 0::2], x_BhP[..., 1::2]) if interleaved else x_BhP.chunk(2, dim=-1)
    first, second = first.float(), second.float()
    rotated = (first * cos_B1p - second * sin_B1p, second * cos_B1p + first * sin_B1p)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    out_BhP.copy_(joined)
