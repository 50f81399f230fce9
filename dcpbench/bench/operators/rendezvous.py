"""Rendezvous of ranks, and agreement on the errors of any of them."""

from __future__ import annotations

import datetime as dt
import functools
import os
import time
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

from dcpbench.bench.operators.calls import get_first_line
from dcpbench.errors import DcpbenchError
from dcpbench.exchange.torch_collectives import Group, gather_objects
from dcpbench.launch.jobs import open_listener

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch._C._distributed_c10d import Store

NCCL_DEFAULTS = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""Environment variables set on one machine unless they are set already; records keep the values in force. Our
collectives are ordered by one stream, so NCCL need not order captured and eager ones, which costs some microseconds per
collective. Between machines hosts take part in collectives, and steps with chunks have both kinds in flight at once.
"""
COLLECTIVE_TIMEOUT = dt.timedelta(minutes=30)  # time-out longer than our own watchdogs, which describe a hang better

TCPStore = dist.TCPStore  # type: ignore[attr-defined]
LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.02  # time between two looks for the file in which rank 0 leaves its port

Value = TypeVar("Value")


class RankError(Exception):
    """An error on some rank in a step of all ranks; the message is its reason."""


def start_distributed(
    device: torch.device, rank: int, ranks: int, path: Path, at: tuple[str, int] | None = None
) -> None:
    """Start torch.distributed with the settings common to all our runs; ranks find each other through the store at `at`
    (jobs.Job.store).

    Without `at`, they use the file `path`.
    """
    if device.type == "cuda" and at is None:
        for name, value in NCCL_DEFAULTS.items():
            os.environ.setdefault(name, value)
    # No device_id: with it torch splits later groups off the first communicator, and NCCL then orders the launches of
    # all of them, which costs some microseconds at every collective of a captured graph.
    kind = "nccl" if device.type == "cuda" else "gloo"
    store = _open_store(rank, ranks, path, at)
    dist.init_process_group(kind, timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=ranks)


def _open_store(rank: int, ranks: int, path: Path, at: tuple[str, int] | None) -> Store:
    """Return the store served by rank 0 at one address: torch's own would listen on all, without access control.

    On one machine the system selects the port, because a port that was free a moment ago may be in use.
    """
    host, port = at or (LOOPBACK, 0)
    make = functools.partial(TCPStore, host, world_size=ranks, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
    if rank == 0:
        listening = open_listener(host, port)
        port = listening.getsockname()[1]
        store = make(port=port, is_master=True, master_listen_fd=listening.detach())
        unfinished = path.with_suffix(".new")
        unfinished.write_text(str(port))
        unfinished.rename(path)
        return store
    while at is None and not path.exists():
        time.sleep(POLL_INTERVAL_S)
    return make(port=port or int(path.read_text()), is_master=False)


def get_world_group() -> Group:
    """Return the group of all ranks; a group of one if there are no others."""
    if not dist.is_initialized():
        return Group(size=1, rank=0, handle=None)
    return Group(size=dist.get_world_size(), rank=dist.get_rank(), handle=dist.group.WORLD)


def run_together(step: Callable[[], Value]) -> Value:
    """Return the result of `step` on this rank. Raise RankError on all ranks if it raised on one of them.

    All ranks take the same branch afterwards, so that none waits in a collective for one that has given up.
    """
    value: Value | None = None
    reason = ""
    try:
        value = step()
    except Exception as e:  # noqa: BLE001 - the other ranks must learn of every error
        reason = get_first_line(e) if isinstance(e, DcpbenchError) else f"{type(e).__name__}: {get_first_line(e)}"
    first_reason = gather_first_text(reason)
    if first_reason:
        raise RankError(first_reason)
    return cast("Value", value)


def gather_first_text(text: str) -> str:
    """Return the first text of any rank that is not empty, prefixed with its rank if there are several."""
    texts = gather_objects(text)
    rank, found = next(((rank, text) for rank, text in enumerate(texts) if text), (0, ""))
    return f"rank {rank}: {found}" if found and len(texts) > 1 and not all(t == found for t in texts) else found
