"""Who waits in a kernel for a signal of whom, by the counters of kernels that meet in peers' memory.

How they meet: kernels/peers/meeting.py. A rank adds one to a counter in each peer's memory and waits until all peers have
added to its own as often. So a peer that has a rank's signal of its next meeting says that the rank is in that meeting,
and the rank's own counters say whose signal it has not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WRAP = 1 << 32
"""Counters are int32 and wrap around."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of one kind of meeting in the memory of one rank."""

    number: int
    """Which buffer of the rank it lies in: the same on all ranks of its group."""
    what: str
    """`merge of symm`."""
    phase: str = ""
    """Of a step; empty where the half of a layer decides."""
    ranks: tuple[int, ...]
    """Of the group, in its order."""
    rows: list[list[int]] = []
    """For each block that meets by itself: how many meetings it has ended here, and how often each of `ranks` has
    signalled (this rank itself: as many as it has ended). Behind the last one that is not zero there may be none."""


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank found in its memory."""

    meetings: list[Meeting] = []
    unread: str = ""
    """Why no more than these could be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """A rank in a meeting that peers keep it in."""

    rank: int
    meeting: Meeting
    number: int
    """Of the meeting among those of its kind, from 1 on."""
    passed: list[int]
    """Peers that have ended this meeting, or whose signal of it others have: theirs has not come here."""
    absent: list[int]
    """Peers that have not begun it, as far as anybody says."""

    @property
    def said(self) -> str:
        """`merge of symm, meeting 70`."""
        return f"{self.meeting.what}, meeting {self.number}"


def waits(signals: Mapping[int, Signals]) -> list[Wait]:
    """All that wait, by rank; of one rank the first meeting of each buffer and kind."""
    kinds: dict[tuple[object, ...], dict[int, Meeting]] = {}
    for rank, told in sorted(signals.items()):
        for meeting in told.meetings:
            if rank in meeting.ranks:
                kinds.setdefault((meeting.number, meeting.what, meeting.ranks), {})[rank] = meeting
    found = [wait for by_rank in kinds.values() for rank in by_rank if (wait := _wait(by_rank, rank)) is not None]
    return sorted(found, key=lambda wait: wait.rank)


def _wait(by_rank: Mapping[int, Meeting], rank: int) -> Wait | None:
    """The first of its blocks that is known to wait."""
    ranks = by_rank[rank].ranks
    for block in range(max(len(meeting.rows) for meeting in by_rank.values())):
        ended = _ended(by_rank[rank], block)
        ahead = max((_ahead(heard, ended) for heard in _heard_of(by_rank, rank, block)), default=0)
        if ahead != 1:  # by more nobody can be: these were read while ranks went on
            continue
        missing = [p for p in ranks if p != rank and _ahead(_signals(by_rank[rank], block, p), ended) <= 0]
        if missing:
            passed = [
                p
                for p in missing
                if p in by_rank
                and (
                    _ahead(_ended(by_rank[p], block), ended) > 0
                    or any(_ahead(heard, ended) > 0 for heard in _heard_of(by_rank, p, block))
                )
            ]
            absent = [p for p in missing if p not in passed]
            return Wait(rank=rank, meeting=by_rank[rank], number=ended + 1, passed=passed, absent=absent)
    return None


def _heard_of(by_rank: Mapping[int, Meeting], rank: int, block: int) -> Iterator[int]:
    """How often each of its peers has its signal."""
    return (_signals(meeting, block, rank) for peer, meeting in by_rank.items() if peer != rank)


def _ended(meeting: Meeting, block: int) -> int:
    return next(iter(meeting.rows[block]), 0) if block < len(meeting.rows) else 0


def _signals(meeting: Meeting, block: int, peer: int) -> int:
    place = 1 + meeting.ranks.index(peer)
    return meeting.rows[block][place] if block < len(meeting.rows) and place < len(meeting.rows[block]) else 0


def _ahead(count: int, of: int) -> int:
    """By how much a counter is ahead of another."""
    return (count - of + WRAP // 2) % WRAP - WRAP // 2
