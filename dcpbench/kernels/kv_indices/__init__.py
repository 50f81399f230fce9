"""A rank's page tables from the request table, on the device: no length is read by the host.

A request's local rows are, in token order, row 0, 1, … of its share; row j belongs to token `layout.loc_of(j, rank)`,
lies at `layout.row(loc)` of this rank's pool, and is in page `row // page_size`. Pages are aligned (allocator.py), so
that the rows j·page_size … of a share are one page.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Which tokens are a rank's, and how many rows its pages hold."""

    rank: int
    dcp: int
    interleave: int = 1
    page_size: int = 1


def fill_page_tables(
    pages_BM: torch.Tensor,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    share: Share,
) -> None:
    """Fill `pages_BM[b]` with this rank's pages of request b and `local_lengths_B[b]` with its rows. No host sync.

    table_SC holds int32 virtual locations by request slot and token index (engine/request_pool.py); slots_B and
    lengths_B [B ≥ 1] are int32 or int64, lengths in tokens of the whole request, at most C; a length of 0 has no pages.
    pages_BM [B, at least ceil(rows / page_size)] and local_lengths_B are int32, pages_BM's last dimension contiguous;
    what lies behind a request's pages is left as it was. One kernel, which a graph may hold.
    """
    _fill(pages_BM, None, local_lengths_B, table_SC, slots_B, lengths_B, share)


def fill_kv_indices(
    indices: torch.Tensor,
    indptr: torch.Tensor,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    share: Share,
) -> None:
    """As `fill_page_tables`, with the requests' pages one after the other, as FlashInfer's wrappers want them.

    Pages of request b are `indices[indptr[b]:indptr[b + 1]]`; indices and indptr [B + 1] are int32, indices has room
    for all pages, and what lies behind them is left as it was.
    """
    _fill(indices, indptr, local_lengths_B, table_SC, slots_B, lengths_B, share)


def _fill(pages: torch.Tensor, *arguments: Any) -> None:
    if pages.is_cuda:
        from dcpbench.kernels.kv_indices.fused import fill as chosen
    else:
        from dcpbench.kernels.kv_indices.reference import fill as chosen
    chosen(pages, *arguments)
