"""Renumber experts so that those of the busiest rank become this rank's, for a rank that represents all ranks.

With expert parallelism, experts are assigned in contiguous runs, and every layer ends in a collective that waits for
all ranks: its time is that of the rank with the slowest experts. With few rows an expert's time is that of reading its
weights, so the busiest rank is the one with the most experts that have a row; the first of several. Tokens without an
expert (routing.NO_EXPERT) are unchanged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dcpbench.kernels.moe.routing import NO_EXPERT

CHUNK = 1024


def rotate_busiest_first_reference(ids_Tk: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """Implement rotate_busiest_first without a kernel."""
    hit_E = torch.zeros(experts, dtype=torch.int32, device=ids_Tk.device)
    hit_E[ids_Tk[ids_Tk != NO_EXPERT].long()] = 1
    first = hit_E.view(ranks, -1).sum(1).argmax() * (experts // ranks)
    return torch.where(ids_Tk == NO_EXPERT, NO_EXPERT, (ids_Tk - first) % experts).to(ids_Tk.dtype)


@triton.jit
def _busiest_kernel(
    ids_ptr,
    out_ptr,
    size,
    E: tl.constexpr,
    EACH: tl.constexpr,
    BINS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NO_EXPERT: tl.constexpr,
):
    rows = tl.zeros((BINS,), tl.int32)
    for first in range(0, size, CHUNK):
        at = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, at < size, NO_EXPERT).to(tl.int32)
        rows += tl.histogram(tl.where(ids == NO_EXPERT, BINS - 1, ids), BINS)  # the last bin is no expert's
    bins, ranks = tl.arange(0, BINS), tl.arange(0, RANKS)
    hit = ((rows > 0) & (bins < E)).to(tl.int32)
    of_rank = tl.sum(tl.where((bins // EACH)[None, :] == ranks[:, None], hit[None, :], 0), axis=1)
    shift = tl.argmax(of_rank, axis=0, tie_break_left=True) * EACH
    for first in range(0, size, CHUNK):
        at = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, at < size, 0).to(tl.int32)
        moved = tl.where(ids >= shift, ids - shift, ids - shift + E)
        tl.store(out_ptr + at, tl.where(ids == NO_EXPERT, NO_EXPERT, moved), at < size)


def rotate_busiest_first(ids_Tk: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """Return the ids of experts, [T, k] contiguous, rotated so that the run of the busiest of `ranks` ranks comes
    first.
    """
    if ids_Tk.device.type != "cuda":
        return rotate_busiest_first_reference(ids_Tk, experts, ranks)
    out_Tk = torch.empty_like(ids_Tk)
    bins = triton.next_power_of_2(experts + 1)
    _busiest_kernel[(1,)](
        ids_Tk, out_Tk, ids_Tk.numel(), experts, experts // ranks, bins, triton.next_power_of_2(ranks), CHUNK, NO_EXPERT
    )
    return out_Tk
