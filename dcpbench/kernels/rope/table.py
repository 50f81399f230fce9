"""The table of cosines and sines, with YaRN (Peng et al. 2023, arXiv 2309.00071) as DeepSeek configures it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dcpbench.points.shapes import ModelShape, Yarn


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(shape: ModelShape) -> float:
    """(nope + rope)^-0.5, times mscale_all_dim's factor squared where the config has YaRN."""
    scale = (shape.nope + shape.rope) ** -0.5
    if shape.yarn and shape.yarn.mscale_all_dim:
        scale *= _mscale(shape.yarn.factor, shape.yarn.mscale_all_dim) ** 2
    return scale


def rope_table(shape: ModelShape, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, P] fp32: cos ‖ sin of position × frequency, times YaRN's attention factor."""
    exponents = torch.arange(0, shape.rope, 2, dtype=torch.float32, device=device) / shape.rope
    frequencies = 1.0 / shape.rope_theta**exponents
    factor = 1.0
    if shape.yarn:
        frequencies = _stretch(frequencies, shape, shape.yarn)
        factor = _attention_factor(shape.yarn)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _stretch(frequencies: torch.Tensor, shape: ModelShape, yarn: Yarn) -> torch.Tensor:
    """Slow dimensions are interpolated by `factor`, fast ones kept, with a linear ramp between (section 3.2)."""

    def dimension(rotations: float) -> float:
        span = yarn.original_max_position / (rotations * 2 * math.pi)
        return shape.rope * math.log(span) / (2 * math.log(shape.rope_theta))

    first, last = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, shape.rope - 1)
    index = torch.arange(frequencies.shape[0], dtype=torch.float32, device=frequencies.device)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
