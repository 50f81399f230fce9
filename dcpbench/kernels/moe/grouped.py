"""The experts of one rank as two grouped matrix products over tokens sorted by expert. Shapes never depend on data."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_COUNTED = 4096
"""Assignments up to which places are counted: 512 requests, the largest graph, with 8 experts each."""


@triton.jit(do_not_specialize=["count", "first"])
def _sort_kernel(ids, place, ends, count, first, LOCAL: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Place of each assignment among those sorted by local expert; the last program counts where experts end."""
    j = tl.arange(0, ALL)
    key = tl.load(ids + j, mask=j < count, other=0) - first
    key = tl.where((key >= 0) & (key < LOCAL), key, LOCAL)
    key = tl.where(j < count, key, LOCAL + 1)
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    if program < tl.cdiv(count, BLOCK):
        mine = tl.load(ids + i, mask=i < count, other=0) - first
        mine = tl.where((mine >= 0) & (mine < LOCAL), mine, LOCAL)
        before = (key[None, :] < mine[:, None]) | ((key[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        tl.store(place + i, tl.sum(before.to(tl.int32), 1), mask=i < count)
    else:
        expert = i - tl.cdiv(count, BLOCK) * BLOCK
        until = key[None, :] <= expert[:, None]
        tl.store(ends + expert, tl.sum(until.to(tl.int32), 1), mask=expert < LOCAL)


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
):  # fmt: skip
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
    sort = count_before if ids_Tk.numel() <= MOST_COUNTED else sort_keys
    return sort(ids_Tk, first, local)


def count_before(ids_Tk: torch.Tensor, first: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See sort_by_expert. One kernel, in which each assignment is compared with all: quadratic, for decode steps."""
    count = ids_Tk.numel()
    place = torch.empty(count, dtype=torch.int32, device=ids_Tk.device)
    ends = torch.empty(local, dtype=torch.int32, device=ids_Tk.device)
    block = 16
    _sort_kernel[(triton.cdiv(count, block) + triton.cdiv(local, block),)](
        ids_Tk, place, ends, count, first,
        LOCAL=local, BLOCK=block, ALL=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    return place, ends


def sort_keys(ids_Tk: torch.Tensor, first: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See sort_by_expert. torch's stable sort, for prompts."""
    key = ids_Tk.flatten() - first
    key = key.masked_fill_((key < 0) | (key >= local), local)  # by where, the number would be copied to the device
    ordered, source = torch.sort(key, stable=True)
    rows = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    place = torch.empty_like(rows).scatter_(0, source, rows)
    experts = torch.arange(local, dtype=ordered.dtype, device=key.device)
    return place, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def silu_mul(gate_up_TI: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) · up; with `ends`, only the rows that belong to a local expert."""
    tokens, both = gate_up_TI.shape
    out = torch.empty(tokens, both // 2, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    block = min(1024, triton.next_power_of_2(both // 2))
    _silu_mul_kernel[(tokens, triton.cdiv(both // 2, block))](
        gate_up_TI, ends, out, both // 2,
        LIMITED=ends is not None, LAST=0 if ends is None else ends.numel() - 1, BLOCK=block, num_warps=4,
    )  # fmt: skip
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
    out_TD = torch.empty_like(x_TD)
    _combine_kernel[(tokens, columns)](
        y_ID, weights_Tk, ids_Tk, place, shared_TD, out_TD, first, width,
        TOP_K=top_k, LOCAL=local, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out_TD
