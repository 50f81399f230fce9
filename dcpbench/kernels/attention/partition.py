"""Divides a batch's rows evenly among programs, on the device, from the lengths alone: a captured graph stays right.

Behind them the pieces of requests that were cut are merged, which also answers for requests without rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

LN_2 = math.log(2)


@triton.jit
def share(lengths_B, b_B, part, parts, batch, TILE: tl.constexpr, LEAST: tl.constexpr, SLACK: tl.constexpr):
    """Return the share of program `part` of `parts`: tiles [begin, end) of all requests' tiles laid end to end.

    `lengths_B` holds 0 from `batch` on, and `b_B` holds the indices 0, 1, … of its entries. Returns first, start,
    begin, end, size: the first request with a tile in the share, the start of its tiles, the share itself, and the
    maximum number of tiles of a piece of a request, which is at least LEAST.

    Shares are equal, and requests are cut at the end of a share. If it makes the longest share at most SLACK tiles plus
    a sixteenth longer, shares are aligned with requests instead: each takes whole requests or an equal part of one,
    because a second piece in a share has its own start-up and end cost.
    """
    tiles_B = (lengths_B + (TILE - 1)) // TILE
    total = tl.sum(tiles_B, 0)
    size = tl.maximum((total + parts - 1) // parts, LEAST)
    per_request = tl.maximum(parts // batch, 1)
    requests = (batch + parts - 1) // parts
    aligned_size = tl.maximum((tl.max(tiles_B, 0) + per_request - 1) // per_request, LEAST)
    aligned = requests * aligned_size <= size + size // 16 + SLACK

    b = part // per_request * requests
    before = tl.sum(tl.where(b_B < b, tiles_B, 0), 0)
    after = tl.sum(tl.where(b_B < b + requests, tiles_B, 0), 0)
    begin = tl.where(aligned, tl.minimum(before + part % per_request * aligned_size, after), part * size)
    begin = tl.minimum(begin, total)
    end = tl.where(aligned, tl.minimum(begin + requests * aligned_size, after), tl.minimum(begin + size, total))

    passed_B = tl.cumsum(tiles_B, 0) <= begin
    first = tl.sum(passed_B.to(tl.int32), 0)
    start = tl.sum(tl.where(passed_B, tiles_B, 0), 0)
    return first, start, begin, end, tl.where(aligned, aligned_size, size)


@triton.jit
def slot_of(part, continues):
    """Return the slot of a piece of a cut request: a share has at most one piece that continues in the next, and one
    that ends.
    """
    return 2 * part + continues.to(tl.int32)


@triton.jit
def pieces(tiles, t1, size):
    """Return the number of pieces of a request, the first of which ends at tile t1; later ones have up to `size` tiles."""
    return 1 + (tiles - t1 + size - 1) // size


@triton.jit
def merge_kernel(
    part_o,
    part_lse,
    pieces_of,
    lengths,
    o,
    lse,
    heads,
    ln2,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Merge cut requests: programs (request, i) take every num_programs(1)-th range of COLUMNS of the request's heads.

    `pieces_of` [B, 2] int32 holds the first share and the number of pieces of each request that has rows; a request in
    one piece is in `o` already. Partial outputs are normalised, and their log-sum-exps have base 2. EARLY: see
    block_scaled.get_launch_options.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    first = tl.load(pieces_of + 2 * b)
    count = tl.where(tl.load(lengths + b) == 0, 0, tl.load(pieces_of + 2 * b + 1))
    if count != 1:
        ACROSS: tl.constexpr = R // COLUMNS
        for item in range(tl.program_id(1), heads * ACROSS, tl.num_programs(1)):
            h = item // ACROSS
            c = item % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([COLUMNS], tl.float32)
            for i in range(0, count, STEP):
                j = i + tl.arange(0, STEP)
                row_j = (slot_of(first + j, j + 1 < count) * heads + h).to(tl.int64)
                lse_j = tl.load(part_lse + row_j, mask=j < count, other=float("-inf"))
                values = tl.load(part_o + row_j[:, None] * R + c[None, :], mask=(j < count)[:, None], other=0.0)
                new_top = tl.maximum(top, tl.max(lse_j, 0))  # finite: each piece has rows
                weight_j = tl.exp2(lse_j - new_top)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(weight_j, 0)
                acc = acc * shrink + tl.sum(weight_j[:, None] * values, 0)
                top = new_top
            row = b.to(tl.int64) * heads + h
            safe = tl.where(total == 0.0, 1.0, total)
            tl.store(o + row * R + c, (acc / safe).to(o.dtype.element_ty))
            if item % ACROSS == 0:
                tl.store(lse + row, tl.where(total == 0.0, float("-inf"), (top + tl.log2(safe)) * ln2))


def choose_merge_shape(pieces: int) -> tuple[int, int, int]:
    """Return the columns and pieces per program of the merge, and its warps: one round trip to memory if possible.

    `pieces` is how many a request has at most, all being equally long.
    """
    if pieces > 32:
        return 64, 64, 4
    return (128, 8, 1) if pieces > 4 else (256, 4, 1)


class PartialOutputs:
    """Hold the outputs of pieces of requests: `parts` programs have two each, of `heads` heads and `width` columns."""

    def __init__(self, requests: int, parts: int, heads: int, width: int, device: torch.device) -> None:
        self.requests, self.parts, self.heads, self.width = requests, parts, heads, width
        self.o = torch.empty(2 * parts * heads, width, dtype=torch.float32, device=device)
        self.lse = torch.empty(2 * parts * heads, dtype=torch.float32, device=device)
        self.of_request = torch.zeros(requests, 2, dtype=torch.int32, device=device)  # `pieces_of` of merge_kernel

    def merge(self, lengths: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        """Merge the pieces of cut requests into `o` and `lse`; `options` are those of a launch."""
        columns, step, warps = choose_merge_shape(self.parts // self.requests)
        columns = min(columns, self.width)
        programs = max(1, min(self.heads * self.width // columns, 4096 // self.requests))
        merge_kernel[(self.requests, programs)](
            self.o,
            self.lse,
            self.of_request,
            lengths,
            o,
            lse,
            self.heads,
            LN_2,
            R=self.width,
            COLUMNS=columns,
            STEP=step,
            num_warps=warps,
            **options,
        )
