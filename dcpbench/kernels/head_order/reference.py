"""The order of heads, slow and obvious."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def in_head_order(q_NBhQ: torch.Tensor) -> torch.Tensor:
    """See kernels.head_order.in_head_order."""
    return q_NBhQ.transpose(0, 1).flatten(1, 2).contiguous()
