"""Find which rank waits in a kernel for a signal of which peer, by the counters of kernels that synchronise in peer
memory.

The protocol is in kernels/symm_mem/barrier.py: a rank adds one to a counter in each peer's memory and waits until every
peer has added the same count to its own counters. If a peer has received the signal of a rank's next barrier, that rank
is in the barrier; the rank's own counters show which peer's signal is missing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WRAP = 1 << 32  # counters are int32 and wrap around


class BarrierCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of one kind of barrier in the memory of one rank."""

    number: int  # index of the rank's buffer that holds the counters; the same on all ranks of the group
    what: str  # `merge of symm`
    phase: str = ""  # phase of the step; empty if the half of the layer determines it
    ranks: tuple[int, ...]  # ranks of the group, in group order
    rows: list[list[int]] = []
    """One row per block that synchronises by itself: number of barriers it has ended here, then number of signals from
    each of `ranks` (for this rank itself, the number it has ended). Rows after the last non-zero one may be missing.
    """


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """Signal counters found in the memory of one rank."""

    barriers: list[BarrierCounters] = []
    unread: str = ""  # reason why no further counters could be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """A rank that waits in a barrier, with the peers that it waits for."""

    rank: int
    barrier: BarrierCounters
    number: int  # number of the barrier among those of its kind, from 1
    passed: list[int]  # peers past this barrier, or that signalled it to others: their signal is missing here
    absent: list[int]  # peers that have not begun the barrier, as far as is known

    @property
    def description(self) -> str:
        """Return the barrier as `merge of symm, barrier 70`."""
        return f"{self.barrier.what}, barrier {self.number}"


def find_waits(signals: Mapping[int, Signals]) -> list[Wait]:
    """Return all waiting ranks, in order; for each rank the first barrier of each buffer and kind."""
    kinds: dict[tuple[object, ...], dict[int, BarrierCounters]] = {}
    for rank, rank_signals in sorted(signals.items()):
        for barrier in rank_signals.barriers:
            if rank in barrier.ranks:
                kinds.setdefault((barrier.number, barrier.what, barrier.ranks), {})[rank] = barrier
    found = [wait for by_rank in kinds.values() for rank in by_rank if (wait := _find_wait(by_rank, rank)) is not None]
    return sorted(found, key=lambda wait: wait.rank)


def _find_wait(by_rank: Mapping[int, BarrierCounters], rank: int) -> Wait | None:
    """Return the first wait among the rank's blocks, or None."""
    ranks = by_rank[rank].ranks
    for block in range(max(len(barrier.rows) for barrier in by_rank.values())):
        ended = _count_ended(by_rank[rank], block)
        ahead = max((_compute_lead(heard, ended) for heard in _iter_received_signals(by_rank, rank, block)), default=0)
        if ahead != 1:  # a peer can be ahead by at most one: these counters were read while ranks went on
            continue
        missing = [p for p in ranks if p != rank and _compute_lead(_count_signals(by_rank[rank], block, p), ended) <= 0]
        if missing:
            passed = [
                p
                for p in missing
                if p in by_rank
                and (
                    _compute_lead(_count_ended(by_rank[p], block), ended) > 0
                    or any(_compute_lead(heard, ended) > 0 for heard in _iter_received_signals(by_rank, p, block))
                )
            ]
            absent = [p for p in missing if p not in passed]
            return Wait(rank=rank, barrier=by_rank[rank], number=ended + 1, passed=passed, absent=absent)
    return None


def _iter_received_signals(by_rank: Mapping[int, BarrierCounters], rank: int, block: int) -> Iterator[int]:
    """Yield the number of this rank's signals that each of its peers has received."""
    return (_count_signals(barrier, block, rank) for peer, barrier in by_rank.items() if peer != rank)


def _count_ended(barrier: BarrierCounters, block: int) -> int:
    return next(iter(barrier.rows[block]), 0) if block < len(barrier.rows) else 0


def _count_signals(barrier: BarrierCounters, block: int, peer: int) -> int:
    place = 1 + barrier.ranks.index(peer)
    return barrier.rows[block][place] if block < len(barrier.rows) and place < len(barrier.rows[block]) else 0


def _compute_lead(count: int, of: int) -> int:
    """Return by how much a wrapping counter is ahead of another."""
    return (count - of + WRAP // 2) % WRAP - WRAP // 2
