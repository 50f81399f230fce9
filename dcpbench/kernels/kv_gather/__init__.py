"""The KV prefix of several requests in token order, from rows that lie interleaved on the ranks of a DCP group.

A rank packs its own rows, request by request and in token order, into a part: `part[first(request) + k]` is its k-th
row of that request. Of all ranks' parts, wherever they lie, `in_token_order` makes `out[start(request) + token]`. As
token_idx % N == loc % N, who holds a token follows from its index alone, and no table has to travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.layout import Prefix


def request_table(prefix: Prefix, device: torch.device) -> torch.Tensor:
    """int32 [requests, 1 + N]: each request's start, and its first row in each rank's part. Does not wait."""
    columns = [prefix.starts, *(prefix.firsts(rank) for rank in range(prefix.dcp))]
    host = torch.tensor(columns, dtype=torch.int32)[:, :-1].T.contiguous()
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pack(part_JQ: torch.Tensor, kv_KQ: torch.Tensor, row_J: torch.Tensor) -> None:
    """`part_JQ[j] = kv_KQ[row_J[j]]`: this rank's rows, packed. No host sync.

    row_J is int32, as kv_indices.fill_kv_indices makes it with pages of one row; part_JQ has at least as many rows, is
    contiguous and of the dtype of kv_KQ, whose last dimension is contiguous.
    """
    if kv_KQ.is_cuda:
        from dcpbench.kernels.kv_gather.fused import pack as chosen
    else:
        from dcpbench.kernels.kv_gather.reference import pack as chosen
    chosen(part_JQ, kv_KQ, row_J)


def in_token_order(
    out_TQ: torch.Tensor, own_JQ: torch.Tensor, addresses: Sequence[int], rank: int, prefix: Prefix, table: torch.Tensor
) -> None:
    """All tokens' rows into the first `prefix.tokens` rows of `out_TQ`. No host sync; further rows are left alone.

    own_JQ is this rank's part, contiguous, in the dtype of out_TQ, which is contiguous, too; addresses are where the
    parts of rank, rank + 1, … around the group begin, own_JQ's first; table is request_table(prefix). Parts that lie in
    other GPUs' memory are read in place. Always a kernel, as addresses are all that is known of other ranks' parts:
    without a GPU it runs in Triton's interpreter. Raises ValueError for rows or addresses that are no multiples of 16
    bytes.
    """
    from dcpbench.kernels.kv_gather.fused import in_token_order as order

    order(out_TQ, own_JQ, addresses, rank, prefix, table)
