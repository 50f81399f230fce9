"""Barriers inside kernels that use peers' memory.

There are two, which differ in the writer of the data that is read after them:

- `sync_ranks`: earlier kernels have written it. The first block of each rank signals that they have ended, and all
blocks wait for the first blocks of all peers.
- `sync_blocks`: this kernel has written it. Block i of every rank waits for block i of all the others and may then read the
data that they wrote.

A signal adds one to a counter in each peer's memory, which needs one trip over the link and no answer; a wait polls the
counters in the own memory until each peer has added as often as this rank. Counters only grow, so no reset is needed
between replays of a graph.

Peers are numbered by distance: peer n of rank r is rank (r + n) mod N, peer 0 the rank itself. Each rank thus begins
with another peer, and all links are used at once. Rank r finds the additions of its peer n at column n of its counters,
and that peer finds those of r at column N − n.

Memory order: data that a rank wrote before its signal is visible to a peer that has waited for the signal. The addition
is a release and the poll an acquire, both at system scope; the barriers of the block extend them to its other threads.
Triton's interpreter runs the same lines over memory that processes share: the arithmetic is tested there, the memory
order of a GPU is not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.symm_mem import Peers

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
POLL_INTERVAL_S = 0.005  # pause between polls of the interpreter in s


def _rest() -> None:
    """Yield the core to the ranks that are awaited, because there may be more ranks than cores. For the interpreter."""
    time.sleep(POLL_INTERVAL_S)


_rest.__triton_builtin__ = True  # type: ignore[attr-defined]  # otherwise the compiler rejects code that it removes


@triton.jit
def wait_for_earlier_kernels(DEPENDENT: tl.constexpr):
    """Wait for earlier kernels. A kernel must not read, write or signal before this call."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def tensor_at(address, ELEMENT: tl.constexpr):
    """Return a pointer to an address, a multiple of 16, as 16-byte reads require; small numbers are passed in 32 bits."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def append(values, value):
    """Return a tuple with one more value, because Triton does not support unpacking."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def sync_ranks(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Wait until all peers' kernels before this one have ended. `counters` is an offset in bytes.

    Each block counts its calls behind the N columns, so all calls with the same counters must have the same grid.
    """
    block = tl.program_id(0)
    n = tl.arange(0, N_BLOCK)
    others = (n > 0) & (n < N)
    mine = (peers[0].to(tl.int64) + counters).to(tl.pointer_type(tl.int32))
    call = tl.load(mine + N + block) + 1
    if block == 0:
        tl.atomic_add(_get_peer_counters(peers, counters, n, N), 1, mask=others, sem="release", scope="sys")
    _wait_for(mine + n, others, call)
    tl.store(mine + N + block, call)
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def sync_blocks(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Wait until the same block of all peers has reached this point. Each block has N columns; its own counts its
    calls.
    """
    n = tl.arange(0, N_BLOCK)
    others = (n > 0) & (n < N)
    row = tl.program_id(0) * N
    mine = (peers[0].to(tl.int64) + counters).to(tl.pointer_type(tl.int32)) + row
    call = tl.load(mine) + 1
    tl.debug_barrier()
    tl.atomic_add(_get_peer_counters(peers, counters, n, N) + row, 1, mask=others, sem="release", scope="sys")
    _wait_for(mine + n, others, call)
    tl.store(mine, call)
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def _get_peer_counters(peers, counters, n, N: tl.constexpr):
    """Return the addresses in each peer's memory at which this rank adds, [n]."""
    address = tl.zeros_like(n).to(tl.int64)
    for i in tl.static_range(1, N):
        address = tl.where(n == i, peers[i], address)
    return (address + counters).to(tl.pointer_type(tl.int32)) + N - n


@triton.jit
def _wait_for(flags, others, count):
    """Poll the flags until all those of peers have reached a count: by difference, because counters wrap around."""
    if INTERPRETED:
        behind = tl.full((), -1, tl.int32)
        while behind < 0:
            seen = tl.atomic_add(flags, 0, mask=others, sem="acquire", scope="sys")
            behind = tl.min(tl.where(others, seen - count, 0), 0)
            if behind < 0:
                _rest()
    else:
        # Each thread looks for itself, and only at plain loads: threads that compared notes, or atomics, take longer.
        tl.inline_asm_elementwise(
            """{
            .reg .pred more;
            .reg .b32 seen;
            mov.b32 $0, 0;
            setp.ne.b32 more, $2, 0;
            @!more bra done;
            look: ld.acquire.sys.global.b32 seen, [$1];
            sub.s32 seen, seen, $3;
            setp.lt.s32 more, seen, 0;
            @more bra look;
            done:
            }""",
            "=r,l,r,r",
            [flags, others.to(tl.int32), count],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def _fence_kernel(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_earlier_kernels(DEPENDENT)
    sync_ranks(peers, counters, N, N_BLOCK, DEPENDENT)


def launch_fence(peers: Peers, counters: torch.Tensor) -> None:
    """Launch a fence: later kernels of this rank start after all peers' kernels before their fence have ended."""
    _fence_kernel[(1,)](peers.addresses, peers.compute_offset(counters), num_warps=1, **peers.launch_arguments)
