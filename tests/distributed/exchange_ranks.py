"""Run the ranks of test_exchange.py, and draw the data that the test and its ranks share.

Started as `python -m tests.distributed.exchange_ranks FOLDER`; ranks are forks of that process, so that torch is
imported once.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dcpbench.engine.groups import make_groups
from dcpbench.exchange import ExchangeSpec, ag_rs, make_exchange
from dcpbench.points.layout import Layout
from tests.distributed.forked import fork_ranks

if TYPE_CHECKING:
    from dcpbench.exchange.torch_collectives import Group

WORLD = 4
LAYOUTS = (Layout(WORLD, dcp=4), Layout(WORLD, dcp=2))
BATCH, HEADS, LATENT, WIDTH = 4, 8, 16, 5
NAMES = ("ag_rs", "a2a", "ag_rs_registered")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHANGES: dict[str, dict[str, object]] = {
    "plain": {},
    "replicated q": {"q_replicate": True},
    "projected": {"project_first": True},
    "bf16 reduction": {"reduce_dtype": torch.bfloat16},
}
EMPTY_ON_RANK_1, ONLY_ON_RANK_1, EMPTY_EVERYWHERE = 1, 2, 3
"""Indices of three of the four requests by their property; request 0 has rows on every rank."""


def draw_partials(ranks: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [N, B, H, R] and lse [N, B, H] of a DCP group's ranks; o of an empty shard is NaN."""
    generator = torch.Generator().manual_seed(100 * ranks + group)
    o_NBHR = torch.randn(ranks, BATCH, HEADS, LATENT, generator=generator)
    lse_NBH = 3 * torch.randn(ranks, BATCH, HEADS, generator=generator)
    empty_NB = torch.zeros(ranks, BATCH, dtype=torch.bool)
    empty_NB[1, EMPTY_ON_RANK_1] = True
    empty_NB[:, ONLY_ON_RANK_1] = True
    empty_NB[1, ONLY_ON_RANK_1] = False
    empty_NB[:, EMPTY_EVERYWHERE] = True
    o_NBHR[empty_NB] = float("nan")
    lse_NBH[empty_NB] = float("-inf")
    return o_NBHR.to(dtype), lse_NBH


def make_queries(group: int) -> torch.Tensor:
    """Return q [B, H, Q] of all heads of a group."""
    return torch.arange(BATCH * HEADS * float(WIDTH)).view(BATCH, HEADS, WIDTH) + 1000 * group


def make_spec(dtype: torch.dtype, **changes: object) -> ExchangeSpec:
    """Return the specification of the exchanges in all layouts."""
    plain = ExchangeSpec(batch=BATCH, heads=HEADS, width=WIDTH, value=LATENT, dtype=dtype, device=torch.device("cpu"))
    return dataclasses.replace(plain, **changes)


def run_exchange(name: str, group: Group, number: int, spec: ExchangeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gathered q and the merged output of one rank of DCP group `number`."""
    exchange = make_exchange(name, group, spec)
    h = HEADS // group.size
    q_BhQ = exchange.get_query_buffer(BATCH)
    mine = slice(None) if spec.q_replicate else slice(group.rank * h, (group.rank + 1) * h)
    q_BhQ.copy_(make_queries(number)[:, mine])
    q_BHQ = exchange.gather_q(q_BhQ)
    o_BHR, lse_BH = exchange.get_partial_buffers(BATCH)
    o_NBHR, lse_NBH = draw_partials(group.size, number, spec.dtype)
    o_BHR.copy_(o_NBHR[group.rank])
    lse_BH.copy_(lse_NBH[group.rank])
    return q_BHQ, exchange.merge_partials(o_BHR, lse_BH)


def main(rank: int, folder: Path) -> None:
    """Merge and gather with every exchange in both layouts and all dtypes, and save this rank's results."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    ag_rs.get_shared_buffer = lambda _owner, _group, nbytes, *_: torch.full(
        (nbytes,), 0xFF, dtype=torch.uint8
    )  # NaN in fp32
    for layout in LAYOUTS:
        group = make_groups(layout, rank).dcp
        found = {
            (name, dtype, changes): run_exchange(name, group, rank // layout.dcp, make_spec(dtype, **CHANGES[changes]))
            for name in NAMES
            for dtype in DTYPES
            for changes in CHANGES
        }
        torch.save(found, folder / f"{layout}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(main, WORLD, Path(sys.argv[1]))
