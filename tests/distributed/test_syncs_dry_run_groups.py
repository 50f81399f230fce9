"""Test collectives of device tensors in a dry run: gloo moves the values, and waits of NCCL are reported."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dcpbench.syncs.dry_run import dry_run

WORLD = 2


def rank_main(rank: int, port: int) -> None:
    """Add, gather, exchange and wait on each rank; a failed assertion fails its process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    with dry_run() as run:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        host = dist.new_group([0, 1], backend="gloo")
        x = torch.full((4,), rank + 1.0, device="cuda")
        dist.all_reduce(x)
        parts = [torch.empty(4, device="cuda") for _ in range(WORLD)]
        dist.all_gather(parts, x)
        swapped = torch.empty(4, device="cuda")
        dist.all_to_all_single(swapped, torch.full((4,), float(rank), device="cuda"))
        dist.barrier(host)
        names = [None, None]
        dist.all_gather_object(names, f"rank {rank}", group=host)
        assert run.syncs == []
        dist.barrier()
        assert [(s.rule, s.op) for s in run.syncs] == [("SYNC006", "torch.distributed.barrier")]
        assert (x.tolist(), parts[1].tolist(), swapped.tolist()) == ([3] * 4, [3] * 4, [0, 0, 1, 1])
        assert names == ["rank 0", "rank 1"]
        before = len(run.syncs)
        dist.all_gather_object(names, rank)
        assert {s.function for s in run.syncs[before:]} == {"rank_main"}
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.long
def test_only_barriers_and_object_collectives_of_nccl_groups_wait() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(port,), nprocs=WORLD)
