"""Compute the GPU memory of a layout: weights, KV cache, and buffers for prefill. No torch.

All formulas count the tensors that engine/weights.py makes; a test compares the two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.models.weight_formats import DENSE, EXPERTS, Q_B, QKV, SHARED, UNQUANTISED, O, WeightFormat
from dcpbench.points.layout import OWN_HEADS, Layout
from dcpbench.points.names import MOE_EP, MOE_TP

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.layout import QueryReplication

GIB = 1 << 30
RESERVE_BYTES = 8 * GIB  # held back on a GPU for the CUDA context, NCCL, workspaces, graphs and activations
CACHE_FACTOR = 4  # weights must cycle through this many times the L2 cache between two uses (docs/methodology.md)
LOCATIONS = 1 << 31  # maximum number of token locations (virtual pages · tokens), which kernels read in 32 bits
PREFILL_WINDOW = 16384  # most keys, and stored keys, decompressed at once; a step's rows if more (engine/prefill.py)
FP32 = 4  # bytes of a number where partial results are added up
ATTENTION_PARTS = {"qkv": QKV, "qkv_a": QKV, "q_b": Q_B, "o": O}  # W_UK and W_UV have none (engine/weights.py)
PAGES_OF_PADDING = 1
HEADROOM_TOKENS = 1  # a decode step writes one token beyond the context


class Layers(NamedTuple):
    """Hold the number of distinct layers of each kind."""

    dense: int
    moe: int


def count_all_layers(shape: ModelShape) -> Layers:
    """Return all layers of a model."""
    return Layers(shape.first_k_dense_replace, shape.layers - shape.first_k_dense_replace)


class LinearShape(NamedTuple):
    """Describe a linear layer on one rank, or one for each of several heads."""

    inputs: int
    outputs: int
    heads: int = 1

    @property
    def elements(self) -> int:
        """Number of elements of its weights."""
        return self.inputs * self.outputs * self.heads


def _compute_block_side(size: int, ranks: int, block: int) -> int:
    """Return the numbers along a side of a block of stored weights, for a part of length `size` that is one of `ranks` parts.

    The side is shorter than published if borders between ranks cut blocks. The result applies to all ranks but the
    first, which hold at least as many scales.
    """
    whole = ranks == 1 or size % block == 0 or block % size == 0
    return block if whole else math.gcd(size, block)


def compute_stored_bytes(
    product: LinearShape, heights: tuple[int, ...], weights: WeightFormat, *, rows: int = 1, columns: int = 1
) -> int:
    """Return the bytes of a linear layer that is stored in a quantised format, or of one expert's, with its scales.

    Ranks may cut the blocks. Parts of these `heights` are stacked, as gate and up are. `rows` and `columns` are the
    numbers of ranks over which the first part's rows, or all columns, are split.
    """
    side = _compute_block_side(heights[0], rows, weights.rows)
    for height in heights[:-1]:  # a block ends with a part
        side = math.gcd(side, height)
    blocks = sum(math.ceil(height / side) for height in heights)
    across = math.ceil(product.inputs / _compute_block_side(product.inputs, columns, weights.columns or product.inputs))
    return weights.compute_bytes(product.inputs, sum(heights), blocks * across)


def make_attention_products(
    shape: ModelShape, layout: Layout, replicated: QueryReplication = OWN_HEADS
) -> dict[str, LinearShape]:
    """Return the linear layers of one layer's attention, by the names of engine/weights.py; no `q_b` without q-LoRA.

    With grouped-query attention they are q ‖ k ‖ v and o: each rank holds the KV heads of its query heads.
    """
    heads = shape.heads // layout.attn_tp
    q_heads = heads * layout.dcp if replicated.query else heads
    v_heads = heads * layout.dcp if replicated.value else heads
    q_width = q_heads * shape.qk_head_dim
    if shape.gqa:
        return {
            "qkv": LinearShape(shape.hidden, q_width + shape.compute_kv_width(layout.attn_tp)),
            "o": LinearShape(heads * shape.v_head_dim, shape.hidden),
        }
    found = {
        "qkv_a": LinearShape(shape.hidden, (q_width if shape.q_lora is None else shape.q_lora) + shape.kv_width),
        "w_uk": LinearShape(shape.qk_nope_head_dim, shape.latent, q_heads),
        "w_uv": LinearShape(shape.latent, shape.v_head_dim, v_heads),
        "o": LinearShape(heads * shape.v_head_dim, shape.hidden),
    }
    return found if shape.q_lora is None else found | {"q_b": LinearShape(shape.q_lora, q_width)}


def compute_attention_bytes(
    shape: ModelShape,
    layout: Layout,
    itemsize: int,
    replicated: QueryReplication = OWN_HEADS,
    weights: WeightFormat = UNQUANTISED,
) -> int:
    """Return the bytes of one layer's attention weights on one rank, with the vectors of `count_attention_vectors`.

    Vectors and the absorbed weights, W_UK and W_UV, have `itemsize` bytes a number in every format.
    """
    products = make_attention_products(shape, layout, replicated)
    ranks = layout.attn_tp // layout.dcp if replicated.query else layout.attn_tp
    found = count_attention_vectors(shape, layout, replicated) * itemsize
    for name, product in products.items():
        if ATTENTION_PARTS.get(name) not in weights.parts:
            found += product.elements * itemsize
            continue
        cut = {"columns": layout.attn_tp} if name == "o" else {"rows": ranks}
        if name == "qkv_a" and shape.q_lora is not None:
            cut = {}
        found += compute_stored_bytes(product, _list_heights(name, product, shape, layout), weights, **cut)
    return found


def make_indexer_products(shape: ModelShape) -> dict[str, LinearShape]:
    """Return the linear layers of an indexer, which every rank holds: its queries from q-LoRA, keys, and weights of its heads."""
    found = shape.indexer
    if found is None:
        return {}
    return {
        "wq_b": LinearShape(shape.q_lora or shape.hidden, found.heads * found.width),
        "wk": LinearShape(shape.hidden, found.width),
        "weights_proj": LinearShape(shape.hidden, found.heads),
    }


def compute_indexer_bytes(shape: ModelShape, layers: int, itemsize: int, weights: WeightFormat = UNQUANTISED) -> int:
    """Return the bytes of the indexers of `layers` distinct layers, with the norm of their keys; 0 without an indexer.

    A part of the layers has an indexer: as many of those held, rounded up. Weights of its heads are not quantised.
    """
    if shape.indexer is None:
        return 0
    each = 2 * shape.indexer.width * itemsize
    for name, product in make_indexer_products(shape).items():
        stored = QKV in weights.parts and name != "weights_proj"
        each += compute_stored_bytes(product, (product.outputs,), weights) if stored else product.elements * itemsize
    return math.ceil(layers * shape.indexer.layers / shape.layers) * each


def _list_heights(name: str, product: LinearShape, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Return the outputs of the projections that are stacked in a linear layer of attention."""
    if name == "qkv_a":
        return product.outputs - shape.kv_width, shape.kv_width
    if name == "qkv":
        kv_heads = shape.count_kv_heads(layout.attn_tp)
        k, v = kv_heads * shape.qk_head_dim, kv_heads * shape.v_head_dim
        return product.outputs - k - v, k, v
    return (product.outputs,)


