"""Push q to all peers: each rank writes its heads into everyone's gathered tensor, then waits at a barrier, in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dcpbench.kernels.symm_mem import count_blocks
from dcpbench.kernels.symm_mem.barrier import sync_blocks, tensor_at, wait_for_earlier_kernels

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.symm_mem import Peers

BLOCK = 1024
WARPS = 4


@triton.jit(do_not_specialize=["batch", "rank"])
def _gather_kernel(
    peers,
    counters,
    q,
    all_at,
    batch,
    rank,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Gather tiles, each BLOCK of the ROW = h·Q numbers that this rank has of one request."""
    wait_for_earlier_kernels(DEPENDENT)
    tiles: tl.constexpr = (ROW + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = tl.cast(tile // tiles, tl.int64)
        x = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = x < ROW
        values = tl.load(q + b * ROW + x, mask=inside)
        for n in tl.static_range(N):  # peers first, the own tensor last
            theirs = tensor_at(peers[(n + 1) % N] + all_at, q.dtype.element_ty)
            tl.store(theirs + (b * N + rank) * ROW + x, values, mask=inside)
    sync_blocks(peers, counters, N, N_BLOCK, DEPENDENT)


def gather_queries(peers: Peers, counters: torch.Tensor, q_BhQ: torch.Tensor, all_BHQ: torch.Tensor) -> None:
    """Write q_BhQ, contiguous, into every rank's all_BHQ and wait until all have: H = N·h heads in rank order.

    all_BHQ: contiguous, at the same place in the own buffer and in every peer's. Peers must have read its earlier
    contents; a barrier with them after their read ensures this.
    """
    batch, heads, width = q_BhQ.shape
    row = heads * width
    grid = min(batch * triton.cdiv(row, BLOCK), count_blocks(q_BhQ.device))
    _gather_kernel[(grid,)](
        peers.addresses,
        peers.compute_offset(counters),
        q_BhQ,
        peers.compute_offset(all_BHQ),
        batch,
        peers.rank,
        ROW=row,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **peers.launch_arguments,
    )
