"""Replace gloo's collectives over sockets by collectives over shared memory, for ranks of one machine.

A collective of gloo sends dozens of messages that wake twice as many threads, which takes longer than all other work of a
rank of a tiny model. The results are equal; test_exchange.py, test_kv_gather.py and test_launcher.py test gloo's own
collectives. Ranks that call different operations raise an error, where gloo would hang.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dcpbench.exchange import torch_collectives
from dcpbench.exchange.symmetric_memory import SHARED_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEAD, PART = 256, 1 << 20  # bytes of the name of a rank's operation, and of the name with the rank's data
REDUCED: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}

gather_objects = dist.all_gather_object


class SharedMemoryGroup:
    """Exchange data between the ranks of a group through shared memory.

    The memory has two halves, which calls use alternately: when a rank writes into a half, all ranks have read its old
    content. A byte in the pipe `came` counts the arrived ranks; each rank reads it and writes it back. The last rank wakes
    the others with bytes in `go0` or `go1`. Calls alternate between these two pipes, so that the next call cannot take the
    byte of a late rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.rank = group.size(), group.rank()
        own = tempfile.mkdtemp(prefix="group", dir=SHARED_FOLDER)
        names: list[str] = [own] * self.size
        gather_objects(names, own, group=group)
        folder = Path(names[0])
        if self.rank == 0:
            for name in ("came", "go0", "go1"):
                os.mkfifo(folder / name)
            with (folder / "memory").open("wb") as file:
                file.truncate(2 * self.size * PART)
        gather_objects(names, own, group=group)
        self.came, *self.go = (os.open(folder / name, os.O_RDWR) for name in ("came", "go0", "go1"))
        with (folder / "memory").open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 2 * self.size * PART)
        gather_objects(names, own, group=group)
        for path in Path(own).iterdir():
            path.unlink()
        Path(own).rmdir()
        if self.rank == 0:
            os.write(self.came, b"\0")
        self.half = 0

    def exchange(self, ranks: str, given: torch.Tensor) -> torch.Tensor:
        """Return the data of all ranks, [N, *given.shape]. It is valid until the second next call."""
        assert given.is_contiguous()
        assert given.nbytes <= PART - HEAD
        begin = self.half * self.size * PART
        head = f"{ranks} of {given.numel()} {given.dtype}".encode().ljust(HEAD)
        mine = begin + self.rank * PART
        self.memory[mine : mine + HEAD] = head
        count = max(given.numel(), 1)
        places = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.size * PART, offset=begin)
        parts = places.view(self.size, PART)[:, HEAD : HEAD + count * given.itemsize].view(given.dtype)
        parts = parts[:, : given.numel()]
        parts[self.rank].copy_(given.view(-1))
        self.wait_for_all()
        for rank in range(self.size):
            place = begin + rank * PART
            header = self.memory[place : place + HEAD]
            assert header == head, f"rank {rank} is in {header.decode()}, rank {self.rank} in {head.decode()}"
        return parts.view(self.size, *given.shape)

    def wait_for_all(self) -> None:
        """Wait until all ranks have arrived."""
        go, self.half = self.go[self.half], 1 - self.half
        (before,) = os.read(self.came, 1)
        last = before + 1 == self.size
        os.write(self.came, bytes([0 if last else before + 1]))
        if last:
            os.write(go, bytes(self.size - 1))
        else:
            os.read(go, 1)


@functools.cache
def get_shared_group(group: dist.ProcessGroup | None) -> SharedMemoryGroup:
    """Return the shared memory of a group; the first call of all ranks creates it."""
    return SharedMemoryGroup(group or dist.group.WORLD)


def all_gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Concatenate the data of all ranks into `out`."""
    found = get_shared_group(group).exchange("all_gather", x)
    assert out.is_contiguous()
    out.view(found.shape).copy_(found)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part of the sum into `out`."""
    mine = get_shared_group(group)
    found = mine.exchange("reduce_scatter", x)
    assert out.is_contiguous()
    out.view(-1).copy_(functools.reduce(torch.add, found.view(mine.size, mine.size, -1)[:, mine.rank]))


def all_to_all(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the parts for this rank into `out`."""
    mine = get_shared_group(group)
    found = mine.exchange("all_to_all", x)
    assert out.is_contiguous()
    out.view(mine.size, -1).copy_(found.view(mine.size, mine.size, -1)[:, mine.rank])


def all_reduce(x: torch.Tensor, op: object = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Replace `x` by the sum, or the maximum, over all ranks."""
    x.copy_(functools.reduce(REDUCED[op], get_shared_group(group).exchange(f"all_reduce {op}", x)))


def broadcast(x: torch.Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Copy the data of rank `src` into `x`."""
    x.copy_(get_shared_group(group).exchange(f"broadcast {src}", x)[src])


def barrier(group: dist.ProcessGroup | None = None, device_ids: Sequence[int] | None = None) -> None:
    """Wait until all ranks have arrived."""
    assert device_ids is None
    get_shared_group(group).exchange("barrier", torch.empty(0))


def replace_collectives() -> None:
    """Replace the collectives of gloo in this process."""
    torch_collectives._all_gather, torch_collectives._reduce_scatter = all_gather, reduce_scatter
    dist.all_to_all_single, dist.all_reduce = all_to_all, all_reduce
    dist.broadcast, dist.barrier = broadcast, barrier
