"""The ranks of a bench: how they find each other, and how they agree on what one of them has run into."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from dcpbench.exchange.collectives import Group, gather_objects
from dcpbench.workloads.calls import first_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NCCL_DEFAULTS = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""As in worker.py: our calls run in one stream, so NCCL need not keep captured and eager collectives apart."""
COLLECTIVE_TIMEOUT = dt.timedelta(minutes=30)
"""Longer than the bench's own watchdog, which has the better story to tell about a hang."""

LOOK_S = 0.02
"""Time between two looks for the file in which rank 0 leaves its port."""

Value = TypeVar("Value")


class RankError(Exception):
    """Some rank could not do what all had to do; the message is its reason."""


def join(rank: int, ranks: int, device: torch.device, folder: Path) -> None:
    """Be one rank of several, which find each other by a file in `folder`; nothing for one alone."""
    if ranks == 1:
        return
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    kind = "nccl" if device.type == "cuda" else "gloo"
    # No device_id: with it NCCL orders the launches of all groups, which costs microseconds at every collective.
    store = _store(rank, ranks, folder / "port")
    dist.init_process_group(kind, store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)


def _store(rank: int, ranks: int, path: Path) -> dist.TCPStore:
    """Served by rank 0 on a port that the system gives it: one that was free a moment ago may be taken by now."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(str(store.port))
        unfinished.rename(path)
        return store
    while not path.exists():
        time.sleep(LOOK_S)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), ranks, is_master=False, wait_for_workers=False)


def everyone() -> Group:
    """The group of all ranks; of one where there are no others."""
    if not dist.is_initialized():
        return Group(size=1, rank=0, handle=None)
    return Group(size=dist.get_world_size(), rank=dist.get_rank(), handle=dist.group.WORLD)


def together(step: Callable[[], Value]) -> Value:
    """What `step` gives on this rank. Raises RankError on all ranks where it raised on one of them.

    After it all ranks take the same branch, so that none waits in a collective for one that has given up.
    """
    value: Value | None = None
    reason = ""
    try:
        value = step()
    except Exception as e:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it
        reason = f"{type(e).__name__}: {first_line(e)}"
    told = one_of(reason)
    if told:
        raise RankError(told)
    return cast("Value", value)


def one_of(text: str) -> str:
    """The first rank's text that is not empty, with its rank where there are several; the same on all ranks."""
    texts = gather_objects(text)
    rank, found = next(((rank, text) for rank, text in enumerate(texts) if text), (0, ""))
    return f"rank {rank}: {found}" if found and len(texts) > 1 and not all(t == found for t in texts) else found
