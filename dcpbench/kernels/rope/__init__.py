"""Rotary position embedding of the rope part of q and of the KV row, with the table that YaRN scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.kernels.rope.table import rope_table, softmax_scale

if TYPE_CHECKING:
    import torch

__all__ = ["rope", "rope_table", "softmax_scale"]


def rope(
    x_BhP: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor, out_BhP: torch.Tensor, *, interleaved: bool
) -> None:
    """Rotate `x` by its position into `out`, both possibly strided views with unit last stride; `out` may be `x`.

    `table` [positions, P] fp32 holds cos in its first P/2 columns and sin in the rest. Pair i is columns (2i, 2i+1)
    where `interleaved` (DeepSeek's storage order), else (i, i + P/2). Pairs stay where they are: q·k does not depend on
    it.
    """
    if x_BhP.is_cuda:
        from dcpbench.kernels.rope.fused import rope as chosen
    else:
        from dcpbench.kernels.rope.reference import rope as chosen
    chosen(x_BhP, positions_B, table, out_BhP, interleaved=interleaved)
