"""Define ModelShape: the sizes of a model, its attention and routing rule, and the names of its tensors. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.errors import ModelError
from dcpbench.models.tensor_names import DEEPSEEK_NAMES
from dcpbench.models.weight_formats import (
    COMPUTE_DTYPES,
    FORMATS,
    SCALE_BLOCK,
    UNQUANTISED,
    UnknownFormat,
    WeightFormat,
)

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
    truncate: bool = True  # True if the ramp from kept to stretched dimensions begins and ends at integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Hold the parameters of Llama 3.1's rope scaling, as `rope_scaling` with `rope_type` `llama3` gives it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gqa:
    """Describe grouped-query attention; the widths of a head are `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim` of ModelShape."""

    kv_heads: int
    qk_norm: bool = False  # True if each head of q and k is normalised over its numbers before rope
    qk_norm_over_heads: bool = False  # True if all heads of q (and all of k) are normalised together
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None  # latest tokens that sliding-window layers attend to; None: no layer has a window
    window_layers: int = 0  # number of layers with a sliding window
    sinks: bool = False  # True if each query head has a learned logit in its softmax that stands for no token


SCALE_BYTES, ROPE_BYTES = 4, 2  # a stored scale (fp32); a number of a rope key in sparse fp8 rows (bf16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexer:
    """Describe the indexer of sparse attention as DeepSeek-V3.2 has it: the tokens of its best scores are attended to."""

    heads: int
    width: int  # numbers of a key, of which each token has one, and of a query head
    top_k: int  # maximum number of tokens to which a query attends
    layers: int  # number of layers with an indexer; others use the choice of one before them

    @property
    def key_bytes(self) -> int:
        """Bytes of a stored key: e4m3 numbers and an fp32 scale."""
        return self.width + SCALE_BYTES


LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128  # R, P, width of keys and of values; all published MLA models
KV_WIDTH = LATENT + ROPE  # numbers in one of their KV rows
SIGMOID, SOFTMAX = "sigmoid", "softmax"  # scores plus correction bias (V3, K2) or alone (V2): kernels/moe/routing.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Hold the sizes and the routing rule of one model. Letters as in docs/methodology.md (D hidden, R latent, P rope, V value).

    Attention is MLA, or grouped-query attention if `gqa` is set. A model without experts has `first_k_dense_replace` equal to `layers`.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    q_lora: int | None = None  # rank of the low-rank q projection, or None where q is projected directly
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    moe_intermediate_size: int = 0
    intermediate_size: int
    first_k_dense_replace: int  # the first layers with a dense MLP instead of experts
    vocab: int
    routing: str = SOFTMAX  # SIGMOID or SOFTMAX
    n_group: int = 1  # expert groups of group-limited routing; 1 = ungrouped
    topk_group: int = 1
    normalise: bool = True  # True if the chosen experts' weights are normalised to sum 1 before `routed_scaling_factor`
    routed_scaling_factor: float = 1.0
    expert_bias: bool = False  # True if the router and the projections of experts have biases
    gqa: Gqa | None = None  # grouped-query attention; None for MLA
    indexer: Indexer | None = None  # indexer of sparse attention over MLA's rows; None if queries attend to all tokens
    latent: int = LATENT  # width of the compressed keys and values of MLA; 0 with grouped-query attention
    qk_rope_head_dim: int = ROPE  # numbers of a query or key head that rope rotates
    qk_nope_head_dim: int = NOPE  # numbers of a query or key head that rope leaves as they are
    v_head_dim: int = VALUE  # numbers of a value head
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleaved: bool = True
    yarn: Yarn | None = None
    llama3_rope: Llama3Rope | None = None
    max_position: int = 163840
    tie_word_embeddings: bool = False  # True if the LM head is the embedding
    tensors: TensorNames = DEEPSEEK_NAMES  # names of the checkpoint's tensors
    published: WeightFormat | UnknownFormat = UNQUANTISED  # format of the published checkpoint's weights
    has_embedding: bool = True
    has_head: bool = True  # True for a whole model; other stages lack the embedding, or the final norm and LM head
    mtp_layers: int = 0  # further layers of the checkpoint, for drafts; `--mtp` runs the first of them
    drafts: bool = False  # True if the layer that drafts tokens is held and run

    def add_drafts(self, mtp: int) -> ModelShape:
        """Return the shape with the layer that drafts tokens, if steps verify drafts and the model has one."""
        return dataclasses.replace(self, drafts=mtp > 0 and self.mtp_layers > 0)

    @property
    def stored_layers(self) -> int:
        """Number of layers in the KV cache, with that of drafts."""
        return self.layers + self.drafts

    def get_weight_format(self, name: str) -> WeightFormat:
        """Return the format of --weights-dtype: the published one if the model is published in a format of this name.

        Names of dtypes stand for UNQUANTISED. Raise ModelError for a name of no format.
        """
        if isinstance(self.published, WeightFormat) and self.published.name == name:
            return self.published
        if name not in FORMATS and name not in COMPUTE_DTYPES:
            raise ModelError(
                f"weights in {name} have no known size; known are {', '.join((*COMPUTE_DTYPES, *FORMATS))}."
            )
        return FORMATS.get(name, UNQUANTISED)

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a query head as it is projected, and of a key head of grouped-query attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        """Numbers of a query head against the rows of the KV cache: as wide as a row of MLA, else as projected."""
        return self.qk_head_dim if self.gqa else self.latent + self.qk_rope_head_dim

    @property
    def output_width(self) -> int:
        """Numbers of a head's attention output: of MLA before the projection to values."""
        return self.v_head_dim if self.gqa else self.latent

    @property
    def kv_width(self) -> int:
        """Numbers in one row of a full KV cache: latent ‖ rope key, or keys and values of all KV heads."""
        return self.compute_kv_width(1)

    def count_kv_heads(self, ranks: int) -> int:
        """Return the number of KV heads that each of `ranks` tensor-parallel ranks holds: more ranks than heads hold copies."""
        assert self.gqa is not None
        return max(1, self.gqa.kv_heads // ranks)

    def compute_max_dcp(self, ranks: int) -> int:
        """Return the largest dcp of `ranks` tensor-parallel ranks, as vLLM and SGLang have it.

        MLA's rows are copied on all ranks, which can share them. Of grouped-query attention ranks / KV heads hold copies of a
        head. Sliding windows are not divided.
        """
        if self.gqa is None:
            return ranks
        return 1 if self.gqa.window_layers else max(1, ranks // self.gqa.kv_heads)

    def compute_kv_width(self, ranks: int) -> int:
        """Return the numbers in a KV row of one of `ranks` tensor-parallel ranks, all of which store the same rows of MLA."""
        return (
            self.count_kv_heads(ranks) * (self.qk_head_dim + self.v_head_dim)
            if self.gqa
            else self.latent + self.qk_rope_head_dim
        )

    def compute_kv_row_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """Return the bytes of a stored KV row of one of `ranks` tensor-parallel ranks.

        Rows in fp8 of a model with sparse attention keep the rope key in bf16 and have an fp32 scale for each 128 latent numbers
        (FlashMLA's format, `fp8_ds_mla` in vLLM).
        """
        if self.indexer and itemsize == 1:
            return self.latent + SCALE_BYTES * -(-self.latent // SCALE_BLOCK) + ROPE_BYTES * self.qk_rope_head_dim
        return self.compute_kv_width(ranks) * itemsize

    def compute_kv_bytes_per_token(self, itemsize: int, ranks: int = 1) -> int:
        """Return the bytes that one token takes in the KV cache of one of `ranks` tensor-parallel ranks.

        All layers count that attend to all tokens. Keys of an indexer are e4m3 in every precision of the cache; the layer that drafts
        tokens has one.
        """
        layers = self.stored_layers - (self.gqa.window_layers if self.gqa else 0)
        keys = (self.indexer.layers + self.drafts) * self.indexer.key_bytes if self.indexer else 0
        return layers * self.compute_kv_row_bytes(itemsize, ranks) + keys
