"""Compare the exchange in memory registered with NCCL with the plain one, on two GPUs."""

import subprocess
import sys

import pytest
import torch

from tests.distributed import registered_ranks as ranks
from tests.distributed.forked import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the results of each rank."""
    if torch.cuda.device_count() < ranks.WORLD:
        pytest.skip(f"needs {ranks.WORLD} GPUs, and here are {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("registered")
    command = [sys.executable, "-m", "tests.distributed.registered_ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks.WORLD)]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ranks.BATCHES)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_registered_exchange_equals_plain_nccl_on_two_gpus(found, batch, how):
    """Compare bitwise: the fp32 sum of two addends is rounded once in any order."""
    for rank in found:
        q_BHQ, o_hBR = rank["ag_rs_registered", batch, how]
        wanted_BHQ, wanted_hBR = rank["ag_rs", batch, how]
        assert torch.equal(q_BHQ, wanted_BHQ)
        assert torch.equal(o_hBR, wanted_hBR)
        assert o_hBR.abs().sum() > 0
