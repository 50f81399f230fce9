"""Find out whether the kernels can take the parts of a model that a layout gives to each rank. No torch.

Engines scale blocks of quantised weights, of 128 × 128 numbers in fp8, or groups of a row. A part that ends inside a block cannot be
multiplied, by our kernels or by those of other engines, so `sweep` and `recommend` refuse the same layouts for the same reason.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.models.weight_formats import DENSE, EXPERTS, Q_B, QKV, SHARED, O
from dcpbench.points.budget import ITEMSIZE
from dcpbench.points.layout import DEGREES, iter_smaller_layouts
from dcpbench.points.names import FP8, MOE_EP, MOE_TP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    smaller: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Changed degrees of the largest smaller layout without the limit, such as tp 4; empty if there is none."""

    def format_for_sweep(self) -> str:
        """Return the message of `sweep`, `serve` and `verify`."""
        if self.smaller:
            options = " ".join(f"--{name} {degree}" for name, degree in self.smaller.items())
            return (
                f"{self.given}: {self.reason}; use {options}, the largest layout without this limit, or {self.change}."
            )
        return f"{self.given}: {self.reason}; use {self.change}."

    def format_for_recommend(self) -> str:
        """Return the reason with the options of `recommend`, without a full stop."""
        change = self.change_query or self.change
        if self.smaller:
            return f"{self.reason}; give --gpus {self.smaller['tp']}, or {change}"
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
    parallel = msgspec.structs.replace(point, ep=MOE_EP)
    whole = point.ep == MOE_TP and point.layout.accepts(shape) and _find_split_part(parallel, shape, weights) is None
    return KernelLimit(
        given=f"--weights-dtype {weights.name} with {point.instance_name}",
        reason=f"{part} ({size} numbers) of {shape.name} on a rank ends inside a block of {block}, and kernels take whole blocks",
        change=f"--ep {MOE_EP}, or --weights-dtype bf16" if whole else "--weights-dtype bf16",
        change_query="--weights-dtype bf16",
        smaller=_find_smaller(point, shape, lambda p: _find_split_part(p, shape, weights) is None),
    )


def _find_smaller(point: Point, shape: ModelShape, has_kernels: Callable[[Point], bool]) -> dict[str, int]:
    """Return the changed degrees of the largest smaller layout that kernels can take; empty if there is none."""
    for layout in iter_smaller_layouts(shape, point.tp - 1, point.layout, point.ep):
        degrees = {name: getattr(layout, name) for name in DEGREES}
        if has_kernels(msgspec.structs.replace(point, **degrees)):
            return {name: degree for name, degree in degrees.items() if degree != getattr(point, name)}
    return {}


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


def _find_missing_fp8(point: Point, probe: Probe) -> KernelLimit | None:
    """Return the limit of a GPU that does not multiply e4m3; None if it does, or if no tensor is fp8."""
    if probe.capability is None or tuple(map(int, probe.capability.split("."))) >= FP8_SINCE:
        return None
    for option, precision in (("--weights-dtype", point.weights_precision), ("--kv-dtype", point.kv_precision)):
        if precision == FP8:
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

    def has_whole_rows(p: Point) -> bool:
        return shape.moe_intermediate_size // p.tp * bits // 8 % TENSOR_UNIT == 0

    if not weights.engine or point.ep != MOE_TP or has_whole_rows(point):
        return None
    return KernelLimit(
        given=f"--ep {MOE_TP} with --tp {point.tp}",
        reason=f"each rank has {width} numbers of {shape.name}'s experts, {shape.moe_intermediate_size} wide, and kernels take rows "
        f"that are multiples of {TENSOR_UNIT} bytes",
        change=f"--ep {MOE_EP}" if point.layout.accepts(shape) else "another --model",
        smaller=_find_smaller(point, shape, has_whole_rows),
        change_query="fewer --gpus",
    )
