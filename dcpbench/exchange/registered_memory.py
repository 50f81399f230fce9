"""Memory registered with NCCL as a symmetric window.

If a collective's input and output both lie in it, at the same offsets on all ranks, NCCL may run its symmetric kernels,
which read and write peers' memory without intermediate copies.

A window is one allocation of NCCL's own allocator, in a torch memory pool that is registered with the group's
communicator. Multicast is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.errors import CapacityError
from dcpbench.exchange import symmetric_memory

if TYPE_CHECKING:
    from dcpbench.exchange.torch_collectives import Group

MIN_NCCL = (2, 27)  # the first with windows and symmetric kernels


@dataclasses.dataclass(eq=False)
class RegisteredBuffer:
    """A window of one group, zeroed bytes on every rank."""

    group: Group
    own: torch.Tensor
    pool: Any
    in_use: bool = False

    def close(self) -> None:
        """Deregister the memory; graphs captured with it must not be replayed any more. Collective, waits for the
        device.
        """
        if self not in _open:
            return
        _open.remove(self)
        torch.cuda.synchronize(self.own.device)
        symmetric_memory.gather_values(self.group, None)  # no peer is still at work in it
        get_backend(self.group, self.own.device).deregister_mem_pool(self.pool)


_open: list[RegisteredBuffer] = []  # held here: others would miss a window that garbage collection frees on one rank


def register_buffer(group: Group, nbytes: int, device: torch.device, option: str, instead: str) -> RegisteredBuffer:
    """Return a new registered window of `nbytes` bytes. Collective; waits for the device.

    `option` is the option that requires it and `instead` the alternative without it, for the error. Raise CapacityError
    on all ranks if NCCL is missing, is too old, or refuses.
    """
    error = f"{option}: {{}}; use {instead} instead."
    if group.handle is None:
        raise CapacityError(error.format("one rank has no peers that could use it"))
    reasons = symmetric_memory.gather_values(group, find_missing_support(group, device))
    if reason := next(filter(None, reasons), ""):
        raise CapacityError(error.format(reason))
    backend = get_backend(group, device)
    own, pool = symmetric_memory.run_on_all(
        group, functools.partial(allocate_window, backend, nbytes, device), error, "NCCL memory"
    )
    group.all_reduce(own[:1])  # a communicator is made by its first collective
    torch.cuda.synchronize(device)
    symmetric_memory.gather_values(group, None)  # registration is collective as well: all ranks have their communicator
    symmetric_memory.run_on_all(
        group, lambda: backend.register_mem_pool(pool, symm=True), error, "registering memory with NCCL"
    )
    _open.append(RegisteredBuffer(group, own, pool))
    return _open[-1]


def get_shared_buffer(
    owner: object, group: Group, nbytes: int, device: torch.device, option: str, instead: str
) -> torch.Tensor:
    """Return at least `nbytes` bytes of a window for the lifetime of `owner`; later callers reuse them. See register_buffer."""
    ours = [one for one in _open if one.group == group]
    mine = {i for i, one in enumerate(ours) if not one.in_use and one.own.nbytes >= nbytes}
    free = set.intersection(*symmetric_memory.gather_values(group, mine))  # not every rank has collected its garbage
    found = ours[min(free)] if free else register_buffer(group, nbytes, device, option, instead)
    found.in_use = True
    weakref.finalize(owner, setattr, found, "in_use", False)  # noqa: FBT003 - setattr's own order
    return found.own


def close_all() -> None:
    """Deregister all windows, which is required before their groups end. Collective."""
    while _open:
        _open[-1].close()


def find_missing_support(group: Group, device: torch.device) -> str:
    """Return what this rank lacks to register memory; empty if it can."""
    if device.type != "cuda":
        return "memory is registered with NCCL, which needs GPUs"
    if torch.cuda.nccl.version()[:2] < MIN_NCCL:
        version, oldest = (".".join(map(str, v)) for v in (torch.cuda.nccl.version(), MIN_NCCL))
        return f"this torch has NCCL {version}, and memory is registered from {oldest} on (install a newer torch)"
    backend = get_backend(group, device)
    if not hasattr(backend, "register_mem_pool") or "symm" not in (backend.register_mem_pool.__doc__ or ""):
        return f"torch {torch.__version__} cannot register memory with NCCL (install torch 2.9 or newer)"
    return ""


def get_backend(group: Group, device: torch.device) -> Any:  # noqa: ANN401 - torch has no public name for it
    """Return the communicator of a group, as wrapped by torch."""
    assert group.handle is not None
    return group.handle._get_backend(device)  # noqa: SLF001 - the only way to it


def allocate_window(backend: Any, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:  # noqa: ANN401 - as above
    """Return (zeroed bytes, their memory pool), with no other allocation in it: the offset in the window is the same on
    all ranks.
    """
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, device):
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return own, pool