def count_attention_vectors(shape: ModelShape, layout: Layout, replicated: QueryReplication) -> int:
    """Return the numbers in the vectors of one layer's attention on one rank.

    These are the norms of q, of latent rows, of heads, and before attention and MLP; biases; and the sinks of its query heads.
    """
    norms = (shape.q_lora or 0) + shape.latent + 2 * shape.hidden
    if shape.gqa is None:
        return norms
    heads = shape.heads // layout.attn_tp * (layout.dcp if replicated.query else 1)
    bias = heads * shape.qk_head_dim + shape.compute_kv_width(layout.attn_tp) if shape.gqa.qkv_bias else 0
    bias += shape.hidden if shape.gqa.o_bias else 0
    normed = heads + shape.count_kv_heads(layout.attn_tp) if shape.gqa.qk_norm_over_heads else 2
    head_norms = normed * shape.qk_head_dim if shape.gqa.qk_norm else 0
    return norms + bias + head_norms + (heads if shape.gqa.sinks else 0)


def make_mlp_products(shape: ModelShape, width: int) -> tuple[LinearShape, LinearShape]:
    """Return gate and up together, and down, of an MLP or an expert that is `width` wide on a rank."""
    return LinearShape(shape.hidden, 2 * width), LinearShape(width, shape.hidden)


