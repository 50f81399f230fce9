"""Rotary position embedding of the rope part of q and of the KV row.

The table has YaRN (Peng et al. 2023, arXiv 2309.00071) as DeepSeek configures it, or the scaling of Llama 3.1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from dcpbench.models.shapes import Llama3Rope, ModelShape, Yarn


def apply_rope(
    x_BhP: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor, out_BhP: torch.Tensor, *, interleaved: bool
) -> None:
    """Rotate `x` by its position into `out`, both possibly strided views with unit last stride; `out` may be `x`.

    `table` [positions, P] fp32 holds cos in its first P/2 columns and sin in the rest. Pair i is columns (2i, 2i+1)
    where `interleaved` (DeepSeek's storage order), else (i, i + P/2). Pairs stay where they are: q·k does not depend on
    it.
    """
    rotate = apply_rope_fused if x_BhP.is_cuda else apply_rope_reference
    rotate(x_BhP, positions_B, table, out_BhP, interleaved)


def apply_rope_reference(
    x_BhP: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor, out_BhP: torch.Tensor, interleaved: bool
) -> None:
    """Slow and obvious."""
    cos_B1p, sin_B1p = table[positions_B].unsqueeze(1).chunk(2, dim=-1)
    first, second = (x_BhP[..., 0::2], x_BhP[..., 1::2]) if interleaved else x_BhP.chunk(2, dim=-1)
    first, second = first.float(), second.float()
    rotated = (first * cos_B1p - second * sin_B1p, second * cos_B1p + first * sin_B1p)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    out_BhP.copy_(joined)


@triton.jit
def turn(x, out, cos, sin, live, HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate the pairs of HEADS vectors; `x` and `out` are where each begins, `cos` and `sin` [1, HALF]."""
    if INTERLEAVED:  # pairs are loaded and stored whole: alternate columns alone are 12 times as slow
        p = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.load(x + p, mask=live, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, [HEADS, HALF, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(out + p, tl.reshape(turned, [HEADS, 2 * HALF]).to(out.dtype.element_ty), mask=live)
    else:
        i = tl.arange(0, HALF)[None, :]
        first = tl.load(x + i, mask=live, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + i, mask=live, other=0.0).to(tl.float32)
        tl.store(out + i, (first * cos - second * sin).to(out.dtype.element_ty), mask=live)
        tl.store(out + HALF + i, (second * cos + first * sin).to(out.dtype.element_ty), mask=live)


@triton.jit
def _rope_kernel(
    x,
    positions,
    table,
    out,
    x_b,
    x_h,
    out_b,
    out_h,
    heads,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, HALF)
    position = tl.load(positions + b).to(tl.int64)
    cos = tl.load(table + position * 2 * HALF + i)[None, :]
    sin = tl.load(table + position * 2 * HALF + HALF + i)[None, :]
    live = (h < heads)[:, None]
    x += b * x_b + h[:, None] * x_h
    out += b * out_b + h[:, None] * out_h
    turn(x, out, cos, sin, live, BLOCK_H, HALF, INTERLEAVED)


def apply_rope_fused(
    x_BhP: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor, out_BhP: torch.Tensor, interleaved: bool
) -> None:
    """Apply RoPE with one kernel, all heads of a request in one program."""
    batch, heads, width = x_BhP.shape
    block = min(32, triton.next_power_of_2(heads))
    _rope_kernel[(batch, triton.cdiv(heads, block))](
        x_BhP,
        positions_B,
        table,
        out_BhP,
        x_BhP.stride(0),
        x_BhP.stride(1),
        out_BhP.stride(0),
        out_BhP.stride(1),
        heads,
        HALF=width // 2,
        INTERLEAVED=interleaved,
        BLOCK_H=block,
        num_warps=2,
    )


def compute_softmax_scale(shape: ModelShape) -> float:
    """Return (nope + rope)^-0.5, times the squared factor of mscale_all_dim if the config has YaRN."""
    scale = (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5
    if shape.yarn and shape.yarn.mscale_all_dim:
        scale *= _compute_mscale(shape.yarn.factor, shape.yarn.mscale_all_dim) ** 2
    return scale


def make_rope_table(shape: ModelShape, positions: int, device: torch.device) -> torch.Tensor:
    """Return [positions, P] fp32: cos ‖ sin of position × frequency, times YaRN's attention factor."""
    exponents = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float32, device=device) / shape.qk_rope_head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    factor = 1.0
    if shape.llama3_rope:
        frequencies = _scale_llama3_frequencies(frequencies, shape.llama3_rope)
    if shape.yarn:
        frequencies = _scale_frequencies(frequencies, shape, shape.yarn)
        factor = _compute_attention_factor(shape.yarn)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def _scale_llama3_frequencies(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and interpolate between, as Llama 3.1 does.

    A frequency is slow if its wavelength is above original_max_position / low_freq_factor, and fast below
    original_max_position / high_freq_factor.
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * kept + frequencies / rope.factor * (1 - kept)


def _compute_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _compute_attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _compute_mscale(yarn.factor, yarn.mscale) / _compute_mscale(yarn.factor, yarn.mscale_all_dim)
    return _compute_mscale(yarn.factor, 1.0)


def _scale_frequencies(frequencies: torch.Tensor, shape: ModelShape, yarn: Yarn) -> torch.Tensor:
    """Slow dimensions are interpolated by `factor`, fast ones kept, with a linear ramp between (section 3.2)."""

    def compute_dimension(rotations: float) -> float:
        span = yarn.original_max_position / (rotations * 2 * math.pi)
        return shape.qk_rope_head_dim * math.log(span) / (2 * math.log(shape.rope_theta))

    first, last = compute_dimension(yarn.beta_fast), compute_dimension(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, shape.qk_rope_head_dim - 1)
    index = torch.arange(frequencies.shape[0], dtype=torch.float32, device=frequencies.device)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
