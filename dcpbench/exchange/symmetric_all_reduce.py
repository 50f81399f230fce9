"""All-reduce over symmetric memory, in place of NCCL's: one kernel, the same bits on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import UsageError
from dcpbench.exchange.emulated import EmulatedGroup
from dcpbench.exchange.signals import BarrierKind, BufferBarriers
from dcpbench.exchange.symmetric_memory import allocate_peers
from dcpbench.kernels.symm_mem import BufferAllocator
from dcpbench.kernels.symm_mem.all_reduce import reduce_one_shot, reduce_two_shot
from dcpbench.points.names import ALL_REDUCES

if TYPE_CHECKING:
    from dcpbench.exchange.torch_collectives import Group

AllReduce = Callable[[torch.Tensor], torch.Tensor]  # sum of ranks' contiguous x, new or in x; CUDA graphs may capture
ONE_SHOT_BYTES = 1536 * 1024  # bytes that a rank receives up to which a second barrier takes longer than more reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceSpec:
    """Sizes that an all-reduce is built for."""

    rows: int  # most rows of one call
    columns: int
    dtype: torch.dtype
    device: torch.device


def make_all_reduce(name: str, group: Group, spec: ReduceSpec) -> AllReduce:
    """Return the all-reduce called `name` over a group. Collective.

    Raise UsageError for an unknown name, CapacityError if `symm` cannot work between these ranks.
    """
    if name == "nccl":
        return group.all_reduce
    if name == "symm":
        return group.all_reduce_symm if isinstance(group, EmulatedGroup) else SymmetricAllReduce(group, spec)
    raise UsageError(f"--collectives all-reduce={name} does not exist; choose one of {', '.join(ALL_REDUCES)}.")


class _Parts:
    def __init__(self, allocator: BufferAllocator, spec: ReduceSpec, ranks: int, small: int) -> None:
        whole = spec.rows * spec.columns * spec.dtype.itemsize
        self.one_shot_counters = allocator.allocate_counters(ranks)
        self.two_shot_counters = allocator.allocate_counters(ranks)
        self.slots = allocator.allocate_tensor(2, -(-min(small, whole) // 16) * 16, dtype=torch.uint8)
        self.addends = allocator.allocate_tensor(whole + ranks * 64, dtype=torch.uint8)
        self.sums = allocator.allocate_tensor(whole // ranks + 64, dtype=torch.uint8)


class SymmetricAllReduce:
    """All-reduce over symmetric memory. Received bytes with N ranks: (N−1)·bytes if small, else 2·(N−1)/N·bytes."""

    def __init__(self, group: Group, spec: ReduceSpec, small: int | None = None) -> None:
        """Allocate the memory; collective. Raise CapacityError if the ranks cannot read each other's memory.

        `small` overrides the measured size, in bytes of one addend, up to which all addends are read.
        """
        self.spec = spec
        self.small = ONE_SHOT_BYTES // max(1, group.size - 1) if small is None else small
        size = BufferAllocator()
        _Parts(size, spec, group.size, self.small)
        self.peers = allocate_peers(
            group, size.used, spec.device, "--collectives all-reduce=symm", "--collectives all-reduce=nccl"
        )
        self.parts = _Parts(BufferAllocator(self.peers.own), spec, group.size, self.small)
        self.barriers = BufferBarriers(
            group,
            [
                BarrierKind(what="all_reduce by symm", phase="", counters=self.parts.one_shot_counters, by_blocks=True),
                BarrierKind(
                    what="all_reduce by symm in two shots",
                    phase="",
                    counters=self.parts.two_shot_counters,
                    by_blocks=True,
                ),
            ],
        )

    def supports_size(self, x: torch.Tensor) -> bool:
        """Return True if x is no larger than the allocated memory."""
        return x.numel() <= self.spec.rows * self.spec.columns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. x is at most as large as specified."""
        assert x.is_contiguous()
        assert x.dtype == self.spec.dtype
        assert self.supports_size(x)
        if x.nbytes <= self.small:
            return reduce_one_shot(self.peers, self.parts.one_shot_counters, self.parts.slots, x)
        return reduce_two_shot(self.peers, self.parts.two_shot_counters, self.parts.addends, self.parts.sums, x)
