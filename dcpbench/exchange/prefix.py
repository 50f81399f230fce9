"""Gather the KV prefix of several requests from the ranks of a DCP group into token order, one layer at a time.

nccl     pack this rank's rows, all-gather the parts padded to the largest, put them in token order
direct   pack this rank's rows where peers can read them, barrier, read all parts in token order, barrier

The transferred data lies in a buffer: the received parts (nccl) or the own part (direct). The buffer is symmetric
memory allocated at start, or an allocation at run time. NCCL gets only the address of either. A buffer registered with
NCCL also contains the own part, because its collectives require both input and output in it.

Received bytes per rank and layer: nccl (N−1)·rows of the largest part, direct the rows of the others, each Q numbers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.exchange.registered_memory import RegisteredBuffer
from dcpbench.exchange.signals import BarrierKind, BufferBarriers
from dcpbench.exchange.symmetric_memory import allocate_peers
from dcpbench.kernels.kv_gather import gather_in_token_order, pack_rows
from dcpbench.kernels.symm_mem import BufferAllocator, Peers
from dcpbench.kernels.symm_mem.barrier import launch_fence

if TYPE_CHECKING:
    import torch

    from dcpbench.exchange.torch_collectives import Group
    from dcpbench.points.layout import Prefix

    Buffer = Peers | RegisteredBuffer | torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Description of the prefix to gather, the same for all layers."""

    prefix: Prefix
    table: torch.Tensor  # request table of the prefix, made by kernels.kv_gather.make_request_table
    rows: torch.Tensor  # int32, this rank's rows of the KV pool, request by request in token order
    width: int
    dtype: torch.dtype

    def compute_part_bytes(self) -> int:
        """Return the bytes of one rank's part, padded to the largest."""
        return self.prefix.part_rows * self.width * self.dtype.itemsize

    def compute_registered_bytes(self) -> int:
        """Return the bytes of a registered buffer: N received parts and the own one."""
        allocator = BufferAllocator()
        self.split_buffer(allocator)
        return allocator.used

    def split_buffer(self, allocator: BufferAllocator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the received parts [N, J, Q] and the own one [J, Q] in a registered buffer."""
        rows, ranks = self.prefix.part_rows, self.prefix.dcp
        parts_NJQ = allocator.allocate_tensor(ranks, rows, self.width, dtype=self.dtype)
        return parts_NJQ, allocator.allocate_tensor(rows, self.width, dtype=self.dtype)

    def compute_buffer_bytes(self, way: str) -> int:
        """Return the bytes of the transfer buffer: N received parts for `nccl`, or the part that peers read for
        `direct`.
        """
        return self.compute_part_bytes() * (self.prefix.dcp if way == "nccl" else 1)


def allocate_symmetric(group: Group, nbytes: int, device: torch.device) -> Peers:
    """Return a buffer that all ranks of the group can read. Collective; waits for the device. Raise CapacityError if
    impossible.
    """
    return allocate_peers(group, nbytes, device, "gathering directly", "NCCL and plain memory")


class Gatherer:
    """Gathers layers of tasks in one of the two ways."""

    def __init__(self, group: Group, way: str, device: torch.device) -> None:
        """Create the gatherer; collective. Raise CapacityError if ranks that gather directly cannot read each other's
        memory.
        """
        self.group, self.way = group, way
        if way == "direct":
            size = BufferAllocator()
            size.allocate_counters(group.size)
            self.counters = allocate_symmetric(group, size.used, device)
            self.fence_counters = BufferAllocator(self.counters.own).allocate_counters(group.size)
            kind = BarrierKind(
                what="fence of prefixes", phase="prefix_gather", counters=self.fence_counters, by_blocks=False
            )
            self.barriers = BufferBarriers(group, [kind])

    def gather_layer(self, task: Task, kv_KQ: torch.Tensor, out_TQ: torch.Tensor, buffer: Buffer) -> None:
        """Gather all requests' rows of a layer into the first rows of `out_TQ`, both [rows, Q] and contiguous.
        Collective.

        `buffer` has compute_buffer_bytes(way): symmetric memory, or for nccl also bytes anywhere on this rank's device; or, for
        nccl, it is a registered one of compute_registered_bytes(). It may be reused after this call.
        """
        if isinstance(buffer, RegisteredBuffer):
            assert self.way == "nccl"
            self._gather_nccl(task, kv_KQ, out_TQ, *task.split_buffer(BufferAllocator(buffer.own)))
        elif self.way == "nccl":
            own = buffer.own if isinstance(buffer, Peers) else buffer
            rows = task.prefix.part_rows
            parts_NJQ = own[: task.compute_buffer_bytes("nccl")].view(task.dtype).view(-1, rows, task.width)
            self._gather_nccl(task, kv_KQ, out_TQ, parts_NJQ, kv_KQ.new_empty(rows, task.width))
        else:
            assert isinstance(buffer, Peers)
            self._gather_direct(task, kv_KQ, out_TQ, buffer)

    def _gather_nccl(
        self, task: Task, kv_KQ: torch.Tensor, out_TQ: torch.Tensor, parts_NJQ: torch.Tensor, part_JQ: torch.Tensor
    ) -> None:
        pack_rows(part_JQ, kv_KQ, task.rows)
        parts_NJQ = self.group.all_gather(part_JQ, out=parts_NJQ)
        order = [(self.group.rank + n) % self.group.size for n in range(self.group.size)]
        addresses = [parts_NJQ[rank].data_ptr() for rank in order]
        gather_in_token_order(out_TQ, parts_NJQ[self.group.rank], addresses, self.group.rank, task.prefix, task.table)

    def _gather_direct(self, task: Task, kv_KQ: torch.Tensor, out_TQ: torch.Tensor, buffer: Peers) -> None:
        part_JQ = buffer.own[: task.compute_part_bytes()].view(task.dtype).view(-1, task.width)
        pack_rows(part_JQ, kv_KQ, task.rows)
        launch_fence(self.counters, self.fence_counters)  # all parts have arrived
        gather_in_token_order(out_TQ, part_JQ, buffer.addresses, self.group.rank, task.prefix, task.table)
        launch_fence(self.counters, self.fence_counters)  # all have been read
