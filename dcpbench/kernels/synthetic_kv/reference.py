"""Synthetic KV on the CPU: draws the whole request and keeps this rank's share."""

from __future__ import annotations

import torch

from dcpbench.points import layout


def fill_request(
    kv: torch.Tensor, locs_S: torch.Tensor, *, request: int, seed: int, rank: int, dcp: int, interleave: int
) -> None:
    """See kernels.synthetic_kv.fill_request."""
    locs = locs_S.numpy()
    mine = torch.from_numpy(layout.owner(locs, dcp, interleave) == rank)
    rows = torch.from_numpy(layout.row(locs, dcp, interleave)).long()[mine]
    for index, pool in enumerate(kv):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index) * 1_000_003 + request)
        drawn = torch.empty(len(locs_S), kv.shape[-1]).normal_(generator=generator)
        pool[rows] = drawn[mine].to(kv.dtype)
