"""Run the ranks of test_symm.py, and draw the data that the test and its ranks share.

Started as `python -m tests.distributed.symm_ranks WORLD FOLDER`, with Triton's interpreter; ranks are forks of that
process, so that torch is imported once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dcpbench.engine.groups import make_groups
from dcpbench.exchange import ExchangeSpec, make_exchange, symm
from dcpbench.exchange.symmetric_all_reduce import ReduceSpec, SymmetricAllReduce
from dcpbench.kernels.symm_mem import pull_merge as merging
from dcpbench.points.layout import Layout
from tests.distributed.forked import fork_ranks

if TYPE_CHECKING:
    from dcpbench.exchange.torch_collectives import Group

WORLDS = (2, 4, 8)
HEADS, LATENT, WIDTH = 8, 24, 40
BATCHES = (3, 1, 2, 3)
"""Batch of each layer: buffers have the size of the first, and later layers must not read its remaining data."""
REPLAYS, LAYERS = 2, (1, 2, 3)  # replays of each graph, and layers of the graphs
ADDENDS = ((2, 24), (3, 40), (1, 8), (3, 40), (3, 40), (1, 7))
"""Shapes of consecutive sums: below and above the limit, the last of an odd size."""
SMALL = 64  # largest sum of reduce_one_shot in these tests, in bytes


def list_layouts(world: int) -> tuple[Layout, ...]:
    """Return one DCP group of all ranks; for four ranks also two groups."""
    return (Layout(world, dcp=world), Layout(world, dcp=world // 2)) if world == 4 else (Layout(world, dcp=world),)


def draw_layer(ranks: int, group: int, layer: int, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [N, B, h, Q], o [N, B, H, R] and lse [N, B, H] of a layer; some ranks have no rows, and NaN outputs
    there.
    """
    generator = torch.Generator().manual_seed(1000 * ranks + 100 * group + layer)
    q_NBhQ = torch.randn(ranks, batch, HEADS // ranks, WIDTH, generator=generator)
    o_NBHR = torch.randn(ranks, batch, HEADS, LATENT, generator=generator)
    lse_NBH = 3 * torch.randn(ranks, batch, HEADS, generator=generator)
    empty_NBH = torch.rand(ranks, batch, HEADS, generator=generator) < 0.3
    empty_NBH[:, 0, 0] = True  # no rank has rows for this request and head
    o_NBHR[empty_NBH] = float("nan")
    lse_NBH[empty_NBH] = float("-inf")
    return q_NBhQ.bfloat16(), o_NBHR.bfloat16(), lse_NBH


def draw_addend(rank: int, number: int) -> torch.Tensor:
    """Return a rank's addend to a sum; fp16, because the interpreter truncates bf16 where a GPU rounds."""
    return torch.randn(ADDENDS[number], generator=torch.Generator().manual_seed(100 * rank + number)).half()


def run_layers(group: Group, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gathered q and the merged output of several layers, with alternating calls of two exchanges."""
    both = [make_exchange("symm", group, make_spec()) for _ in range(2)]
    found = []
    for layer, batch in enumerate(BATCHES):
        data = [draw_layer(group.size, number, layer + 50 * e, batch) for e in range(2)]
        qs = [exchange.get_query_buffer(batch) for exchange in both]
        for q, (q_NBhQ, _, _) in zip(qs, data, strict=True):
            q.copy_(q_NBhQ[group.rank])
        gathered = [exchange.gather_q(q).clone() for exchange, q in zip(both, qs, strict=True)]
        partials = [exchange.get_partial_buffers(batch) for exchange in both]
        for (o, lse), (_, o_NBHR, lse_NBH) in zip(partials, data, strict=True):
            o.copy_(o_NBHR[group.rank])
            lse.copy_(lse_NBH[group.rank])
        merged = [exchange.merge_partials(*partial) for exchange, partial in zip(both, partials, strict=True)]
        found.extend(zip(gathered, merged, strict=True))
    return found


def make_spec(**changes: bool) -> ExchangeSpec:
    """Return the sizes of all exchanges in these tests."""
    return ExchangeSpec(
        batch=max(BATCHES),
        heads=HEADS,
        width=WIDTH,
        value=LATENT,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        **changes,
    )


def run_replays(group: Group, number: int, count: int, kind: int) -> list[torch.Tensor]:
    """Return merged outputs of `REPLAYS` replays of a graph of `count` layers, with replicated queries. Decisions of
    capturing, the slot of each call and the position of a fence, are recorded as in a graph.
    """
    exchange = make_exchange("symm", group, make_spec(q_replicate=True))
    assert isinstance(exchange, symm.SymmetricMemory)
    fence, captured = symm.launch_fence, symm.get_capture_id
    symm.get_capture_id = lambda _device: kind
    tape = []
    for _ in range(count):
        fences: list[int] = []
        symm.launch_fence = lambda *_args, fences=fences: fences.append(1)
        tape.append((exchange.get_partial_buffers(2), bool(fences)))
    symm.launch_fence, symm.get_capture_id = fence, captured
    found = []
    for replay in range(REPLAYS):
        for layer, ((o, lse), fenced) in enumerate(tape):
            if fenced:
                fence(exchange.peers, exchange.parts.fence_counters)
            _, o_NBHR, lse_NBH = draw_layer(group.size, number, 10 * replay + layer, 2)
            o.copy_(o_NBHR[group.rank])
            lse.copy_(lse_NBH[group.rank])
            found.append(exchange.merge_partials(o, lse))
    return found


def run_eager(group: Group, number: int) -> list[torch.Tensor]:
    """Return merged outputs of calls outside any graph, with replicated queries."""
    exchange = make_exchange("symm", group, make_spec(q_replicate=True))
    found = []
    for layer in range(4):
        o, lse = exchange.get_partial_buffers(2)
        _, o_NBHR, lse_NBH = draw_layer(group.size, number, layer, 2)
        o.copy_(o_NBHR[group.rank])
        lse.copy_(lse_NBH[group.rank])
        found.append(exchange.merge_partials(o, lse))
    return found


def run_all_reduces(group: Group, rank: int) -> list[torch.Tensor]:
    """Return the results of consecutive all-reduces of changing sizes."""
    largest = ReduceSpec(rows=3, columns=40, dtype=torch.float16, device=torch.device("cpu"))
    reduce = SymmetricAllReduce(group, largest, small=SMALL)
    return [reduce(draw_addend(rank, number)) for number in range(len(ADDENDS))]


def slow_down_reads() -> None:
    """Pause this rank between the barrier and its reads of other ranks' data, so that fast ranks could overwrite the data."""
    sync_ranks = merging.sync_ranks

    def sync_and_pause(*args: object) -> None:
        sync_ranks(*args)
        time.sleep(0.02)

    merging.sync_ranks = sync_and_pause


def main(rank: int, world: int, folder: Path) -> None:
    """Exchange in all layouts, and save this rank's results."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    if rank == 0:
        slow_down_reads()
    for layout in list_layouts(world):
        group, number = make_groups(layout, rank).dcp, rank // layout.dcp
        found = {
            "layers": run_layers(group, number),
            "replays": {count: run_replays(group, number, count, 7 + count) for count in LAYERS},
            "eager": run_eager(group, number),
            "sums": run_all_reduces(group, rank),
        }
        torch.save(found, folder / f"{layout}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(main, int(sys.argv[1]), int(sys.argv[1]), Path(sys.argv[2]))
