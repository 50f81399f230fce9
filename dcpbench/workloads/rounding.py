"""The roundings of an engine's arithmetic, applied to tensors that are computed in fp32.

These functions are written apart from the kernels on purpose: a wrong rounding in a kernel is not repeated here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from dcpbench.engine.scaled_weights import compute_block_size
from dcpbench.kernels.e4m3 import LARGEST
from dcpbench.models.weight_formats import SCALE_BLOCK
from dcpbench.points.names import FP8, MOE_TP

if TYPE_CHECKING:
    from dcpbench.points.point import Point

MIN_SCALED = 1e-10  # minimum of a block's largest number for its scale, so that a block of zeros has a scale


def dequantize_blocks(weight_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the numbers of an e4m3 weight [N, K] with a scale for each 128 × 128 block, in fp32."""
    height, depth = weight_NK.shape
    whole = scale.float().repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return weight_NK.float() * whole[:height, :depth]


def round_weight(weight_NK: torch.Tensor) -> torch.Tensor:
    """Round a weight [N, K] to e4m3 with a scale for each 128 × 128 block; return it in fp32."""
    weight_NK = weight_NK.float()
    height, depth = weight_NK.shape
    padded = functional.pad(weight_NK, (0, -depth % SCALE_BLOCK, 0, -height % SCALE_BLOCK))
    blocks = padded.unflatten(1, (-1, SCALE_BLOCK)).unflatten(0, (-1, SCALE_BLOCK))
    rounded = _round_scaled(blocks, (1, 3)).flatten(2).flatten(0, 1)
    return rounded[:height, :depth].contiguous()


def round_rows(x_TK: torch.Tensor, group: int) -> torch.Tensor:
    """Round rows [..., K] to e4m3 with a scale for each `group` columns; return them in fp32."""
    depth = x_TK.shape[-1]
    groups = functional.pad(x_TK, (0, -depth % group)).unflatten(-1, (-1, group))
    return _round_scaled(groups, (-1,)).flatten(-2)[..., :depth]


def _round_scaled(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    scale = x.abs().amax(dims, keepdim=True).clamp(min=MIN_SCALED) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@dataclasses.dataclass(frozen=True)
class Roundings:
    """Tensors that an engine rounds, and their dtypes."""

    dtype: torch.dtype  # activations between operations, and weights that are not e4m3
    fp8_weights: bool  # linear layers of attention and of experts have e4m3 weights, and round their inputs to e4m3
    kv_scale: float | None  # scale of a KV cache in e4m3; None if its rows are stored in `dtype`
    attention_parts: int = 1  # ranks that o_proj's input columns are split over; each begins a new group
    mlp_parts: int = 1  # ranks that the input columns of down_proj are split over, in dense MLPs and shared experts
    expert_parts: int = 1  # ranks that the input columns of down_proj are split over in routed experts

    @classmethod
    def from_point(cls, point: Point, dtype: torch.dtype, kv_scale: float) -> Roundings:
        """Return the roundings of a point's engine; `kv_scale` is the scale of an fp8 KV cache."""
        return cls(
            dtype=dtype,
            fp8_weights=point.weights_precision == FP8,
            kv_scale=kv_scale if point.kv_precision == FP8 else None,
            attention_parts=point.layout.attn_tp,
            mlp_parts=point.tp,
            expert_parts=point.tp if point.ep == MOE_TP else 1,
        )

    def round_activation(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the dtype of activations."""
        return x.to(self.dtype).float()

    def round_weight_input(self, x_TK: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """Round the input of a linear layer, with columns split over `parts` ranks, if its weights are e4m3."""
        if not self.fp8_weights:
            return x_TK
        width = x_TK.shape[-1] // parts
        return torch.cat(
            [
                round_rows(part_TK, compute_block_size(rank * width, (rank + 1) * width))
                for rank, part_TK in enumerate(x_TK.split(width, dim=-1))
            ],
            dim=-1,
        )

    def round_kv_row(self, row: torch.Tensor) -> torch.Tensor:
        """Round columns of a KV row as the cache stores them."""
        if self.kv_scale is None:
            return row
        stored = (row / self.kv_scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return stored.float() * self.kv_scale
