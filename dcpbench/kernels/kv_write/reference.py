"""KV writes, one row at a time; where ownership is asked for, with the integer arithmetic of layout.py."""

from __future__ import annotations

import torch

from dcpbench.points import layout

E4M3_MAX = 448.0
"""Largest number of float8_e4m3fn, which has no infinity."""


def write_kv(
    kv_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    loc_B: torch.Tensor,
    *,
    rank: int,
    dcp: int,
    interleave: int = 1,
    scale: float = 1.0,
) -> None:
    """See kernels.kv_write.write_kv."""
    for b, loc in enumerate(loc_B.tolist()):
        if loc >= 0 and layout.owner(loc, dcp, interleave) == rank:
            kv_KQ[layout.row(loc, dcp, interleave)] = as_stored(new_BQ[b], kv_KQ.dtype, scale)


def write_rows(kv_KQ: torch.Tensor, new_BQ: torch.Tensor, row_B: torch.Tensor, *, scale: float = 1.0) -> None:
    """See kernels.kv_write.write_rows."""
    for b, row in enumerate(row_B.tolist()):
        if row >= 0:
            kv_KQ[row] = as_stored(new_BQ[b], kv_KQ.dtype, scale)


def as_stored(new: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """`new` as a pool of `dtype` holds it: as it is, or as float8_e4m3fn of new × (1 / scale), which ±448 bound.

    A pool of uint8 gets the bytes of the float8 numbers. The product is fp32, as in the kernel.
    """
    if dtype.itemsize > 1:
        return new
    numbers = (new.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return numbers if dtype == torch.float8_e4m3fn else numbers.view(dtype)
