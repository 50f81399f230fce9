"""What a layout costs in GPU memory: weights, KV cache, and how many distinct layers' weights fit. No torch.

All formulas count the tensors that engine/weights.py makes; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dcpbench.errors import CapacityError
from dcpbench.points.layout import OWN_HEADS

if TYPE_CHECKING:
    from dcpbench.points.layout import GroupWide, Layout
    from dcpbench.points.shapes import ModelShape

GIB = 1 << 30
RESERVE_BYTES = 8 * GIB
"""Held back on a GPU for the CUDA context, NCCL, workspaces, graphs and activations."""
CACHE_FACTOR = 4
"""Weights must cycle through this many times the L2 cache between two uses (docs/methodology.md)."""
PREFILL_WINDOW = 16384
"""Tokens of the stored prefix that are decompressed at once; engine/prefill.py."""
FP32 = 4
"""Bytes of a number where partial results are added up."""
PAGES_OF_PADDING = 1
HEADROOM_TOKENS = 1
"""A decode step writes one token beyond the context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one GPU's memory is divided for a layout. All sizes are bytes per GPU."""

    kv_bytes: int
    """The KV pool, every layer real."""
    weight_bytes: int
    """Weights held in memory."""
    full_weight_bytes: int
    """Weights if every layer were held."""
    dense_held: int
    moe_held: int
    """Distinct dense and MoE layers held; the others reuse them in turn."""
    layers: int

    @property
    def layers_held(self) -> int:
        """Distinct layers' weights in memory."""
        return self.dense_held + self.moe_held


def attention_bytes(shape: ModelShape, layout: Layout, itemsize: int, wide: GroupWide = OWN_HEADS) -> int:
    """Attention weights of one layer on one rank, with its two layer norms."""
    heads = shape.heads // layout.attn_tp
    q_heads = heads * layout.dcp if wide.query else heads
    v_heads = heads * layout.dcp if wide.value else heads
    q_width = q_heads * (shape.nope + shape.rope)
    q = shape.hidden * q_width if shape.q_lora is None else shape.q_lora * (shape.hidden + q_width + 1)
    kv = shape.hidden * shape.kv_width + shape.latent
    absorbed = shape.latent * (q_heads * shape.nope + v_heads * shape.value)
    return (q + kv + absorbed + heads * shape.value * shape.hidden + 2 * shape.hidden) * itemsize


def moe_bytes(shape: ModelShape, layout: Layout, itemsize: int) -> int:
    """Router (its bias in fp32), this rank's experts and its slice of the shared expert, of one layer."""
    router = shape.experts * shape.hidden * itemsize + shape.experts * 4
    experts = shape.experts // layout.tp * 3 * shape.hidden * shape.moe_inter
    return router + (experts + shared_elements(shape, layout)) * itemsize


def shared_elements(shape: ModelShape, layout: Layout) -> int:
    """Elements of this rank's slice of the shared expert of one layer."""
    return 3 * shape.hidden * shape.shared_experts * shape.moe_inter // layout.tp


def dense_bytes(shape: ModelShape, layout: Layout, itemsize: int) -> int:
    """This rank's slice of one dense MLP."""
    return 3 * shape.hidden * shape.dense_inter // layout.tp * itemsize


def vocab_rows(shape: ModelShape, layout: Layout) -> int:
    """Vocabulary rows per rank of an attention replica; the last rank's are padded."""
    return math.ceil(shape.vocab / layout.attn_tp)


def outer_bytes(shape: ModelShape, layout: Layout, itemsize: int) -> int:
    """Embedding, LM head (both split over an attention replica) and the final norm."""
    return (2 * vocab_rows(shape, layout) + 1) * shape.hidden * itemsize


def weight_bytes(
    shape: ModelShape, layout: Layout, itemsize: int, dense: int, moe: int, wide: GroupWide = OWN_HEADS
) -> int:
    """Weights on one rank when `dense` + `moe` distinct layers are held."""
    attention = (dense + moe) * attention_bytes(shape, layout, itemsize, wide)
    mlp = dense * dense_bytes(shape, layout, itemsize) + moe * moe_bytes(shape, layout, itemsize)
    return outer_bytes(shape, layout, itemsize) + attention + mlp


def pages_for(tokens: int, layout: Layout, page_size: int) -> int:
    """Virtual pages (page_size × dcp tokens each) that one request of `tokens` tokens takes."""
    return math.ceil(tokens / (page_size * layout.dcp))


def kv_pages_needed(layout: Layout, concurrency: int, context: int, page_size: int) -> int:
    """Pages in each rank's pool for `concurrency` requests over the layout, with the padding page."""
    per_replica = math.ceil(concurrency / layout.dp)
    return per_replica * pages_for(context + HEADROOM_TOKENS, layout, page_size) + PAGES_OF_PADDING


def page_bytes(shape: ModelShape, page_size: int, itemsize: int) -> int:
    """One physical page of one rank, all layers."""
    return page_size * shape.kv_bytes_per_token(itemsize)


