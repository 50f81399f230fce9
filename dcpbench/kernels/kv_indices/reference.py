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


def fill(
    pages: torch.Tensor,
    indptr: torch.Tensor | None,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    share: Share,
) -> None:
    """See kernels.kv_indices: page tables where there is no `indptr`, else the pages one request after the other."""
    ends = [0]
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        found = pages_of(table_SC[slot, :length].tolist(), share)
        out = pages[b] if indptr is None else pages[ends[-1] :]
        out[: len(found)] = pages.new_tensor(found)
        local_lengths_B[b] = layout.local_length(length, share.rank, share.dcp, share.interleave)
        ends.append(ends[-1] + len(found))
    if indptr is not None:
        indptr[: len(ends)] = indptr.new_tensor(ends)
