"""Read memory, this GPU's or a peer's, at full speed, and write next to nothing: measures a bandwidth limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK = 16384  # numbers that are added up to one


def read_memory(x: torch.Tensor, out: torch.Tensor) -> None:
    """Return sums of blocks of BLOCK numbers of `x`: a read of all of `x` that a compiler cannot remove.

    Args:
        x: [n · BLOCK] fp32, contiguous. It may lie in memory of a peer.
        out: [n] fp32.
    """
    if out.is_cuda:
        read_fused(x, out)
    else:
        out.copy_(x.double().view(len(out), -1).sum(1))


@triton.jit
def _read_kernel(x, out, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    numbers = tl.load(x + program * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out + program, tl.sum(numbers, 0))


def read_fused(x: torch.Tensor, out: torch.Tensor) -> None:
    """Read with all loads of a program in flight: with 8 warps, 64 numbers a thread in 16 loads of 16 bytes."""
    _read_kernel[(len(out),)](x, out, BLOCK=BLOCK, num_warps=8)