def window_bytes(shape: ModelShape, layout: Layout, tokens: int, itemsize: int) -> int:
    """What a window of `tokens` tokens of a stored prefix takes on one rank while a layer attends to it.

    Keys and values of its h heads, 2·h·(nope + P) numbers a token, as a backend may want values as wide as keys; its
    rows in token order, Q numbers; and, with dcp N > 1, Q numbers received and Q / N sent.
    """
    heads = shape.heads // layout.attn_tp
    travels = shape.kv_width + -(-shape.kv_width // layout.dcp) if layout.dcp > 1 else 0
    return tokens * (2 * heads * (shape.nope + shape.rope) + shape.kv_width + travels) * itemsize


def prefill_bytes(shape: ModelShape, layout: Layout, tokens: int, itemsize: int) -> int:
    """What a step of `tokens` prompt tokens over the layout, of which each replica has its share, takes on one rank.

    On top of what a step of decodes takes; with B = tokens / dp rows of the replica, and k experts a token:

        window    a window of the stored prefix, or as many of the chunks' own tokens (window_bytes)
        experts   tokens · k · (D + 3·I): their input, which makes way for their output, 2·I and I between. On every
                  rank as if all its tokens' experts were there, as shapes must not depend on where routers send tokens
        hidden    tokens · 4·D, gathered, from the shared expert, from both, reduced; B · 3·D, residual, normed, output
        attention B · (q_lora + 2·Q + h·(3·(nope + P) + 2·V)), and h·V in fp32 where there is a prefix
    """
    rows, heads = tokens // layout.dp, shape.heads // layout.attn_tp
    window = window_bytes(shape, layout, max(PREFILL_WINDOW, rows), itemsize)
    experts = tokens * shape.top_k * (shape.hidden + 3 * shape.moe_inter)
    hidden = (4 * tokens + 3 * rows) * shape.hidden
    per_head = 3 * (shape.nope + shape.rope) + 2 * shape.value
    attention = rows * ((shape.q_lora or 0) + 2 * shape.kv_width + heads * per_head)
    return window + (experts + hidden + attention) * itemsize + rows * heads * shape.value * FP32


def least_layers(
    shape: ModelShape, layout: Layout, itemsize: int, l2_bytes: int, wide: GroupWide = OWN_HEADS
) -> tuple[int, int]:
    """Fewest distinct (dense, MoE) layers so that weights cycle through CACHE_FACTOR × L2 between two uses.

    Counts only what every step surely reads (attention and shared expert), not the experts that routing picks.
    """
    moe_layers = shape.layers - shape.first_dense
    dense = min(1, shape.first_dense)
    if moe_layers == 0:
        return shape.first_dense, 0
    sure = sure_bytes(shape, layout, itemsize, wide)
    return dense, min(max(math.ceil(CACHE_FACTOR * l2_bytes / sure), 1), moe_layers)


def sure_bytes(shape: ModelShape, layout: Layout, itemsize: int, wide: GroupWide = OWN_HEADS) -> int:
    """Weights that one MoE layer surely reads in every step: attention and shared expert."""
    return attention_bytes(shape, layout, itemsize, wide) + shared_elements(shape, layout) * itemsize


def plan(
    shape: ModelShape,
    layout: Layout,
    *,
    itemsize: int,
    kv_pages: int,
    page_size: int,
    total_bytes: int,
    l2_bytes: int,
    wide: GroupWide = OWN_HEADS,
) -> Plan:
    """Divide `total_bytes` of one GPU between a KV pool of `kv_pages` pages and as many distinct layers as fit.

    Raises CapacityError, saying how much is missing, when the KV pool and the fewest layers do not fit together.
    """

    def held(dense: int, moe: int) -> int:
        return weight_bytes(shape, layout, itemsize, dense, moe, wide)

    kv = kv_pages * page_bytes(shape, page_size, itemsize)
    room = total_bytes - RESERVE_BYTES - kv
    dense, moe = least_layers(shape, layout, itemsize, l2_bytes, wide)
    need = held(dense, moe)
    if need > room:
        raise CapacityError(
            f"{layout}: the KV cache needs {kv / GIB:.1f} GiB per GPU and the fewest weights {need / GIB:.1f} GiB, "
            f"{(need - room) / GIB:.1f} GiB more than the {(total_bytes - RESERVE_BYTES) / GIB:.1f} GiB available"
        )
    moe_layers = shape.layers - shape.first_dense
    while dense < shape.first_dense and held(dense + 1, moe) <= room:
        dense += 1
    while moe < moe_layers and held(dense, moe + 1) <= room:
        moe += 1
    return Plan(
        kv_bytes=kv,
        weight_bytes=held(dense, moe),
        full_weight_bytes=held(shape.first_dense, moe_layers),
        dense_held=dense,
        moe_held=moe,
        layers=shape.layers,
    )


def most_kv_pages(
    shape: ModelShape,
    layout: Layout,
    *,
    itemsize: int,
    page_size: int,
    total_bytes: int,
    l2_bytes: int,
    wide: GroupWide = OWN_HEADS,
) -> int:
    """Largest KV pool, in pages, beside the fewest weights that may be held."""
    dense, moe = least_layers(shape, layout, itemsize, l2_bytes, wide)
    room = total_bytes - RESERVE_BYTES - weight_bytes(shape, layout, itemsize, dense, moe, wide)
    return max(room // page_bytes(shape, page_size, itemsize), 0)
