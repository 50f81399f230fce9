"""The experts of one rank for prompts: two grouped products of tokens sorted by expert. Shapes never depend on data."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _scatter_kernel(x, ids, place, out, first, width, TOP_K: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    key = tl.load(ids + i) - first
    mine = (key >= 0) & (key < LOCAL)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (d < width) & mine
    row = tl.load(place + i).to(tl.int64)
    tl.store(out + row * width + d, tl.load(x + i // TOP_K * width + d, mask=inside), mask=inside)


@triton.jit
def _silu_mul_kernel(x, ends, out, width, LIMITED: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    if LIMITED:
        inside &= t < tl.load(ends + LAST)
    gate = tl.load(x + t * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * width + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(
    y, weights, ids, place, shared, out, first, width, TOP_K: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    acc = tl.load(shared + t * width + d, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        key = tl.load(ids + t * TOP_K + k) - first
        mine = (key >= 0) & (key < LOCAL)
        row = tl.load(place + t * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + t * TOP_K + k)
        acc += weight * tl.load(y + row * width + d, mask=inside & mine, other=0.0).to(tl.float32)
    tl.store(out + t * width + d, acc.to(out.dtype.element_ty), mask=inside)


def sort_by_expert(ids_Tk: torch.Tensor, first: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(place, ends): row of each assignment once sorted by local expert, and each local expert's last row + 1.

    Other ranks' assignments come last. Both int32; stable, so the same on every run. No host sync.
    """
    key = ids_Tk.flatten() - first
    key = key.masked_fill_((key < 0) | (key >= local), local)  # by where, the number would be copied to the device
    ordered, source = torch.sort(key, stable=True)
    rows = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    place = torch.empty_like(rows).scatter_(0, source, rows)
    experts = torch.arange(local, dtype=ordered.dtype, device=key.device)
    return place, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def combine(
    y_ID: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    place: torch.Tensor,
    shared_TD: torch.Tensor,
    first: int,
    local: int,
) -> torch.Tensor:
    """shared + Σ_k weight · y[place] over the experts [first, first + local), added up in fp32 in the order of k."""
    out_TD = torch.empty_like(shared_TD)
    tokens, width = shared_TD.shape
    block = min(2048, triton.next_power_of_2(width))
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        y_ID,
        weights_Tk,
        ids_Tk,
        place,
        shared_TD,
        out_TD,
        first,
        width,
        TOP_K=ids_Tk.shape[1],
        LOCAL=local,
        BLOCK=block,
        num_warps=4,
    )
    return out_TD


def silu_mul(gate_up_TI: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) · up; with `ends`, only the rows that belong to a local expert."""
    tokens, both = gate_up_TI.shape
    out = torch.empty(tokens, both // 2, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    block = min(1024, triton.next_power_of_2(both // 2))
    _silu_mul_kernel[(tokens, triton.cdiv(both // 2, block))](
        gate_up_TI,
        ends,
        out,
        both // 2,
        LIMITED=ends is not None,
        LAST=0 if ends is None else ends.numel() - 1,
        BLOCK=block,
        num_warps=4,
    )
    return out


def grouped_mm(x_ID: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [ends[e−1], ends[e]) of x times weight[e].T; weight [E, out, in]. Rows past the last end are undefined."""
    return torch._grouped_mm(x_ID, weight.transpose(-2, -1), offs=ends)  # noqa: SLF001 - public only from 2.12 on


def experts(
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    first: int,
    shared_TD: torch.Tensor,
    matmul=grouped_mm,
) -> torch.Tensor:
    """See kernels.moe.experts. `matmul` lets the interpreter tests replace the GPU-only grouped product."""
    tokens, width = x_TD.shape
    local, top_k = gate_up.shape[0], ids_Tk.shape[1]
    place, ends = sort_by_expert(ids_Tk, first, local)
    sorted_ID = torch.empty(tokens * top_k, width, dtype=x_TD.dtype, device=x_TD.device)
    block = min(2048, triton.next_power_of_2(width))
    columns = triton.cdiv(width, block)
    _scatter_kernel[(tokens * top_k, columns)](
        x_TD, ids_Tk, place, sorted_ID, first, width, TOP_K=top_k, LOCAL=local, BLOCK=block, num_warps=4
    )
    both_II = matmul(sorted_ID, gate_up, ends)
    del sorted_ID  # its memory is y's: with the tokens of a prompt they are the largest tensors of a step
    hidden_II = silu_mul(both_II, ends)
    y_ID = matmul(hidden_II, down, ends)
    return combine(y_ID, weights_Tk, ids_Tk, place, shared_TD, first, local)