def _compute_mlp_bytes(
    shape: ModelShape, inner: int, ranks: int, itemsize: int, weights: WeightFormat, part: str
) -> int:
    """Return the bytes of a rank's part of an MLP or an expert that is `inner` wide, split over `ranks` ranks."""
    width = inner // ranks
    gate_up, down = make_mlp_products(shape, width)
    if part not in weights.parts:
        return (gate_up.elements + down.elements) * itemsize
    return compute_stored_bytes(gate_up, (width, width), weights, rows=ranks) + compute_stored_bytes(
        down, (down.outputs,), weights, columns=ranks
    )


def compute_moe_bytes(
    shape: ModelShape, layout: Layout, itemsize: int, weights: WeightFormat = UNQUANTISED, *, ep: str = MOE_EP
) -> int:
    """Return the bytes of one layer's router (its bias in fp32), this rank's experts, and its slice of the shared
    expert.

    A number of undivided experts has as many elements as the same share of all experts' widths, with at most as many
    scales.
    """
    router = shape.experts * shape.hidden * itemsize + shape.experts * FP32
    held, ranks = (shape.experts, layout.tp) if ep == MOE_TP else (shape.experts // layout.tp, 1)
    experts = (
        held * _compute_mlp_bytes(shape, shape.moe_intermediate_size, ranks, itemsize, weights, EXPERTS) if held else 0
    )
    biases = held * (2 * shape.moe_intermediate_size // ranks + shape.hidden) * itemsize if shape.expert_bias else 0
    return router + experts + biases + compute_shared_expert_bytes(shape, layout, itemsize, weights)


def compute_shared_expert_bytes(
    shape: ModelShape, layout: Layout, itemsize: int, weights: WeightFormat = UNQUANTISED
) -> int:
    """Return the bytes of this rank's slice of the shared expert of one layer."""
    if not shape.shared_experts:
        return 0
    return _compute_mlp_bytes(
        shape, shape.shared_experts * shape.moe_intermediate_size, layout.tp, itemsize, weights, SHARED
    )


def compute_dense_mlp_bytes(
    shape: ModelShape, layout: Layout, itemsize: int, weights: WeightFormat = UNQUANTISED
) -> int:
    """Return the bytes of this rank's slice of one dense MLP."""
    return _compute_mlp_bytes(shape, shape.intermediate_size, layout.tp, itemsize, weights, DENSE)


def compute_vocab_rows(shape: ModelShape, layout: Layout) -> int:
    """Return the number of vocabulary rows per rank of an attention replica; the last rank's are padded."""
    return math.ceil(shape.vocab / layout.attn_tp)


def compute_outer_bytes(shape: ModelShape, layout: Layout, itemsize: int) -> int:
    """Return the bytes of the embedding, the LM head (both split over an attention replica) and the final norm.

    A tied LM head is the embedding, of which the first and the last pipeline stage have one each.
    """
    matrices = shape.has_embedding + shape.has_head
    if shape.tie_word_embeddings:
        matrices = min(matrices, 1)
    return (matrices * compute_vocab_rows(shape, layout) + shape.has_head) * shape.hidden * itemsize


def compute_weight_bytes(
    shape: ModelShape,
    layout: Layout,
    itemsize: int,
    dense: int,
    moe: int,
    replicated: QueryReplication = OWN_HEADS,
    weights: WeightFormat = UNQUANTISED,
    *,
    ep: str = MOE_EP,
) -> int:
    """Return the bytes of weights on one rank if `dense` + `moe` distinct layers are held; `itemsize` applies to what
    is not quantised.
    """
    attention = (dense + moe) * compute_attention_bytes(shape, layout, itemsize, replicated, weights)
    mlp = dense * compute_dense_mlp_bytes(shape, layout, itemsize, weights) + moe * compute_moe_bytes(
        shape, layout, itemsize, weights, ep=ep
    )
    indexers = compute_indexer_bytes(shape, dense + moe, itemsize, weights)
    drafts = compute_draft_bytes(shape, layout, itemsize, replicated, weights, ep=ep) if shape.drafts else 0
    return compute_outer_bytes(shape, layout, itemsize) + attention + mlp + indexers + drafts


def compute_draft_bytes(
    shape: ModelShape,
    layout: Layout,
    itemsize: int,
    replicated: QueryReplication = OWN_HEADS,
    weights: WeightFormat = UNQUANTISED,
    *,
    ep: str = MOE_EP,
) -> int:
    """Return the bytes of the layer that drafts tokens on one rank: a layer with experts, a projection of two hidden states
    to one, which each rank holds whole, and three norms. Embedding and LM head are the model's.
    """
    return (
        compute_attention_bytes(shape, layout, itemsize, replicated, weights)
        + compute_moe_bytes(shape, layout, itemsize, weights, ep=ep)
        + compute_indexer_bytes(shape, 1, itemsize, weights)
        + (2 * shape.hidden + 3) * shape.hidden * itemsize
    )


def count_pages(tokens: int, layout: Layout, page_size: int) -> int:
    """Return the number of virtual pages (page_size × dcp tokens each) that one request of `tokens` tokens takes."""
    return math.ceil(tokens / (page_size * layout.dcp))


def count_kv_pages(layout: Layout, concurrency: int, context: int, page_size: int) -> int:
    """Return the number of pages in each rank's pool for `concurrency` requests over the layout,
    with the padding page.
    """
    per_replica = math.ceil(concurrency / layout.dp)
    return per_replica * count_pages(context + HEADROOM_TOKENS, layout, page_size) + PAGES_OF_PADDING


def compute_page_bytes(shape: ModelShape, page_size: int, itemsize: int, layout: Layout | None = None) -> int:
    """Return the bytes of one physical page of one rank, all layers without a sliding window; without a layout, with all KV heads."""
    return page_size * shape.compute_kv_bytes_per_token(itemsize, layout.attn_tp if layout else 1)


def compute_sliding_bytes(shape: ModelShape, layout: Layout, itemsize: int) -> int:
    """Return the bytes of a request's latest tokens in the layers with a sliding window on one rank, next to the pool."""
    if shape.gqa is None or shape.gqa.window is None:
        return 0
    return shape.gqa.window_layers * shape.gqa.window * shape.compute_kv_width(layout.attn_tp) * itemsize


def compute_window_bytes(
    shape: ModelShape, layout: Layout, tokens: int, itemsize: int, kv_itemsize: int | None = None
) -> int:
    """Return the bytes of a window of `tokens` tokens of a stored prefix on one rank while a layer attends to it.

    Keys and values of its h heads take 2·h·(nope + P) numbers per token, because a backend may want values as wide as
    keys, and the rows that they are computed from Q numbers; with dcp N > 1, in the precision of the pool, Q / N are
    sent, Q received, and Q stored in token order. With grouped-query attention the rows are keys and values themselves.
    """
    heads = 0 if shape.gqa else shape.heads // layout.attn_tp
    row = shape.compute_kv_width(layout.attn_tp)
    travels = 2 * row + -(-row // layout.kv_ranks) if layout.kv_ranks > 1 else 0
    each = 2 * heads * shape.qk_head_dim + row
    return tokens * (each * itemsize + travels * (kv_itemsize or itemsize))


def compute_prefill_bytes(
    shape: ModelShape, layout: Layout, tokens: int, itemsize: int, ep: str = MOE_EP, *, kv_itemsize: int | None = None
) -> int:
    """Return the additional bytes of a step of `tokens` prompt tokens over the layout on one rank, compared with decodes.

    Each replica has its share of the tokens; with B = tokens / dp rows of the replica, and k experts a token:

        window    a window of the stored prefix, or as many of the chunks' own tokens (window_bytes)
        experts   tokens · k · (D + 3·I): their input, replaced by their output, 2·I and I between. Every
                  rank has buffers for the experts of all its tokens, because shapes must not depend on routing;
                  tensor-parallel experts are I / tp wide. Without experts: tokens · 3·intermediate_size / tp
        hidden    tokens · 4·D, gathered, from the shared expert, from both, reduced; B · 3·D, residual, normed, output
        attention B · (q_lora + 2·Q + h·(3·(nope + P) + 2·V)), and h·V in fp32 where a prefix has windows
        drafts    the last three once more for the layer that drafts tokens, which runs outside of the captured pieces, and B · 3·D
    """
    rows, heads = tokens // layout.dp, shape.heads // layout.attn_tp
    window = compute_window_bytes(shape, layout, max(PREFILL_WINDOW, rows), itemsize, kv_itemsize)
    width = shape.moe_intermediate_size if ep == MOE_EP else shape.moe_intermediate_size // layout.tp
    experts = tokens * shape.top_k * (shape.hidden + 3 * width)
    if not shape.experts:
        experts = tokens * 3 * shape.intermediate_size // layout.tp
    hidden = (4 * tokens + 3 * rows) * shape.hidden
    per_head = 3 * shape.qk_head_dim + 2 * shape.v_head_dim
    attention = rows * ((shape.q_lora or 0) + 2 * shape.compute_kv_width(layout.attn_tp) + heads * per_head)
    layer = (experts + hidden + attention) * itemsize + rows * heads * shape.v_head_dim * FP32
    return window + layer + (layer + 3 * rows * shape.hidden * itemsize if shape.drafts else 0)


def compute_min_layers(
    shape: ModelShape,
    layout: Layout,
    itemsize: int,
    l2_bytes: int,
    replicated: QueryReplication = OWN_HEADS,
    weights: WeightFormat = UNQUANTISED,
) -> Layers:
    """Return the fewest distinct layers with which weights cycle through CACHE_FACTOR × L2 between two uses.

    Only weights that every step certainly reads count (attention and shared expert, or the MLP of a model without experts),
    not the experts that routing selects.
    """
    whole = count_all_layers(shape)
    sure = compute_certain_bytes(shape, layout, itemsize, replicated, weights)
    fewest = max(math.ceil(CACHE_FACTOR * l2_bytes / sure), 1)
    if not whole.moe:
        return whole if shape.experts else Layers(min(fewest, whole.dense), 0)
    return Layers(min(1, whole.dense), min(fewest, whole.moe))


def compute_certain_bytes(
    shape: ModelShape,
    layout: Layout,
    itemsize: int,
    replicated: QueryReplication = OWN_HEADS,
    weights: WeightFormat = UNQUANTISED,
) -> int:
    """Return the bytes of weights that one layer certainly reads in every step: attention and shared expert.

    Of a model without experts: attention and MLP.
    """
    attention = compute_attention_bytes(shape, layout, itemsize, replicated, weights)
    if not shape.experts:
        return attention + compute_dense_mlp_bytes(shape, layout, itemsize, weights)
    return attention + compute_shared_expert_bytes(shape, layout, itemsize, weights)
