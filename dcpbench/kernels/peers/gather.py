"""Pull all peers' q into one tensor: the barrier and the copy in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dcpbench.kernels.peers import blocks_of, dependent_launch
from dcpbench.kernels.peers.meeting import append, meet_ranks, tensor_at, wait_for_earlier_kernels

if TYPE_CHECKING:
    from dcpbench.kernels.peers import Peers

BLOCK = 2048
WARPS = 8


@triton.jit(do_not_specialize=["batch", "rank"])
def _gather_kernel(
    peers, counters, q_at, out, batch, rank,
    N: tl.constexpr, N_BLOCK: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK of the ROW = h·Q numbers that each peer has of one request, from all peers at once."""
    wait_for_earlier_kernels(DEPENDENT)
    meet_ranks(peers, counters, N, N_BLOCK, DEPENDENT)
    tiles: tl.constexpr = (ROW + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = tl.cast(tile // tiles, tl.int64)
        x = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = x < ROW
        pulled = ()
        for n in tl.static_range(N):  # all reads are under way before the first write
            q = tensor_at(peers[n] + q_at, out.dtype.element_ty) + b * ROW + x
            pulled = append(pulled, tl.load(q, mask=inside))
        for n in tl.static_range(N):
            tl.store(out + (b * N + (rank + n) % N) * ROW + x, pulled[n], mask=inside)


def gather(peers: Peers, counters: torch.Tensor, q_BhQ: torch.Tensor) -> torch.Tensor:
    """All ranks' heads, contiguous [B, H, Q] with H = N·h in rank order.

    q_BhQ: contiguous, in the own buffer and in every peer's at the same place, written by kernels before this one. It
    may be overwritten once this rank has met its peers again behind this call: they have read it then.
    """
    batch, heads, width = q_BhQ.shape
    out_BHQ = torch.empty(batch, peers.size * heads, width, dtype=q_BhQ.dtype, device=q_BhQ.device)
    _gather_kernel[(blocks_of(q_BhQ.device),)](
        peers.addresses, peers.offset(counters), peers.offset(q_BhQ), out_BHQ, batch, peers.rank,
        N=peers.size, N_BLOCK=triton.next_power_of_2(peers.size), ROW=heads * width, BLOCK=BLOCK, num_warps=WARPS,
        **dependent_launch(q_BhQ.device),
    )  # fmt: skip
    return out_BHQ
