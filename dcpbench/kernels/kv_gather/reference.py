"""Packing and ordering, one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points import layout

if TYPE_CHECKING:
    import torch

    from dcpbench.points.layout import Prefix


def pack(part_JQ: torch.Tensor, kv_KQ: torch.Tensor, row_J: torch.Tensor) -> None:
    """See kernels.kv_gather.pack."""
    for j, row in enumerate(row_J.tolist()):
        part_JQ[j] = kv_KQ[row]


def in_token_order(out_TQ: torch.Tensor, parts: list[torch.Tensor], prefix: Prefix) -> None:
    """See kernels.kv_gather.in_token_order; parts are those of ranks 0 to N−1."""
    firsts = [prefix.firsts(rank) for rank in range(prefix.dcp)]
    for request, length in enumerate(prefix.lengths):
        for token in range(length):
            owner = layout.owner(token, prefix.dcp, prefix.interleave)
            row = firsts[owner][request] + layout.row(token, prefix.dcp, prefix.interleave)
            out_TQ[prefix.starts[request] + token] = parts[owner][row]
