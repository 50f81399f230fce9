"""Memory that all ranks of a group can read: torch's symmetric memory on GPUs, a file in shared memory on the CPU.

The CPU version exists so that kernels that read peer memory can run, and be tested, in processes without a GPU: they
run in Triton's interpreter, which uses addresses unchanged.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from dcpbench.errors import CapacityError
from dcpbench.hangs.heartbeats import record_collective
from dcpbench.kernels.symm_mem import Peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.exchange.torch_collectives import Group

SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - Linux's shared memory, not a place for temporary files

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Place:
    """Host and device of a rank."""

    host: str
    device: str  # the GPU's own id, which does not depend on CUDA_VISIBLE_DEVICES; empty on the CPU

    @classmethod
    def from_device(cls, device: torch.device) -> Place:
        """Return the host and device of this rank."""
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(socket.gethostname(), gpu)


def allocate_peers(group: Group, nbytes: int, device: torch.device, option: str, instead: str) -> Peers:
    """Allocate a zeroed buffer on every rank that all others of the group can read. Collective.

    `option` is the option that requires it and `instead` the alternative without it, for the error. Raise CapacityError
    on all ranks if they cannot read each other's memory or the allocation failed on one of them.
    """
    advice = f"use {instead} instead."
    if group.handle is None:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return Peers(rank=0, addresses=(own.data_ptr(),), own=own)
    check_places(gather_values(group, Place.from_device(device)), option, advice)
    peers = (_allocate_on_gpus if device.type == "cuda" else _allocate_on_cpu)(
        group, nbytes, device, f"{option}: {{}}; {advice}"
    )
    peers.own.zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gather_values(group, None)  # no rank may signal before all buffers are zero
    return peers


def check_places(places: list[Place], option: str, advice: str) -> None:
    """Raise CapacityError if ranks at these places cannot read each other's memory."""
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        raise CapacityError(
            f"{option} reads peers' memory inside one host, and this group spans {len(hosts)}; {advice}"
        )
    gpus = [place.device for place in places if place.device]
    if len(set(gpus)) < len(gpus):
        raise CapacityError(f"{option} needs one GPU for each of {len(gpus)} ranks, not {len(set(gpus))}; {advice}")


def run_on_all(group: Group, step: Callable[[], Value], error: str, what: str = "memory that peers can read") -> Value:
    """Return the result of `step` on this rank. Raise CapacityError on all ranks if it failed on one, so that none
    continues alone.

    `error` is the message, with {} for the reason; `what` names the refused resource.
    """
    reason = ""
    try:
        value = step()
    except (RuntimeError, OSError) as refused:
        reason = str(refused).partition("\n")[0] or type(refused).__name__
    first_reason = next(filter(None, gather_values(group, reason)), "")
    if first_reason:
        raise CapacityError(error.format(f"{what} was refused ({first_reason})"))
    return value


def gather_values(group: Group, value: object) -> list[Any]:
    """Return all ranks' values, in rank order. Collective."""
    values: list[Any] = [None] * group.size
    with record_collective("all_gather_object", None, group.handle):
        dist.all_gather_object(values, value, group=group.handle)
    return values


def _allocate_on_gpus(group: Group, nbytes: int, device: torch.device, error: str) -> Peers:
    import torch.distributed._symmetric_memory as symmetric_memory

    places = gather_values(group, Place.from_device(device).device)
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    blind = [
        peer
        for peer, uuid in enumerate(places)
        if peer != group.rank and uuid in visible and not torch.cuda.can_device_access_peer(device, visible[uuid])
    ]
    if any(gather_values(group, blind)):
        raise CapacityError(error.format("these GPUs have no peer access to each other"))
    handle = group.handle
    assert handle is not None
    own = run_on_all(group, lambda: symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device), error)
    shared = run_on_all(group, lambda: symmetric_memory.rendezvous(own, handle), error)
    pointers = list(shared.buffer_ptrs)
    shift = own.data_ptr() - pointers[group.rank]
    return Peers(
        rank=group.rank,
        addresses=tuple(pointers[(group.rank + n) % group.size] + shift for n in range(group.size)),
        own=own,
    )


def _allocate_on_cpu(group: Group, nbytes: int, device: torch.device, error: str) -> Peers:  # noqa: ARG001 - as on GPUs
    if not SHARED_FOLDER.is_dir():
        raise CapacityError(error.format(f"this machine has no {SHARED_FOLDER}, where processes share memory"))
    name = run_on_all(group, lambda: _make_file(nbytes * group.size) if group.rank == 0 else "", error)
    name = gather_values(group, name)[0]
    everyone = torch.from_file(name, shared=True, size=nbytes * group.size, dtype=torch.uint8)
    gather_values(group, None)  # all have it open
    if group.rank == 0:
        Path(name).unlink()
    order = [(group.rank + n) % group.size for n in range(group.size)]
    return Peers(
        rank=group.rank,
        addresses=tuple(everyone.data_ptr() + peer * nbytes for peer in order),
        own=everyone[group.rank * nbytes : (group.rank + 1) * nbytes],
    )


def _make_file(nbytes: int) -> str:
    descriptor, name = tempfile.mkstemp(prefix="dcpbench-", dir=SHARED_FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # with a sparse file, a full folder would kill the process on a write
    except OSError:
        Path(name).unlink()
        raise
    finally:
        os.close(descriptor)
    return name
