"""The ranks of a bench: how they find each other, and how they agree on what one of them has run into."""

from __future__ import annotations

import datetime as dt
import os
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from dcpbench.exchange.collectives import Group, gather_objects
from dcpbench.workloads.calls import first_line

if TYPE_CHECKING:
    from collections.abc import Callable

NCCL_DEFAULTS = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""As in worker.py: our calls run in one stream, so NCCL need not keep captured and eager collectives apart."""
COLLECTIVE_TIMEOUT = dt.timedelta(minutes=30)
"""Longer than the bench's own watchdog, which has the better story to tell about a hang."""

Value = TypeVar("Value")


class RankError(Exception):
    """Some rank could not do what all had to do; the message is its reason."""


def join(rank: int, ranks: int, device: torch.device) -> None:
    """Be one rank of several, which MASTER_ADDR and MASTER_PORT bring together; nothing for one alone."""
    if ranks == 1:
        return
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    kind = "nccl" if device.type == "cuda" else "gloo"
    # No device_id: with it NCCL orders the launches of all groups, which costs microseconds at every collective.
    dist.init_process_group(kind, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)


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
