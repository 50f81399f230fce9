"""Compile FlashInfer's prefill kernels while a job starts: `python -m dcpbench.workloads.prefill_build WIDTH VALUE DTYPE`.

launch/kernel_build.py starts it. Its end ends the compilers.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import torch

from dcpbench.kernels.prefill import flashinfer_jit
from dcpbench.launch import subprocess_guard

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # FlashInfer's, of those that points can have


def main(width: str, value: str, dtype: str) -> None:
    """Compile the module of these columns for the first GPU."""
    signal.signal(signal.SIGTERM, _end_group)
    subprocess_guard.set_death_signal(signal.SIGTERM)  # SIGKILL would leave the compilers behind
    flashinfer_jit.compile_module(int(width), int(value), DTYPES[dtype], torch.device("cuda", 0))


def _end_group(number: int, _: object) -> NoReturn:
    """End all processes of this group with the signal; ninja then ends its compilers and removes unfinished files."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
