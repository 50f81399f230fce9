"""Merges the pieces of requests that were cut, and answers for requests without rows."""

from __future__ import annotations

import triton
import triton.language as tl

from dcpbench.kernels.attention.partition import slot_of


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
):
    """Programs (request, i) take every num_programs(1)-th stretch of COLUMNS of the request's heads.

    `pieces_of` [B, 2] int32 holds the first share and the number of pieces of each request that has rows; a request in
    one piece is in `o` already. Partial outputs are normalised, and their log-sum-exps have base 2.
    """
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
