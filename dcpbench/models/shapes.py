"""Define ModelShape: the sizes of an MLA + MoE model, its routing rule, and the names of its tensors. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.models.tensor_names import DEEPSEEK_NAMES

if TYPE_CHECKING:
    from dcpbench.models.tensor_names import TensorNames


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Hold the parameters of YaRN rope scaling (Peng et al. 2023), as `rope_scaling` in a DeepSeek config gives it."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    """True if the ramp between kept and stretched dimensions begins and ends at integer dimensions."""


LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""R, P and the widths of a head's keys and values in all published models."""
KV_WIDTH = LATENT + ROPE
"""Numbers in one of their KV rows."""
BF16, FP8 = "bf16", "fp8"
"""Precisions of published models: not quantised, or e4m3 with a scale for each block of SCALE_BLOCK × SCALE_BLOCK."""
SCALE_BLOCK = 128
"""Numbers along each side of a block of fp8 weights that has a scale, and in a group of a row that has one."""
SIGMOID, SOFTMAX = "sigmoid", "softmax"
"""Routing rules, which kernels/moe/routing.py implements: scores plus correction bias (V3, K2), or scores alone (V2)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Hold the sizes and the routing rule of one model. Letters as in docs/methodology.md (D hidden, R latent, P rope, V value)."""

    name: str
    hidden: int
    layers: int
    heads: int
    q_lora: int | None
    """Rank of the low-rank q projection, or None where q is projected directly."""
    experts: int
    top_k: int
    shared_experts: int
    moe_inter: int
    dense_inter: int
    first_dense: int
    """The first layers with a dense MLP instead of experts."""
    vocab: int
    routing: str
    """SIGMOID or SOFTMAX."""
    groups: int
    """Expert groups of group-limited routing; 1 = ungrouped."""
    top_groups: int
    normalise: bool
    """True if the weights of the chosen experts are normalised to a sum of 1 before `routed_scale`."""
    routed_scale: float
    latent: int = LATENT
    rope: int = ROPE
    nope: int = NOPE
    value: int = VALUE
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleaved: bool = True
    yarn: Yarn | None = None
    max_position: int = 163840
    tied: bool = False
    """True if the LM head is the embedding."""
    tensors: TensorNames = DEEPSEEK_NAMES
    """Names of the checkpoint's tensors."""
    published: str = BF16
    """Precision of the published checkpoint's linear layers: `bf16`, or `fp8` in blocks of 128 × 128 with scales; else a description of
    the format, whose size is unknown."""

    @property
    def is_sized(self) -> bool:
        """Return True if the bytes of the published weights are known."""
        return self.published in (BF16, FP8)

    @property
    def kv_width(self) -> int:
        """Numbers in one KV row: latent ‖ rope key."""
        return self.latent + self.rope

    def compute_kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes that one token takes in one full KV cache, all layers."""
        return self.layers * self.kv_width * itemsize
