"""Find out whether the kernels can take the parts of a model that a layout gives to each rank. No torch.

Engines scale blocks of quantised weights, of 128 × 128 numbers in fp8, or groups of a row. A part that ends inside a block cannot be
multiplied, by our kernels or by those of other engines, so `sweep` and `recommend` refuse the same layouts for the same reason.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import LayoutError
from dcpbench.models.weight_formats import DENSE, EXPERTS, Q_B, QKV, SHARED, O
from dcpbench.points.budget import ITEMSIZE
from dcpbench.points.names import FP8, MOE_EP, MOE_TP

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape
    from dcpbench.models.weight_formats import WeightFormat
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Point

FP8_SINCE = (8, 9)  # lowest compute capability of GPUs that multiply e4m3
TENSOR_UNIT = 16  # bytes of which rows are multiples that a tensor descriptor reads (kernels/moe/prefill_experts, kernels/kv_up_proj)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelLimit:
    """Describe why the kernels cannot run a point, and which options avoid it."""

    given: str  # the options or the layout that the kernels cannot take, such as `--weights-dtype fp8 with tp4`
    reason: str
    change: str  # options of `sweep` that avoid the limit, such as `--weights-dtype bf16`
    change_query: str = ""  # options of `recommend` that avoid it; empty if they are those of `sweep`
    max_tp: int | None = None  # largest smaller --tp without the limit; None if there is none, or if it is not computed

    def format_for_sweep(self) -> str:
        """Return the message of `sweep`, `serve` and `verify`."""
        if self.max_tp is not None:
            return f"{self.given}: {self.reason}; use --tp {self.max_tp}, the largest that cuts none, or {self.change}."
        return f"{self.given}: {self.reason}; use {self.change}."

    def format_for_recommend(self) -> str:
        """Return the reason with the options of `recommend`, without a full stop."""
        change = self.change_query or self.change
        if self.max_tp is not None:
            return f"{self.reason}; give --gpus {self.max_tp}, or {change}"
        return f"{self.reason}; give {change}"


def find_kernel_limit(point: Point, shape: ModelShape, probe: Probe) -> KernelLimit | None:
    """Return the first limit of the kernels that a point exceeds on a GPU; None if they can take it."""
    return _find_missing_fp8(point, probe) or _find_odd_rows(point, shape) or find_split_block(point, shape)


def find_split_block(point: Point, shape: ModelShape) -> KernelLimit | None:
    """Return the part of the stored weights that ends inside a block of scales on a rank; None if all blocks are whole."""
    weights = shape.get_weight_format(point.weights_precision)
    found = _find_split_part(point, shape, weights)
    if found is None:
        return None
    part, size, block = found
    fits = (tp for tp in range(point.tp - 1, 0, -1) if _takes_whole_blocks(point, shape, weights, tp))
    return KernelLimit(
        given=f"--weights-dtype {weights.name} with {point.instance_name}",
        reason=f"{part} ({size} numbers) of {shape.name} on a rank ends inside a block of {block}, and kernels take whole blocks",
        change="--weights-dtype bf16",
        max_tp=next(fits, None),
    )


def _find_split_part(point: Point, shape: ModelShape, weights: WeightFormat) -> tuple[str, int, int] | None:
    """Return the first part of quantised layers with a size that is no multiple of the block's side, its size and that side."""
    if weights.padded:
        return None
    for name, (size, part, is_input) in compute_part_sizes(point, shape).items():
        side = weights.columns or 1 if is_input else weights.rows
        if part in weights.parts and size % side:
            return name, size, side
    return None


def compute_part_sizes(point: Point, shape: ModelShape) -> dict[str, tuple[int, str, bool]]:
    """Return the sizes of the parts of quantised layers that a rank holds or stacks: blocks begin and end with each part.

    Each has its part of weight_formats.PARTS, and is True if it is the input of a layer, where blocks of a format may have along
    inputs alone.
    """
    heads = shape.heads // point.layout.attn_tp
    experts = shape.moe_intermediate_size // point.tp if point.ep == MOE_TP else shape.moe_intermediate_size
    found = {"'hidden_size'": (shape.hidden, QKV, True)}
    if shape.gqa:
        found["the keys"] = (shape.count_kv_heads(point.layout.attn_tp) * shape.qk_head_dim, QKV, False)
    queries = heads * shape.qk_head_dim
    return found | {
        "the queries": (queries if shape.q_lora is None else shape.q_lora, QKV, shape.q_lora is not None),
        "q_b": (queries, Q_B, False),
        "o_proj": (heads * shape.v_head_dim, O, True),
        "an expert": (experts, EXPERTS, True),
        "the shared expert": (shape.shared_experts * shape.moe_intermediate_size // point.tp, SHARED, True),
        "the dense MLP": (shape.intermediate_size // point.tp if shape.first_k_dense_replace else 0, DENSE, True),
    }


def _takes_whole_blocks(point: Point, shape: ModelShape, weights: WeightFormat, tp: int) -> bool:
    """Return True if a smaller layout of the same kind splits no block."""
    smaller = msgspec.structs.replace(point, tp=tp, dp=min(point.dp, tp), dcp=1)
    try:
        smaller.layout.check_model(shape, point.ep)
    except LayoutError:
        return False
    return _find_split_part(smaller, shape, weights) is None


def _find_missing_fp8(point: Point, probe: Probe) -> KernelLimit | None:
    """Return the limit of a GPU that does not multiply e4m3; None if it does, or if no tensor is fp8."""
    for option, precision in (("--weights-dtype", point.weights_precision), ("--kv-dtype", point.kv_precision)):
        if precision == FP8 and probe.capability is not None and _parse_version(probe.capability) < FP8_SINCE:
            return KernelLimit(
                given=f"{option} fp8",
                reason=f"a GPU with fp8 is needed (compute capability {FP8_SINCE[0]}.{FP8_SINCE[1]} or later), and "
                f"{probe.name} has {probe.capability}",
                change=f"{option} bf16",
            )
    return None


def _find_odd_rows(point: Point, shape: ModelShape) -> KernelLimit | None:
    """Return the limit of tensor-parallel experts with rows that a tensor descriptor cannot read; None without it."""
    width, weights = shape.moe_intermediate_size // point.tp, shape.get_weight_format(point.weights_precision)
    bits = weights.bits if EXPERTS in weights.parts else 8 * ITEMSIZE[point.dtype]
    if not weights.engine or point.ep != MOE_TP or width * bits // 8 % TENSOR_UNIT == 0:
        return None
    return KernelLimit(
        given=f"--ep {MOE_TP} with --tp {point.tp}",
        reason=f"each rank has {width} numbers of {shape.name}'s experts, {shape.moe_intermediate_size} wide, and kernels take rows "
        f"that are multiples of {TENSOR_UNIT} bytes",
        change=f"--ep {MOE_EP}, or a smaller --tp",
        change_query="fewer --gpus",
    )


def _parse_version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
