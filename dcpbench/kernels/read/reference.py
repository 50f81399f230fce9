"""Block sums, slow and obvious."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def read(x: torch.Tensor, out: torch.Tensor) -> None:
    """See kernels.read."""
    out.copy_(x.double().view(len(out), -1).sum(1))
