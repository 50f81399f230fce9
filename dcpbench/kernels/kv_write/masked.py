"""KV write with the ownership mask inside the kernel, so that nothing has to be counted on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _write_kernel(
    kv, new, locs, kv_stride, new_stride, rank, dcp, width, INTERLEAVE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    loc = tl.load(locs + b).to(tl.int64)
    mine = (loc >= 0) & ((loc // INTERLEAVE) % dcp == rank)
    row = tl.where(mine, loc // (INTERLEAVE * dcp) * INTERLEAVE + loc % INTERLEAVE, 0)
    q = tl.arange(0, BLOCK)
    inside = q < width
    values = tl.load(new + b * new_stride + q, mask=inside & mine)
    tl.store(kv + row * kv_stride + q, values, mask=inside & mine)


def write_kv(
    kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, *, rank: int, dcp: int, interleave: int = 1
) -> None:
    """See kernels.kv_write.write_kv."""
    width = kv_KQ.shape[1]
    _write_kernel[(loc_B.shape[0],)](
        kv_KQ, new_BQ, loc_B, kv_KQ.stride(0), new_BQ.stride(0), rank, dcp, width,
        INTERLEAVE=interleave, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
