"""Start ranks of a test without torchrun: a module of this folder as a fork of a process with torch."""

from __future__ import annotations

import os
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]


def run_forked(module: str, *arguments: str, log: Path) -> None:
    """Run `python -m MODULE ARGUMENTS…` on the CPU, which must succeed; its output is in the file `log`."""
    env = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (code,) = forks.run_programs(forks.Program(["-m", module, *arguments], os.environ | env, str(log)))
    assert code == 0, log.read_text()
