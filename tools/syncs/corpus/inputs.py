"""Make the inputs of the corpus programs before a detector starts."""

from __future__ import annotations

import dataclasses

import torch

ROWS = 64
COLUMNS = 16
RANKS = 4


@dataclasses.dataclass
class Inputs:
    """Hold the tensors of one program.

    R rows, C columns; `device` is a GPU, or a stand-in for one in a dry run.
    """

    device: torch.device
    x_RC: torch.Tensor  # float32
    ints_R: torch.Tensor  # int64, 0 … 7
    mask_R: torch.Tensor  # bool; every fourth row, as one of four DCP ranks owns them
    loc_R: torch.Tensor  # int64 rows of `pool_RC` for owned tokens, -1 for the others'
    pool_RC: torch.Tensor
    repeats_R: torch.Tensor  # int64, how often to repeat each row
    five: torch.Tensor  # int64 scalar on the device
    square_CC: torch.Tensor  # float32, well conditioned
    host_RC: torch.Tensor  # float32 in pageable host memory
    pinned_RC: torch.Tensor  # the same in pinned host memory
    mask_cpu_R: torch.Tensor
    lens_cpu_R: torch.Tensor  # int64 host-side mirror of `repeats_R`
    large_cpu: torch.Tensor  # 4 MiB of pageable host memory: more than CUDA copies into its staging buffer at once


def make_inputs(device: torch.device, *, pin: bool = True) -> Inputs:
    """Make the inputs on `device`; use `pin=False` if there is no pinned memory."""
    ints_R = torch.arange(ROWS) % 8
    mask_R = torch.arange(ROWS) % RANKS == 0
    loc_R = torch.where(mask_R, torch.arange(ROWS), torch.full((ROWS,), -1))
    x_RC = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    host_RC = x_RC.clone()
    return Inputs(
        device=device,
        x_RC=x_RC.to(device),
        ints_R=ints_R.to(device),
        mask_R=mask_R.to(device),
        loc_R=loc_R.to(device),
        pool_RC=torch.zeros(ROWS, COLUMNS, device=device),
        repeats_R=(ints_R % 3).to(device),
        five=torch.tensor(5).to(device),
        square_CC=(torch.eye(COLUMNS) * 2 + 0.01).to(device),
        host_RC=host_RC,
        pinned_RC=host_RC.pin_memory() if pin else host_RC.clone(),
        mask_cpu_R=mask_R,
        lens_cpu_R=ints_R % 3,
        large_cpu=torch.zeros(1 << 20),
    )
