"""fp8 with scales, as DeepSeek-V3's checkpoints have it: e4m3 numbers, and an fp32 scale for each block of them.

Weights have a scale for 128 × 128 numbers, activations one for 128 numbers of a row (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from dcpbench.kernels.e4m3 import LARGEST, e4m3_byte, has_cast
from dcpbench.points.shapes import SCALE_BLOCK

GROUPS = 8
"""That a program quantises."""
LEAST = 1e-10
"""Of a block's largest number, so that a block of zeros has a scale."""


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Numbers divided by their scales."""

    data: torch.Tensor
    """e4m3 [..., N, K], contiguous."""
    scale: torch.Tensor
    """fp32, contiguous: of a weight [..., ⌈N / 128⌉, ⌈K / 128⌉], of rows [N, K / 128]."""


@triton.jit
def _rows_kernel(
    x, data, scale, count, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK_G: tl.constexpr, NATIVE: tl.constexpr
):
    """Each program takes BLOCK_G groups, wherever their rows end."""
    g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    live = g < count
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x_GK = tl.load(x + at, mask=live[:, None], other=0.0).to(tl.float32)
    scale_G = tl.maximum(tl.max(tl.abs(x_GK), 1), LEAST) / LARGEST
    tl.store(scale + g, scale_G, mask=live)
    tl.store(data + at, e4m3_byte(x_GK / scale_G[:, None], NATIVE), mask=live[:, None])


def quantise_rows(x_TK: torch.Tensor) -> Scaled:
    """Rows [T, K] in groups of 128 columns, each divided by its largest |x| / 448. K must be a multiple of 128."""
    rows, depth = x_TK.shape
    groups = depth // SCALE_BLOCK
    data = torch.empty(rows, depth, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=x_TK.device)
    count = rows * groups
    _rows_kernel[(triton.cdiv(count, GROUPS),)](
        x_TK,
        data.view(torch.uint8),
        scale,
        count,
        LEAST=LEAST,
        LARGEST=LARGEST,
        BLOCK_G=GROUPS,
        NATIVE=has_cast(x_TK.device),
        num_warps=4,
    )
    return Scaled(data, scale)


def quantise_rows_reference(x_TK: torch.Tensor) -> Scaled:
    """Slow and obvious."""
    groups = x_TK.float().unflatten(-1, (-1, SCALE_BLOCK))
    scale = groups.abs().amax(-1).clamp(min=LEAST) / LARGEST
    return Scaled((groups / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale)


def quantise_weight(weight: torch.Tensor) -> Scaled:
    """A weight [..., N, K] in blocks of 128 × 128, those at the lower and right edges maybe smaller."""
    *_, height, depth = weight.shape
    down, across = -(-height // SCALE_BLOCK), -(-depth // SCALE_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, across * SCALE_BLOCK - depth, 0, down * SCALE_BLOCK - height))
    blocks = padded.unflatten(-1, (across, SCALE_BLOCK)).unflatten(-3, (down, SCALE_BLOCK))
    scale = blocks.abs().amax((-3, -1)).clamp(min=LEAST) / LARGEST
    data = (blocks / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :height, :depth]
    return Scaled(data.to(torch.float8_e4m3fn).contiguous(), scale)


def dequantise_weight(weight: Scaled) -> torch.Tensor:
    """What it stands for, fp32 [..., N, K]."""
    *_, height, depth = weight.data.shape
    scale = weight.scale.repeat_interleave(SCALE_BLOCK, -2).repeat_interleave(SCALE_BLOCK, -1)
    return weight.data.float() * scale[..., :height, :depth]


def dequantise_rows(rows: Scaled) -> torch.Tensor:
    """What they stand for, fp32 [T, K]."""
    return rows.data.float() * rows.scale.repeat_interleave(SCALE_BLOCK, -1)
