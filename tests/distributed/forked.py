"""Start the ranks of a test without torchrun, as forks of a process that has imported torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forks

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def run_forked(module: str, *arguments: str, log: Path) -> None:
    """Run `python -m MODULE ARGUMENTS…` on the CPU with its output in the file `log`. Fail if its exit code is not 0."""
    env = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (code,) = forks.run_programs(forks.Program(["-m", module, *arguments], os.environ | env, str(log)))
    assert code == 0, log.read_text()


def fork_ranks(main: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Run `main(rank, *arguments)` in a fork of this process for each rank, so that torch is imported once."""
    import torch
    import torch.multiprocessing as mp

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    mp.start_processes(main, args=arguments, nprocs=ranks, start_method="fork")
