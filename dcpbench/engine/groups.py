"""Process groups of a layout, made once per set of ranks and shared by all layouts that need them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch.distributed as dist

from dcpbench.exchange.emulated import EmulatedGroup
from dcpbench.exchange.torch_collectives import Group

if TYPE_CHECKING:
    from dcpbench.exchange.emulated import Emulation
    from dcpbench.points.layout import Layout

_handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {}


@dataclasses.dataclass(frozen=True)
class Groups:
    """The three process groups of a rank."""

    attn: Group  # ranks that share the heads of this replica
    dcp: Group  # ranks that share the KV cache of this replica's requests
    dp: Group  # ranks with the same heads in the other replicas


def make_groups(layout: Layout, rank: int) -> Groups:
    """Return the process groups. Collective: every rank calls it with the same layout."""
    partitions = (layout.list_attn_groups(), layout.list_dcp_groups(), layout.list_dp_groups())
    return Groups(*(_make_group(all_ranks, rank) for all_ranks in partitions))


def make_emulated_groups(layout: Layout, rank: int, emulation: Emulation) -> Groups:
    """Return the emulated groups of a rank without the others."""

    def make_group(all_ranks: list[list[int]]) -> Group:
        ranks = next(ranks for ranks in all_ranks if rank in ranks)
        if len(ranks) == 1:
            return Group(size=1, rank=0, handle=None)
        return EmulatedGroup(size=len(ranks), rank=ranks.index(rank), handle=None, emulation=emulation)

    partitions = (layout.list_attn_groups(), layout.list_dcp_groups(), layout.list_dp_groups())
    return Groups(*map(make_group, partitions))


def _make_group(all_ranks: list[list[int]], rank: int) -> Group:
    mine = Group(size=1, rank=0, handle=None)
    for ranks in all_ranks:  # every rank takes part in making every group, in the same order
        handle = _get_handle(tuple(ranks))
        if rank in ranks:
            mine = Group(size=len(ranks), rank=ranks.index(rank), handle=handle)
    return mine


def _get_handle(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if ranks not in _handles:
        world = len(ranks) == dist.get_world_size()
        _handles[ranks] = dist.group.WORLD if world else dist.new_group(list(ranks))
    return _handles[ranks]
