"""A rank's page tables from the request table, on the device: no length is read by the host.

A request's local rows are, in token order, row 0, 1, … of its share; row j belongs to token `layout.get_loc(j, rank)`,
lies at `layout.get_row(loc)` of this rank's pool, and is in page `row // page_size`. Pages are aligned (allocator.py), so
that the rows j·page_size … of a share are one page.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dcpbench.points import layout

if TYPE_CHECKING:
    import torch

BLOCK = 1024  # pages of one program


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcpShard:
    """Which tokens of a request a DCP rank stores, by its rank, the DCP size and the interleave, and the page size."""

    rank: int
    dcp: int
    interleave: int = 1
    page_size: int = 1


def write_pages(
    pages: torch.Tensor,
    indptr: torch.Tensor | None,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    shard: DcpShard,
) -> None:
    """Write this rank's pages of each request b into `pages`, and its number of rows into `local_lengths_B[b]`. No host
    sync.

    table_SC holds int32 virtual locations by request slot and token index (engine/request_pool.py); slots_B and
    lengths_B [B ≥ 1] are int32 or int64, lengths in tokens of the whole request, at most C; a length of 0 has no pages.

    Without `indptr`, `pages` is a table [B, at least ceil(rows / page_size)]. With it, [B + 1], requests lie one after
    the other, as FlashInfer's wrappers require: request b's pages are `pages[indptr[b]:indptr[b + 1]]`, and `pages` is
    large enough for all. Written values are int32, and the last dimension of `pages` is contiguous; entries behind a
    request's pages are unchanged. One kernel, which can be captured in a graph.
    """
    fill = write_pages_fused if pages.is_cuda else write_pages_reference
    fill(pages, indptr, local_lengths_B, table_SC, slots_B, lengths_B, shard)


def compute_local_lengths(lengths_B: torch.Tensor, shard: DcpShard) -> torch.Tensor:
    """Return layout.compute_local_length of each number of tokens, on their device."""
    stripe = shard.dcp * shard.interleave
    rest = (lengths_B % stripe - shard.rank * shard.interleave).clamp(0, shard.interleave)
    return lengths_B // stripe * shard.interleave + rest


def list_pages(locs: list[int], shard: DcpShard) -> list[int]:
    """Return the pages of a request's share, in token order; `locs` are the virtual locations of all its tokens."""
    mine = layout.list_local_tokens(len(locs), shard.rank, shard.dcp, shard.interleave)
    rows = [layout.get_row(locs[token], shard.dcp, shard.interleave) for token in mine]
    return [row // shard.page_size for row in rows[:: shard.page_size]]


def write_pages_reference(
    pages: torch.Tensor,
    indptr: torch.Tensor | None,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    shard: DcpShard,
) -> None:
    """Fill one local row at a time, with the integer arithmetic of layout.py."""
    ends = [0]
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        found = list_pages(table_SC[slot, :length].tolist(), shard)
        out = pages[b] if indptr is None else pages[ends[-1] :]
        out[: len(found)] = pages.new_tensor(found)
        local_lengths_B[b] = layout.compute_local_length(length, shard.rank, shard.dcp, shard.interleave)
        ends.append(ends[-1] + len(found))
    if indptr is not None:
        indptr[: len(ends)] = indptr.new_tensor(ends)


@triton.jit
def _local_length(length, rank, DCP: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Compute layout.compute_local_length in a kernel."""
    STRIPE: tl.constexpr = DCP * INTERLEAVE
    rest = tl.minimum(tl.maximum(length % STRIPE - rank * INTERLEAVE, 0), INTERLEAVE)
    return length // STRIPE * INTERLEAVE + rest


@triton.jit(do_not_specialize=["rank", "batch"])
def _fill_kernel(
    pages,
    indptr,
    local_lengths,
    table,
    slots,
    lengths,
    pages_stride,
    table_stride,
    batch,
    rank,
    DCP: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE: tl.constexpr,
    PACKED: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1)
    length = tl.load(lengths + b).to(tl.int32)
    local = _local_length(length, rank, DCP, INTERLEAVE)
    count = tl.cdiv(local, PAGE)
    first = tl.program_id(0) * BLOCK
    if tl.program_id(0) == 0:
        tl.store(local_lengths + b, local)
    if (first < count) | (tl.program_id(0) == 0):
        out = pages + b.to(tl.int64) * pages_stride
        if PACKED:
            # Every program sums the requests before its own, so that no program waits for another.
            others = tl.arange(0, BATCH)
            before = tl.load(lengths + others, mask=others < b, other=0).to(tl.int32)
            start = tl.sum(tl.cdiv(_local_length(before, rank, DCP, INTERLEAVE), PAGE), 0)
            out = pages + start
            if tl.program_id(0) == 0:
                tl.store(indptr + b, start)
                if b == batch - 1:
                    tl.store(indptr + batch, start + count)
        page = first + tl.arange(0, BLOCK)
        row = page * PAGE
        token = row // INTERLEAVE * (INTERLEAVE * DCP) + rank * INTERLEAVE + row % INTERLEAVE
        slot = tl.load(slots + b).to(tl.int64)
        loc = tl.load(table + slot * table_stride + token, mask=page < count, other=0)
        row = loc // (INTERLEAVE * DCP) * INTERLEAVE + loc % INTERLEAVE
        tl.store(out + page, row // PAGE, mask=page < count)


def write_pages_fused(
    pages: torch.Tensor,
    indptr: torch.Tensor | None,
    local_lengths_B: torch.Tensor,
    table_SC: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    shard: DcpShard,
) -> None:
    """Run one kernel: each program writes a range of one request's pages, and sums the page counts before it."""
    batch = len(slots_B)
    # Maximum number of pages of a request, by the size of the table: lengths are on the device.
    stripes = triton.cdiv(table_SC.shape[1], shard.interleave * shard.dcp)
    most = triton.cdiv(stripes * shard.interleave, shard.page_size)
    _fill_kernel[(triton.cdiv(most, BLOCK), batch)](
        pages,
        local_lengths_B if indptr is None else indptr,
        local_lengths_B,
        table_SC,
        slots_B,
        lengths_B,
        pages.stride(0),
        table_SC.stride(0),
        batch,
        shard.rank,
        DCP=shard.dcp,
        INTERLEAVE=shard.interleave,
        PAGE=shard.page_size,
        PACKED=indptr is not None,
        BATCH=triton.next_power_of_2(batch),
        BLOCK=BLOCK,
        num_warps=4,
    )
