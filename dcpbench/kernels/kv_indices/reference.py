"""A rank's page tables, one local row at a time, with the integer arithmetic of layout.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points import layout

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.kv_indices import Share


def pages_of(locs: list[int], share: Share) -> list[int]:
    """Pages of a request's share, in token order; `locs` are the virtual locations of all its tokens."""
    mine = layout.local_tokens(len(locs), share.rank, share.dcp, share.interleave)
    rows = [layout.row(locs[token], share.dcp, share.interleave) for token in mine]
    return [row // share.page_size for row in rows[:: share.page_size]]


def fill_page_tables(
    pages_BM: torch.Tensor,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    share: Share,
) -> None:
    """See kernels.kv_indices.fill_page_tables."""
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        pages = pages_of(table_SC[slot, :length].tolist(), share)
        pages_BM[b, : len(pages)] = pages_BM.new_tensor(pages)
        local_lengths_B[b] = layout.local_length(length, share.rank, share.dcp, share.interleave)


def fill_kv_indices(
    indices: torch.Tensor,
    indptr: torch.Tensor,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    share: Share,
) -> None:
    """See kernels.kv_indices.fill_kv_indices."""
    start = 0
    indptr[0] = start
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        pages = pages_of(table_SC[slot, :length].tolist(), share)
        indices[start : start + len(pages)] = indices.new_tensor(pages)
        local_lengths_B[b] = layout.local_length(length, share.rank, share.dcp, share.interleave)
        start += len(pages)
        indptr[b + 1] = start
