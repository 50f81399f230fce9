"""Declare the formats of stored weights: bits of a number, scales, and the linear layers that have them. No torch.

    bytes of a linear layer = inputs · outputs · bits / 8 + ⌈outputs / rows⌉ · ⌈inputs / columns⌉ · scale bits / 8

Scalars of a whole tensor, such as nvfp4's second scale, are not counted. Embedding, LM head, norms, biases, the router, and MLA's
W_UK and W_UV have the dtype of the computation in every format.
"""

from __future__ import annotations

import dataclasses
import math

QKV, Q_B, O, DENSE, SHARED, EXPERTS = PARTS = ("qkv", "q_b", "o", "dense", "shared", "experts")
"""Parts of a model in which all linear layers have one format: projections of q, k and v (of MLA q_a and kv_a), MLA's second one of q,
that of attention's output, dense MLPs, shared experts, and routed experts."""
MLPS = frozenset((DENSE, SHARED, EXPERTS))
BF16, FP8, INT4, NVFP4, MXFP4 = "bf16", "fp8", "int4", "nvfp4", "mxfp4"
COMPUTE_DTYPES = (BF16, "fp16", "fp32")  # precisions of the computation, and of weights that are not quantised
INT4_GROUPS = (32, 128)  # inputs per scale that kernels over int4 weights support
INT4_SCALE_BITS = 16  # bits of a scale of int4 weights without zero points
SCALE_BLOCK = 128  # numbers along each side of an fp8 weight block with a scale, and in a row's group with one


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """Describe how the linear layers of some parts of a model are stored; all others have the dtype of the computation."""

    name: str  # value of --weights-dtype
    bits: int = 16  # bits of a number
    scale_bits: int = 0  # bits of a block's scale, and of its zero point if it has one
    rows: int = 1  # outputs in a block that has a scale
    columns: int | None = None  # inputs in a block that has a scale; None for all inputs
    parts: frozenset[str] = frozenset()  # PARTS that are stored in this format
    mtp: bool = True  # True if the parts of layers for multi-token prediction are stored so, too
    matmul: str = "matmul"  # limit of products, by the names of points/roofline.py
    padded: bool = False  # True if engines pad parts of a rank to whole blocks

    @property
    def engine(self) -> bool:
        """Return True if the engine computes with this format, False if it is planned alone. Of int4 it has experts alone."""
        if self.name == INT4:
            return (
                self.parts == {EXPERTS}
                and self.mtp
                and self.scale_bits == INT4_SCALE_BITS
                and self.columns in INT4_GROUPS
            )
        return self.name in (BF16, FP8)

    @property
    def is_quantised(self) -> bool:
        """Return True if any part is stored in fewer bits."""
        return bool(self.parts)

    def count_blocks(self, inputs: int, outputs: int) -> int:
        """Return the number of scales of a linear layer."""
        return math.ceil(outputs / self.rows) * math.ceil(inputs / (self.columns or inputs))

    def compute_bytes(self, inputs: int, outputs: int, blocks: int | None = None) -> int:
        """Return the bytes of a linear layer that is stored in this format, with its scales or a given number of them."""
        scales = self.count_blocks(inputs, outputs) if blocks is None else blocks
        return math.ceil((inputs * outputs * self.bits + scales * self.scale_bits) / 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnknownFormat:
    """Describe a published format of unknown size."""

    name: str  # the format in words, such as `gptq, 4 bits, groups of 128`


UNQUANTISED = WeightFormat(name=BF16)  # weights in the dtype of the computation
FORMATS = {  # formats of models not published in them: fp8 in V3's blocks, int4 as W4A16, fp4 in MLPs and experts
    one.name: one
    for one in (
        WeightFormat(
            name=FP8,
            bits=8,
            scale_bits=32,
            rows=SCALE_BLOCK,
            columns=SCALE_BLOCK,
            parts=frozenset(PARTS),
            matmul="matmul_fp8",
        ),
        WeightFormat(name=INT4, bits=4, scale_bits=INT4_SCALE_BITS, columns=128, parts=frozenset(PARTS)),
        WeightFormat(name=NVFP4, bits=4, scale_bits=8, columns=16, parts=MLPS, matmul="matmul_fp4"),
        WeightFormat(name=MXFP4, bits=4, scale_bits=8, columns=32, parts=MLPS, matmul="matmul_fp4", padded=True),
    )
}
PAPER_FORMATS = tuple(name for name, one in FORMATS.items() if not one.engine)  # planned, measured only as int4 experts
