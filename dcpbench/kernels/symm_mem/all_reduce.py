"""Sums over ranks (all-reduce) that copy, wait at a barrier and read peers' memory in one kernel.

`reduce_one_shot`: every rank reads all of every peer's addend. One barrier, (N−1)·bytes received: for small tensors.
`reduce_two_shot`: every rank sums up its N-th part and reads the other sums. Two barriers, 2·(N−1)/N·bytes received.

Both add in rank order or let one rank add, in fp32, so that all ranks get the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dcpbench.kernels.symm_mem import count_blocks
from dcpbench.kernels.symm_mem.barrier import append, sync_blocks, tensor_at, wait_for_earlier_kernels

if TYPE_CHECKING:
    from dcpbench.kernels.symm_mem import Peers

ONE_SHOT_BLOCK, ONE_SHOT_WARPS = 1024, 4
TWO_SHOT_BLOCK, TWO_SHOT_WARPS = 2048, 8
ONE_SHOT_GRID = 56  # grid of all message sizes: all blocks have synchronised equally often, and use the same slot


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    peers,
    counters,
    slots,
    x,
    out,
    size,
    slot_bytes,
    rank,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier_kernels(DEPENDENT)
    calls = tl.load((peers[0].to(tl.int64) + counters).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * N)
    at = slots + (calls & 1) * slot_bytes
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    for start in range(first, size, step):
        i = start + tl.arange(0, BLOCK)
        own = tensor_at(peers[0] + at, x.dtype.element_ty) + i
        tl.store(own, tl.load(x + i, mask=i < size), mask=i < size)
    sync_blocks(peers, counters, N, N_BLOCK, DEPENDENT)
    for start in range(first, size, step):
        i = start + tl.arange(0, BLOCK)
        pulled = ()
        for summand in tl.static_range(N):  # in rank order on every rank
            address = peers[0]
            for n in tl.static_range(1, N):
                address = tl.where((rank + n) % N == summand, peers[n], address)
            pulled = append(pulled, tl.load(tensor_at(address + at, x.dtype.element_ty) + i, mask=i < size))
        total = tl.zeros((BLOCK,), tl.float32)
        for n in tl.static_range(N):
            total += pulled[n].to(tl.float32)
        tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)


def reduce_one_shot(peers: Peers, counters: torch.Tensor, slots_2: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' x, contiguous, in x's dtype, as a new tensor.

    slots_2: space for x twice in every buffer, at the same place, [2, bytes] uint8, used by no other function. One
    barrier is enough: a slot is overwritten in the call after the next, and a rank that has passed the barrier of the next
    call knows that it has read the slot.
    """
    out = torch.empty_like(x)
    _one_shot_kernel[(ONE_SHOT_GRID if x.is_cuda else 2,)](
        peers.addresses,
        peers.compute_offset(counters),
        peers.compute_offset(slots_2),
        x,
        out,
        x.numel(),
        slots_2.stride(0),
        peers.rank,
        BLOCK=ONE_SHOT_BLOCK,
        num_warps=ONE_SHOT_WARPS,
        **peers.launch_arguments,
    )
    return out


@triton.jit(do_not_specialize=["rank"])
def _two_shot_kernel(
    peers,
    counters,
    addends,
    sums,
    x,
    out,
    size,
    part,
    rank,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum numbers rank·part … + part on each rank. The same block processes tile i of every part."""
    wait_for_earlier_kernels(DEPENDENT)
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    for start in range(first, part, step):
        i = start + tl.arange(0, BLOCK)
        for n in tl.static_range(N):
            inside = (i < part) & (n * part + i < size)
            own = tensor_at(peers[0] + addends, x.dtype.element_ty) + n * part + i
            tl.store(own, tl.load(x + n * part + i, mask=inside), mask=inside)
    sync_blocks(peers, counters, N, N_BLOCK, False)
    for start in range(first, part, step):
        i = start + tl.arange(0, BLOCK)
        inside = (i < part) & (rank * part + i < size)
        pulled = ()
        for n in tl.static_range(N):
            theirs = tensor_at(peers[n] + addends, x.dtype.element_ty) + rank * part + i
            pulled = append(pulled, tl.load(theirs, mask=inside))
        total = tl.zeros((BLOCK,), tl.float32)
        for n in tl.static_range(N):
            total += pulled[n].to(tl.float32)
        own = tensor_at(peers[0] + sums, x.dtype.element_ty) + i
        tl.store(own, total.to(x.dtype.element_ty), mask=inside)
    sync_blocks(peers, counters, N, N_BLOCK, DEPENDENT)
    for start in range(first, part, step):
        i = start + tl.arange(0, BLOCK)
        pulled = ()
        for n in tl.static_range(N):
            whole = (rank + n) % N * part + i
            theirs = tensor_at(peers[n] + sums, x.dtype.element_ty) + i
            pulled = append(pulled, tl.load(theirs, mask=(i < part) & (whole < size)))
        for n in tl.static_range(N):
            whole = (rank + n) % N * part + i
            tl.store(out + whole, pulled[n], mask=(i < part) & (whole < size))


def reduce_two_shot(
    peers: Peers, counters: torch.Tensor, addends: torch.Tensor, sums: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return the sum of all ranks' x, contiguous, in x's dtype, as a new tensor.

    addends and sums: space for x, and for an N-th of it, with 16 numbers more for each part, at the same place in every
    buffer and used by no other function. Single buffering is enough: peers have read the addends before the second
    barrier and the sums before the next call's first.
    """
    out = torch.empty_like(x)
    part = -(-x.numel() // (peers.size * 16)) * 16
    grid = min(triton.cdiv(part, TWO_SHOT_BLOCK), count_blocks(x.device))
    _two_shot_kernel[(grid,)](
        peers.addresses,
        peers.compute_offset(counters),
        peers.compute_offset(addends),
        peers.compute_offset(sums),
        x,
        out,
        x.numel(),
        part,
        peers.rank,
        BLOCK=TWO_SHOT_BLOCK,
        num_warps=TWO_SHOT_WARPS,
        **peers.launch_arguments,
    )
    return out


def add_up_reference(x_NBD: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks in rank order, rounded once, from all ranks' tensors in one process."""
    wide = torch.promote_types(x_NBD.dtype, torch.float32)
    return x_NBD.to(wide).sum(0).to(x_NBD.dtype)
