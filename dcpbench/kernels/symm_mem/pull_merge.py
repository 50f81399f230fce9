"""Pull this rank's heads of all peers' partial outputs and merge them: barrier, reading and merging in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dcpbench.kernels.merge import merge_partials
from dcpbench.kernels.symm_mem import count_blocks, get_triton_dtype
from dcpbench.kernels.symm_mem.barrier import append, sync_ranks, tensor_at, wait_for_earlier_kernels

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.symm_mem import Peers

TILE = 2048  # numbers of each peer in one tile
WARPS = 8


@triton.jit(do_not_specialize=["batch", "rank"])
def _merge_kernel(
    peers,
    counters,
    o_at,
    lse_at,
    out,
    batch,
    rank,
    out_stride_h,
    out_stride_b,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    R_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge tiles, each ROWS of this rank's batch·h rows (request, head), from all peers at once."""
    wait_for_earlier_kernels(DEPENDENT)
    sync_ranks(peers, counters, N, N_BLOCK, DEPENDENT)
    h: tl.constexpr = HEADS // N
    r = tl.arange(0, R_BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(batch * h, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        b = (row // h).to(tl.int64)
        j = (row % h).to(tl.int64)
        source = b * HEADS + rank * h + j
        live = row < batch * h
        inside = live[:, None] & (r < R)[None, :]
        partials, lses = (), ()
        for n in tl.static_range(N):  # all reads are under way before the first value is used
            lse = (peers[n].to(tl.int64) + lse_at).to(tl.pointer_type(tl.float32)) + source
            o = tensor_at(peers[n] + o_at, ELEMENT) + source[:, None] * R + r[None, :]
            lses = append(lses, tl.load(lse, mask=live, other=float("-inf")))
            partials = append(partials, tl.load(o, mask=inside, other=0.0))
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for n in tl.static_range(N):
            top = tl.maximum(top, lses[n])
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros_like(top)
        merged = tl.zeros((ROWS, R_BLOCK), tl.float32)
        for n in tl.static_range(N):
            power = tl.exp(lses[n] - top)
            total += power
            # Where a peer has no rows its o may be anything, NaN included: chosen away, not multiplied by 0.
            weighted = partials[n].to(tl.float32) * power[:, None]
            merged += tl.where(power[:, None] > 0.0, weighted, 0.0)
        merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
        write = out + (j * out_stride_h + b * out_stride_b)[:, None] + r[None, :]
        tl.store(write, merged.to(out.dtype.element_ty), mask=inside)


def merge_from_peers(
    peers: Peers, counters: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor, out_hBR: torch.Tensor
) -> None:
    """Write this rank's h = H/N heads of all ranks' partial outputs, merged by their log-sum-exp in fp32.

    o_BHR and lse_BH (fp32, natural log): contiguous, at the same place in the own buffer and in every peer's, written
    by kernels before this one. Where lse is -inf, o is ignored; the result is 0 where it is -inf on all ranks. out_hBR:
    any dtype and strides, the last dimension contiguous.

    o and lse may be overwritten once this rank has passed another barrier after this call: they have read them then.
    """
    batch, heads, width = o_BHR.shape
    columns = triton.next_power_of_2(width)
    rows = max(1, TILE // columns)
    _merge_kernel[(count_blocks(o_BHR.device),)](
        peers.addresses,
        peers.compute_offset(counters),
        peers.compute_offset(o_BHR),
        peers.compute_offset(lse_BH),
        out_hBR,
        batch,
        peers.rank,
        out_hBR.stride(0),
        out_hBR.stride(1),
        HEADS=heads,
        R=width,
        R_BLOCK=columns,
        ROWS=rows,
        ELEMENT=get_triton_dtype(o_BHR.dtype),
        num_warps=WARPS,
        **peers.launch_arguments,
    )


def merge_reference(o_NBHR: torch.Tensor, lse_NBH: torch.Tensor, rank: int) -> torch.Tensor:
    """Return [h, B, R] in o's dtype from all ranks' tensors in one process."""
    h = o_NBHR.shape[2] // o_NBHR.shape[0]
    return merge_partials(o_NBHR, lse_NBH)[:, rank * h : (rank + 1) * h].transpose(0, 1)
