"""Packing and merging messages, slow and obvious."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.kernels.merge.reference import merge

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.pack import Message


def pack(o_BHR: torch.Tensor, lse_BH: torch.Tensor, message: Message, wire_NW: torch.Tensor) -> None:
    """See kernels.pack.pack."""
    o_NBhR, lse_NBh = message.views(wire_NW)
    o_NBhR.copy_(o_BHR.unflatten(1, (-1, message.heads)).transpose(0, 1))
    lse_NBh.copy_(lse_BH.unflatten(1, (-1, message.heads)).transpose(0, 1))


def combine(wire_NW: torch.Tensor, message: Message, out_hBR: torch.Tensor) -> None:
    """See kernels.pack.combine."""
    o_NBhR, lse_NBh = message.views(wire_NW)
    out_hBR.copy_(merge(o_NBhR.float(), lse_NBh).transpose(0, 1))
