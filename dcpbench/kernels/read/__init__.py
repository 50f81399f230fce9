"""Read memory as fast as it comes, this GPU's or a peer's, and write next to nothing: measures a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 16384
"""Numbers that are added up to one."""


def read(x: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of `x` by blocks of BLOCK numbers: a read of everything that no compiler can leave out.

    Args:
        x: [n · BLOCK] fp32, contiguous. It may lie in memory of a peer.
        out: [n] fp32.
    """
    if out.is_cuda:
        from dcpbench.kernels.read.streaming import read as chosen
    else:
        from dcpbench.kernels.read.reference import read as chosen
    chosen(x, out)
