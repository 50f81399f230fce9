"""Collectives over a group of ranks, under the names of both torch 2.11 and 2.13; they are no-ops in a group of one."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from dcpbench.hangs import heartbeats
from dcpbench.hangs.heartbeats import record_collective
from dcpbench.kernels.head_order import to_head_order
from dcpbench.measuring.ranges import record_range

if TYPE_CHECKING:
    from pathlib import Path

# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclasses.dataclass(frozen=True)
class Group:
    """Some ranks and this one's place among them. `handle` is None for a group of one."""

    size: int
    rank: int
    handle: dist.ProcessGroup | None

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [N, *x.shape] in rank order, in `out` if given, except in a group of one; both contiguous."""
        if self.handle is None:
            return x.unsqueeze(0)
        if out is None:
            out = x.new_empty(self.size, *x.shape)
        with record_collective("all_gather", x, self.handle):
            _all_gather(out.flatten(0, 1), x, group=self.handle)
        return out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum over ranks, split along the first dimension, which N must divide; x must be contiguous.

        The result is in `out` if given, except in a group of one.
        """
        if self.handle is None:
            return x
        if out is None:
            out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with record_collective("reduce_scatter", x, self.handle):
            _reduce_scatter(out, x, group=self.handle)
        return out

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [N, …]: part n of x goes to rank n, part n of the result comes from it; x and `out` must be
        contiguous.
        """
        if self.handle is None:
            return x
        if out is None:
            out = torch.empty_like(x)
        with record_collective("all_to_all", x, self.handle):
            dist.all_to_all_single(out, x, group=self.handle)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over ranks, in place."""
        if self.handle is not None:
            with record_collective("all_reduce", x, self.handle):
                dist.all_reduce(x, group=self.handle)
        return x


def gather_heads(group: Group, q_BhQ: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return all ranks' q [B, h, Q] as contiguous [B, H, Q], heads in rank order: attention kernels require one stride
    per head.

    They are received in `out`, [N, B, h, Q], if given.
    """
    with record_range("q_gather"):
        return to_head_order(group.all_gather(q_BhQ, out))


def start_rank_heartbeats(path: Path, rank: int, ranks: int, device: torch.device) -> None:
    """Start writing this rank's heartbeats to a file: see hangs/heartbeats.py."""
    waits = device.type == "cpu"
    heartbeats.start_heartbeats(
        heartbeats.HeartbeatWriter(path, rank, ranks, waits=waits, members=_get_members, through=[__file__])
    )


def _get_members(handle: dist.ProcessGroup) -> tuple[str, list[int]]:
    return handle.group_name, dist.get_process_group_ranks(handle)


Value = TypeVar("Value")


def gather_objects(value: Value) -> list[Value]:
    """Return every rank's value, in rank order; any picklable value. Waits for the device, so never inside a step."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    with record_collective("all_gather_object", None, dist.group.WORLD):
        dist.all_gather_object(values, value)
    return values


def is_first() -> bool:
    """Return True if this is rank 0, which writes the combined results."""
    return not dist.is_initialized() or dist.get_rank() == 0


def reduce_max_error(value: float) -> float:
    """Return the largest error of all ranks; NaN, which a maximum may lose, counts as infinite."""
    return max(gather_objects(math.inf if math.isnan(value) else value))
