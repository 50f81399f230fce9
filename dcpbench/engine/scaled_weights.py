"""e4m3 weights in published blocks of 128 × 128, cut by ranks and put together, without a number changing its value.

Where a rank's part begins inside a block, or a part that is put under another ends inside one, blocks become smaller: of
128, 64, 32 … rows or columns the most that leaves each number its scale. In published models that happens from tp 32 on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dcpbench.kernels.block_scaled import Scaled
from dcpbench.models.weight_formats import SCALE_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = slice(None)


def compute_block_size(start: int, stop: int) -> int:
    """Return the number of rows, or columns, of a block of the part [start, stop) of published ones."""
    inside_one = start // SCALE_BLOCK == (stop - 1) // SCALE_BLOCK
    return SCALE_BLOCK if inside_one else math.gcd(start, SCALE_BLOCK)


def slice_scaled(
    data: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL
) -> Scaled:
    """Return a part of a weight of `shape`: `data` is the part, `scale` the published scales of the whole weight."""
    block = []
    for dim, part in enumerate((rows, columns)):
        start, stop, _ = part.indices(shape[dim])
        size = compute_block_size(start, stop)
        block.append(size)
        if size == SCALE_BLOCK:
            scale = scale.narrow(dim, start // SCALE_BLOCK, -(-(stop - start) // SCALE_BLOCK))
        else:
            scale = scale.index_select(dim, torch.arange(start, stop, size, device=scale.device) // SCALE_BLOCK)
    return Scaled(data.contiguous(), scale.contiguous(), (block[0], block[1]))


def expand_to_blocks(part: slice, size: int) -> slice:
    """Return the smallest range of whole blocks that contains `part`."""
    start, stop, _ = part.indices(size)
    return slice(start // SCALE_BLOCK * SCALE_BLOCK, min(-(-stop // SCALE_BLOCK) * SCALE_BLOCK, size))


def expand_scales(weight: Scaled, block: tuple[int, int]) -> torch.Tensor:
    """Return the weight's scales for smaller blocks."""
    scale = weight.scale
    for dim, (large, small) in enumerate(zip(weight.block, block, strict=True), start=-2):
        if large == small:
            continue
        assert large % small == 0
        scale = scale.repeat_interleave(large // small, dim)
        scale = scale.narrow(dim, 0, -(-weight.data.shape[dim] // small))
    return scale


def join_rows(parts: Sequence[Scaled]) -> Scaled:
    """Return the weights stacked along the rows, [ΣN, K]."""
    rows, columns = (min(part.block[dim] for part in parts) for dim in (0, 1))
    for part in parts[:-1]:
        rows = math.gcd(rows, len(part.data))
    scales = [expand_scales(part, (rows, columns)) for part in parts]
    return Scaled(torch.cat([part.data for part in parts]), torch.cat(scales), (rows, columns))
