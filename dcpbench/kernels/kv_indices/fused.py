"""Page tables in one kernel: each program writes a stretch of one request's pages, and sums what lies before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.kv_indices import Share

BLOCK = 1024
"""Pages of one program."""


@triton.jit
def _local_length(length, rank, DCP: tl.constexpr, INTERLEAVE: tl.constexpr):
    """See layout.local_length."""
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
            # Every program adds up the requests before its own: nothing waits for another program.
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
    batch = len(slots_B)
    # Most pages of a request, by what the table can hold: lengths are on the device.
    stripes = triton.cdiv(table_SC.shape[1], share.interleave * share.dcp)
    most = triton.cdiv(stripes * share.interleave, share.page_size)
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
        share.rank,
        DCP=share.dcp,
        INTERLEAVE=share.interleave,
        PAGE=share.page_size,
        PACKED=indptr is not None,
        BATCH=triton.next_power_of_2(batch),
        BLOCK=BLOCK,
        num_warps=4,
    )
