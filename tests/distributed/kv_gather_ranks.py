"""Run the ranks of test_kv_gather.py, started as `python -m tests.distributed.kv_gather_ranks WORLD FOLDER`. Ranks are
forks of that process, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators import kv_gather as bench
from dcpbench.bench.operators.kv_gather import KvGather
from dcpbench.exchange.registered_memory import RegisteredBuffer
from tests.distributed.forked import fork_ranks

POOL_BYTES = 1 << 16
SIZES = (  # requests, tokens and buffer: 7 tokens of 3 requests leave some ranks without rows of some
    (3, 7, "pool"),
    (2, 50, "pool"),
    (2, 50, "outgrown"),
    (2, 50, "plain"),
    (3, 7, "registered"),
    (2, 50, "registered-outgrown"),
)


def list_cases(world: int) -> list[Case]:
    """Return every size with both variants."""
    return [
        Case(
            variant=way,
            calls=2,
            sizes={"requests": requests, "tokens": tokens, "ranks": world, "buffer": kind, "pool_bytes": POOL_BYTES},
        )
        for requests, tokens, kind in SIZES
        for way in ("nccl", "direct")
        if way == "nccl" or not kind.startswith("registered")
    ]


def main(rank: int, world: int, folder: Path) -> None:
    """Run every case eagerly, and as a graph that holds it twice, and report the differences."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    bench.register_buffer = lambda group, nbytes, *_: RegisteredBuffer(
        group, torch.zeros(nbytes, dtype=torch.uint8), None
    )
    workload = KvGather(torch.device("cpu"), 0)
    found = {}
    for case in list_cases(world):
        calls = workload.build_calls(case)
        found[case.name()] = {
            "differences": [calls.check(run) for run in (calls.run, calls.run_captured, calls.run_captured)],
            "received_bytes": calls.work.received_bytes,
            "comm_bytes": calls.work.comm_bytes,
        }
    calls = workload.build_calls(list_cases(world)[0])
    found["a call is missing"] = calls.check(calls.calls[0])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(main, int(sys.argv[1]), int(sys.argv[1]), Path(sys.argv[2]))
