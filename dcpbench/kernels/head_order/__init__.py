"""Puts the queries that an all-gather brought, rank after rank, into the order of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def in_head_order(q_NBhQ: torch.Tensor) -> torch.Tensor:
    """Contiguous [N, B, h, Q] as contiguous [B, N·h, Q]; the same memory where there is one rank or one request."""
    if 1 in q_NBhQ.shape[:2]:
        return q_NBhQ.transpose(0, 1).flatten(1, 2)
    if q_NBhQ.is_cuda:
        from dcpbench.kernels.head_order.fused import in_head_order as chosen
    else:
        from dcpbench.kernels.head_order.reference import in_head_order as chosen
    return chosen(q_NBhQ)
