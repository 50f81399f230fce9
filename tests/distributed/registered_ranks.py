"""Run the ranks of test_registered.py, started as `python -m tests.distributed.registered_ranks FOLDER` with two GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dcpbench.exchange import ExchangeSpec, make_exchange, registered_memory
from dcpbench.exchange.torch_collectives import Group

WORLD, BATCHES, HEADS, WIDTH, LATENT = 2, (8, 3, 1), 32, 576, 512


def main(rank: int, folder: Path) -> None:
    """Exchange with both implementations, eagerly and twice from a graph, and save this rank's results."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    group = Group(size=WORLD, rank=rank, handle=dist.group.WORLD)
    spec = ExchangeSpec(batch=max(BATCHES), heads=HEADS, width=WIDTH, value=LATENT, dtype=torch.bfloat16, device=device)
    found = {}
    for name in ("ag_rs", "ag_rs_registered"):
        exchange = make_exchange(name, group, spec)
        for batch in BATCHES:
            generator = torch.Generator(device).manual_seed(100 * batch + rank)
            q, o, lse = exchange.get_query_buffer(batch), *exchange.get_partial_buffers(batch)
            for place in (q, o, lse):
                place.copy_(torch.randn(place.shape, generator=generator, device=device))

            def layer(exchange=exchange, q=q, o=o, lse=lse):  # type: ignore[no-untyped-def]
                return exchange.gather_q(q), exchange.merge_partials(o, lse)

            found[name, batch, "eager"] = [x.cpu() for x in layer()]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = layer()
            for _ in range(2):
                for x in results:
                    x.zero_()
                graph.replay()
            found[name, batch, "graph"] = [x.cpu() for x in results]
            del graph
    torch.save(found, folder / f"{rank}.pt")
    torch.cuda.synchronize()
    registered_memory.close_all()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(main, args=(Path(sys.argv[1]),), nprocs=WORLD)
