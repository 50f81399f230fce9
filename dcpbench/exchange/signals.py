"""Read the signal counters of kernels that synchronise in peer memory, while one of the kernels may be waiting forever.

This adds no cost to a step: the counters lie in device memory as kernels leave them. When a job hangs, a thread copies
them on a separate stream into memory that was pinned beforehand, and all its waits have time-outs: a spinning kernel
does not block a copy, but a lock of the driver or a broken context may.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from dcpbench.hangs.signal_waits import BarrierCounters, Signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exchange.torch_collectives import Group

COPY_S = 0.4  # maximum duration of a copy in s
COPY_INTERVAL_S = 0.1  # time between two copies in s; counters that differ between them are not stuck
POLL_INTERVAL_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierKind:
    """A kind of barrier of a buffer; see hangs/signal_waits.py."""

    what: str
    phase: str
    counters: torch.Tensor  # int32 [blocks + 1, N], in the own memory
    by_blocks: bool  # True if `sync_blocks` uses the counters, with a row per block; False for `sync_ranks`


class BufferBarriers:
    """Barriers of one buffer. The owner of the buffer keeps this object, and both are freed together."""

    def __init__(self, group: Group, kinds: Sequence[BarrierKind]) -> None:
        self.number = next(_numbers)
        self.kinds = kinds if group.size > 1 else []
        self.rank = group.rank
        self.ranks = tuple(dist.get_process_group_ranks(group.handle)) if group.handle else (0,)
        counters = [kind.counters for kind in self.kinds]
        self.staged = [torch.empty(c.shape, dtype=c.dtype, pin_memory=c.is_cuda) for c in counters]
        _known.append(weakref.ref(self))
        for device in {kind.counters.device for kind in self.kinds if kind.counters.is_cuda}:
            _aside.setdefault(device, torch.cuda.Stream(device))

    def copy_out(self) -> None:
        """Start copying the current counters."""
        for kind, staged in zip(self.kinds, self.staged, strict=True):
            staged.copy_(kind.counters, non_blocking=True)

    def get_barriers(self) -> list[BarrierCounters]:
        """Return the copied counters."""
        return [
            BarrierCounters(
                number=self.number,
                what=kind.what,
                phase=kind.phase,
                ranks=self.ranks,
                rows=_make_rows(staged, self.rank, by_blocks=kind.by_blocks),
            )
            for kind, staged in zip(self.kinds, self.staged, strict=True)
        ]


_numbers = itertools.count()
_known: list[weakref.ref[BufferBarriers]] = []
_aside: dict[torch.device, torch.cuda.Stream] = {}  # made early, as making one may wait for a running kernel


def read_signals(limit_s: float = COPY_S) -> bytes:
    """Return the signals as JSON; empty if this rank has no memory that peers read. Thread-safe; does not raise."""
    _known[:] = [one for one in _known if one() is not None]
    there = [of for one in _known if (of := one()) is not None and of.kinds]
    if not there:
        return b""
    found: list[list[BarrierCounters]] = []
    unread = ""
    try:
        with torch.inference_mode():
            devices = {kind.counters.device for of in there for kind in of.kinds}
            while len(found) < 2 and not (unread := _wait_for_copies(there, devices, limit_s)):  # noqa: PLR2004 -- before and after
                found.append([barrier for of in there for barrier in of.get_barriers()])
                time.sleep(COPY_INTERVAL_S * (len(found) == 1))
    except RuntimeError as e:  # the type of all CUDA errors in torch
        unread = f"its counters could not be copied: {(str(e) or type(e).__name__).splitlines()[0]}"
    if not unread and found[0] != found[1]:
        unread = "its counters still changed while they were read"
    return msgspec.json.encode(Signals(barriers=[] if unread else found[0], unread=unread))


def _wait_for_copies(there: Sequence[BufferBarriers], devices: set[torch.device], limit_s: float) -> str:
    """Wait for all copies; return an empty string, or the reason why they did not complete."""
    until = time.monotonic() + limit_s
    for device in devices:
        if device.type != "cuda":
            for barriers in there:
                barriers.copy_out()
            continue
        torch.cuda.set_device(device)  # this thread's; the main thread has it already
        with torch.cuda.stream(_aside[device]):
            for barriers in there:
                barriers.copy_out()
            copied = torch.cuda.Event()
            copied.record()
        while not copied.query():
            if time.monotonic() > until:
                return f"the copy of its counters had not ended after {limit_s:g} s"
            time.sleep(POLL_INTERVAL_S)
    return ""


def _make_rows(counters: torch.Tensor, rank: int, *, by_blocks: bool) -> list[list[int]]:
    """Return rows in the form of BarrierCounters from counters in the layout of kernels/symm_mem/barrier.py, with the peer at distance n in
    column n.
    """
    size = counters.shape[1]
    flat: list[int] = counters.flatten().tolist()
    used = max((i for i, count in enumerate(flat) if count), default=-1) // size + 1
    found = []
    for row in range(used if by_blocks else min(used, 1)):
        ended = flat[row * size] if by_blocks else flat[size]
        by_distance = [ended, *flat[row * size + 1 : (row + 1) * size]]
        found.append([ended, *(by_distance[(place - rank) % size] for place in range(size))])
    return found
