"""Gather the KV prefix of several requests into token order, from rows interleaved on the ranks of a DCP group.

A rank packs its own rows, request by request and in token order, into a part: `part[first(request) + k]` is its k-th
row of that request. From all ranks' parts, at any addresses, `gather_in_token_order` makes `out[start(request) + token]`.
Because token_idx % N == loc % N, the owner of a token follows from its index alone, and no table has to be sent.

In both kernels a program copies ROWS rows, 16 bytes per thread, all of them loaded before it writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dcpbench.kernels.kv_write import copy_rows, split_width
from dcpbench.points import layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.layout import Prefix

ROWS = 16
WARPS = 8
UNIT = 16  # bytes that a thread reads at once; rows and addresses are multiples of it


def make_request_table(prefix: Prefix, device: torch.device) -> torch.Tensor:
    """Return int32 [requests, 1 + N]: each request's start and its first row in each rank's part. No host sync."""
    columns = [prefix.starts, *(prefix.list_first_rows(rank) for rank in range(prefix.dcp))]
    return copy_to_device(torch.tensor(columns, dtype=torch.int32)[:, :-1].T.contiguous(), device)


def copy_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on the device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pack_rows(part_JQ: torch.Tensor, kv_KQ: torch.Tensor, row_J: torch.Tensor) -> None:
    """Pack this rank's rows: `part_JQ[j] = kv_KQ[row_J[j]]`. No host sync.

    row_J is int32, as kv_indices.write_pages makes it with pages of one row; part_JQ has at least as many rows, is
    contiguous and of the dtype of kv_KQ, which has a contiguous last dimension.
    """
    (pack_rows_fused if kv_KQ.is_cuda else pack_rows_reference)(part_JQ, kv_KQ, row_J)


def gather_in_token_order(
    out_TQ: torch.Tensor, own_JQ: torch.Tensor, addresses: Sequence[int], rank: int, prefix: Prefix, table: torch.Tensor
) -> None:
    """Gather all tokens' rows into the first `prefix.tokens` rows of `out_TQ`. No host sync; other rows are unchanged.

    own_JQ is this rank's part, contiguous, in the dtype of out_TQ, which is contiguous, too; addresses are where the
    parts of rank, rank + 1, … around the group begin, own_JQ's first; table is make_request_table(prefix). Parts that lie in
    other GPUs' memory are read in place. Always a kernel, as addresses are all that is known of other ranks' parts:
    without a GPU it runs in Triton's interpreter. Raises ValueError for rows or addresses that are no multiples of 16
    bytes.
    """
    width = out_TQ.shape[1]
    if any(number % UNIT for number in (width * out_TQ.itemsize, *addresses)):
        raise ValueError(f"rows of {width * out_TQ.itemsize} bytes and parts must begin at multiples of {UNIT} bytes")
    _order_kernel[(triton.cdiv(prefix.tokens, ROWS),)](
        out_TQ,
        own_JQ,
        tuple(addresses),
        table,
        prefix.tokens,
        len(prefix.lengths),
        rank,
        N=prefix.dcp,
        INTERLEAVE=prefix.interleave,
        REQUESTS=triton.next_power_of_2(len(prefix.lengths)),
        ITEM_BYTES=out_TQ.itemsize,
        UNIT=UNIT,
        **split_width(width),
        ROWS=ROWS,
        num_warps=WARPS,
    )


def pack_rows_reference(part_JQ: torch.Tensor, kv_KQ: torch.Tensor, row_J: torch.Tensor) -> None:
    """Pack one row at a time."""
    for j, row in enumerate(row_J.tolist()):
        part_JQ[j] = kv_KQ[row]


def gather_in_token_order_reference(out_TQ: torch.Tensor, parts: list[torch.Tensor], prefix: Prefix) -> None:
    """Copy one row at a time; parts are those of ranks 0 to N−1."""
    firsts = [prefix.list_first_rows(rank) for rank in range(prefix.dcp)]
    for request, length in enumerate(prefix.lengths):
        for token in range(length):
            owner = layout.get_owner(token, prefix.dcp, prefix.interleave)
            row = firsts[owner][request] + layout.get_row(token, prefix.dcp, prefix.interleave)
            out_TQ[prefix.starts[request] + token] = parts[owner][row]


@triton.jit(do_not_specialize=["count"])
def _pack_kernel(
    part, kv, rows, count, kv_stride, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr
):
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = j < count
    row = tl.load(rows + j, mask=live, other=0).to(tl.int64)
    copy_rows(
        (kv + row * kv_stride)[:, None],
        (part + j.to(tl.int64) * WIDTH)[:, None],
        live,
        1.0,
        WIDTH,
        HEAD,
        TAIL,
        False,
        False,
        False,
    )


@triton.jit(do_not_specialize=["tokens", "requests", "rank"])
def _order_kernel(
    out,
    own,
    addresses,
    table,
    tokens,
    requests,
    rank,
    N: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    REQUESTS: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = t < tokens
    # A request's number: how many of the others start no later. One without tokens is passed over.
    others = tl.arange(0, REQUESTS)
    starts = tl.load(table + others * (N + 1), mask=others < requests, other=0x7FFFFFFF)
    request = tl.sum((starts[None, :] <= t[:, None]).to(tl.int32), 1) - 1
    entry = table + request * (N + 1)
    token = t - tl.load(entry, mask=live, other=0)
    owner = token // INTERLEAVE % N
    row = token // (INTERLEAVE * N) * INTERLEAVE + token % INTERLEAVE + tl.load(entry + 1 + owner, mask=live, other=0)
    peer = (owner - rank + N) % N
    units = tl.zeros([ROWS], tl.int64)
    for n in tl.static_range(1, N):
        units = tl.where(peer == n, (addresses[n] - addresses[0]) // UNIT, units)
    # A multiple of UNIT for the compiler to see, without which it would read two bytes at a time.
    source = own + units * (UNIT // ITEM_BYTES) + row.to(tl.int64) * WIDTH
    copy_rows(
        source[:, None], (out + t.to(tl.int64) * WIDTH)[:, None], live, 1.0, WIDTH, HEAD, TAIL, False, False, False
    )


def pack_rows_fused(part_JQ: torch.Tensor, kv_KQ: torch.Tensor, row_J: torch.Tensor) -> None:
    """Pack with one kernel."""
    count = len(row_J)
    _pack_kernel[(triton.cdiv(count, ROWS),)](
        part_JQ, kv_KQ, row_J, count, kv_KQ.stride(0), **split_width(kv_KQ.shape[1]), ROWS=ROWS, num_warps=WARPS
    )
