"""Synthetic KV on the GPU: each number from a counter (Philox), so that a rank draws only what it stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _fill_kernel(kv, locs, seed, layer_stride, rank, dcp, width, INTERLEAVE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    loc = tl.load(locs + token).to(tl.int64)
    if (loc // INTERLEAVE) % dcp == rank:
        row = loc // (INTERLEAVE * dcp) * INTERLEAVE + loc % INTERLEAVE
        q = tl.arange(0, BLOCK)
        values = tl.randn(seed + layer, token * width + q)
        tl.store(kv + layer * layer_stride + row * width + q, values.to(kv.dtype.element_ty), mask=q < width)


def fill_request(
    kv: torch.Tensor, locs_S: torch.Tensor, *, request: int, seed: int, rank: int, dcp: int, interleave: int
) -> None:
    """See kernels.synthetic_kv.fill_request."""
    layers, _, width = kv.shape
    _fill_kernel[(locs_S.shape[0], layers)](
        kv,
        locs_S,
        (seed * 65_536 + request) * 1024,
        kv.stride(0),
        rank,
        dcp,
        width,
        INTERLEAVE=interleave,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
