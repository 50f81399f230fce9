"""Test that an error of one rank of a bench reaches all ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench.bench.operators.rendezvous import RankError, gather_first_text, get_world_group, run_together

ROOT = Path(__file__).parents[2]
RANK = """
import os, torch
from pathlib import Path
from dcpbench.bench.operators.rendezvous import RankError, gather_first_text, get_world_group, run_together, start_distributed
rank = int(os.environ["RANK"])
start_distributed(torch.device("cpu"), rank, 2, Path(os.environ["FOLDER"]) / "port")
def step():
    if rank == 1:
        raise ValueError("no peer access\\nand more")
    return "done"
try:
    print(run_together(step))
except RankError as e:
    print(e)
print(run_together(lambda: rank))
print(gather_first_text("bad" if rank == 1 else ""), "|", gather_first_text("all bad"), "|", gather_first_text(""))
print(get_world_group().size)
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.long
def test_error_of_one_rank_is_raised_on_all_ranks(tmp_path):
    """Raise everywhere: otherwise rank 0 would wait in the next collective for a rank that has stopped."""
    environment = {"FOLDER": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(started):
        out = process.communicate()[0]
        assert out.splitlines() == [
            "rank 1: ValueError: no peer access",
            str(rank),
            "rank 1: bad | all bad | ",
            "2",
        ]


def test_single_rank_runs_without_a_group():
    assert get_world_group().size == 1
    assert run_together(lambda: 3) == 3
    assert gather_first_text("bad") == "bad"
    with pytest.raises(RankError, match="KeyError"):
        run_together(lambda: {}["x"])
