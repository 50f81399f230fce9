"""KV write, one location at a time, with the integer arithmetic of layout.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench import layout

if TYPE_CHECKING:
    import torch


def write_kv(
    kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, *, rank: int, dcp: int, interleave: int = 1
) -> None:
    """See kernels.kv_write.write_kv."""
    for b, loc in enumerate(loc_B.tolist()):
        if loc >= 0 and layout.owner(loc, dcp, interleave) == rank:
            kv_KQ[layout.row(loc, dcp, interleave)] = new_BQ[b]
