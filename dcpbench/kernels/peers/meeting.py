"""The barrier inside a kernel that reads peers' memory: block i of every rank meets block i of all the others.

A block adds one to a counter in each peer's memory, which needs one trip over the link and no answer, then waits until
each peer has added as often to its own. Counters only grow, so nothing has to be reset between replays of a graph.

Peers are numbered by distance: peer n of rank r is rank (r + n) mod N, peer 0 the rank itself. Each rank thus begins
with another peer, and all links are used at once. Rank r finds what its peer n has added at `counters[block, n]`, and
that peer what r has at N − n. Column 0 counts the block's own meetings.

Order: what this rank wrote before is visible to a peer that has met it, whether an earlier kernel or this block wrote
it. The addition is a release and the wait an acquire, both for the whole system; the two barriers of the block extend
them to its other threads. Triton's interpreter runs the same lines over memory that processes share, where the
arithmetic is tested and the memory order of a GPU is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dcpbench.kernels.peers import dependent_launch

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.peers import Peers


@triton.jit
def wait_for_earlier_kernels(DEPENDENT: tl.constexpr):
    """Nothing may be read, written or signalled before."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def tensor_at(address, ELEMENT: tl.constexpr):
    """A pointer to what begins at an address, a multiple of 16, as 16-byte reads want it."""
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def append(values, value):
    """A tuple and one more value; Triton knows no unpacking."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def meet(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Meet the same block of all peers. `peers` holds addresses, `counters` is an offset in bytes."""
    block = tl.program_id(0)
    n = tl.arange(0, N_BLOCK)
    others = (n > 0) & (n < N)
    theirs = tl.zeros_like(n).to(tl.int64)
    for i in tl.static_range(1, N):
        theirs = tl.where(n == i, peers[i], theirs)
    theirs = (theirs + counters).to(tl.pointer_type(tl.int32)) + block * N + N - n
    mine = (peers[0] + counters).to(tl.pointer_type(tl.int32)) + block * N
    met = tl.load(mine) + 1
    tl.debug_barrier()
    tl.atomic_add(theirs, 1, mask=others, sem="release", scope="sys")
    tl.store(mine, met)
    behind = tl.full((), -1, tl.int32)
    while behind < 0:
        seen = tl.atomic_add(mine + n, 0, mask=others, sem="acquire", scope="sys")
        # A difference and not an order of values: counters wrap around.
        behind = tl.min(tl.where(others, seen - met, 0), 0)
    tl.debug_barrier()
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def _meeting_kernel(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_earlier_kernels(DEPENDENT)
    meet(peers, counters, N, N_BLOCK, DEPENDENT)


def fence(peers: Peers, counters: torch.Tensor) -> None:
    """Kernels of this rank that follow start after all peers' kernels before their fence have ended."""
    _meeting_kernel[(1,)](
        peers.addresses, peers.offset(counters), N=peers.size, N_BLOCK=triton.next_power_of_2(peers.size),
        num_warps=1, **dependent_launch(peers.own.device),
    )  # fmt: skip
