"""Compute floors: the minimum time of an operator, a phase and a whole step on a machine of given rates. No torch.

    floor of an operator = max(bytes / memory rate, operations / matrix rate, barriers · barrier + received / peer rate)
    floor of a phase     = sum over its operators, of all layers: each needs the result of the one before it
    floor of a step      = sum over its phases

Work counts what every kernel must do: weights, inputs and results once each, the operations of the rows that are needed,
and the fewest bytes that any algorithm sends between ranks. It excludes padding of a graph, launches, tables, and data
that passes through memory between two operators which one kernel could fuse. A rank's work is that of the busiest one.
Benchmarks of single operators count their work with the same functions.

Letters: D hidden, H heads of a DCP group of N ranks, h of one rank, R latent, P rope, Q = R + P, V value, E experts,
k of them per token, I their width, B rows of a replica, T of all replicas. Bytes are those of the dtype of the
computation unless stated otherwise. Quantised weights take the bytes of their format (models/weight_formats.py); products of fp8
weights are compared with the fp8 rate, of nvfp4 and mxfp4 with the fp4 rate if the GPU has one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.models.shapes import KV_WIDTH, LATENT
from dcpbench.models.weight_formats import DENSE, EXPERTS, FP8, QKV, SCALE_BLOCK, SHARED, UNQUANTISED, O, WeightFormat
from dcpbench.points import memory
from dcpbench.points.budget import ITEMSIZE
from dcpbench.points.expert_distribution import OWN
from dcpbench.points.layout import OWN_HEADS, compute_local_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dcpbench.models.shapes import Indexer, ModelShape
    from dcpbench.points.layout import Layout, QueryReplication
    from dcpbench.points.point import Point

LSE_BYTES = 4  # bytes of a log-sum-exp, fp32
SCALE_BYTES = 4  # bytes of a scale of fp8 values, fp32
FP4_MATMUL = "matmul_fp4"  # limit of products of fp4 weights
CANDIDATE_BYTES = 8  # bytes of a rank's logit and token id, or of an indexer's score and token number


class OperatorCost(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the minimum work of one call for any variant: computed sizes, not what a kernel was observed to do."""

    memory_bytes: int = 0  # device memory read and written, in bytes, each byte counted once
    memory_limit: str = "copy"  # limit for these bytes: `read` if hardly anything is written
    flops: int = 0
    flops_limit: str = "matmul"  # limit of the operations: `matmul_fp8` (both operands fp8), `matmul_fp4` (fp4 weights)
    fallback_flops_limit: str = (
        ""  # limit on a GPU without that one, as operands can be widened; empty if there is none
    )
    received_bytes: int = 0  # bytes that one rank receives from other ranks
    comm_bytes: int = 0  # bytes received instead by the chosen variant's own formula; 0: there is only one
    barriers: int = 0  # number of times that ranks have to wait for each other

    @property
    def is_empty(self) -> bool:
        """Return True if there is no work."""
        return not (self.memory_bytes or self.flops or self.received_bytes or self.barriers)


def get_flops_limit(work: OperatorCost, limits: Mapping[str, float]) -> str:
    """Return the name of the limit for the operations on a GPU with these limits, even if the GPU lacks that limit."""
    return (
        work.fallback_flops_limit if work.fallback_flops_limit and work.flops_limit not in limits else work.flops_limit
    )


def compute_floor_us(work: OperatorCost, limits: Mapping[str, float]) -> float | None:
    """Return the minimum time of a call in µs; None if a limit that it needs is unknown, or if it does nothing.

    max(memory_bytes / memory, flops / matmul, barriers · barrier + received_bytes / peer), with limits by name: `read`
    or `copy` and `peer` in bytes/s, `matmul` or `matmul_fp8` in operations/s, `barrier` in s.
    """
    multiplied = get_flops_limit(work, limits)
    needs = {work.memory_limit: work.memory_bytes, multiplied: work.flops}
    needs |= {"peer": work.received_bytes, "barrier": work.barriers}
    if any(amount and name not in limits for name, amount in needs.items()):
        return None
    seconds = {name: amount / limits[name] if amount else 0.0 for name, amount in needs.items()}
    waiting = work.barriers * limits["barrier"] if work.barriers else 0.0
    return max(seconds[work.memory_limit], seconds[multiplied], waiting + seconds["peer"]) * 1e6 or None


def compute_attention_work(
    heads: int,
    lengths: Sequence[int],
    itemsize: int,
    width: int = KV_WIDTH,
    latent: int = LATENT,
    kv_itemsize: int | None = None,
    row_bytes: int | None = None,
    query_length: int = 1,
) -> OperatorCost:
    """Return the work of decode attention over one rank's KV rows of requests: rows·Q + B·H·(Q + R) numbers, 2·rows·H·(Q + R)
    operations.

    `lengths` has the KV rows that each query row sees; `query_length` adjacent query rows of a request share those of the
    last one. Every KV row, q and o counts once; each row and head has Q multiplications for the score, R for the output, and as
    many additions. With grouped-query attention a query head has `width` numbers, an output `latent`, and a row those of all KV
    heads of the rank; with MLA a row is as wide as a query. Rows have `kv_itemsize` bytes per number, or `row_bytes` in all, q and
    o `itemsize`. Over rows in fp8 the operations are compared with the fp8 rate, if the GPU has one: a kernel can quantise q and scores on its way, and one that widens
    rows takes longer.
    """
    rows, stored, each = sum(lengths), sum(lengths[query_length - 1 :: query_length]), heads * (width + latent)
    return OperatorCost(
        memory_bytes=stored * (row_bytes or width * (kv_itemsize or itemsize)) + len(lengths) * each * itemsize,
        memory_limit="read",
        flops=2 * rows * each,
        flops_limit="matmul_fp8" if kv_itemsize == 1 else "matmul",
        fallback_flops_limit="matmul" if kv_itemsize == 1 else "",
    )


def compute_indexer_work(indexer: Indexer, keys: int, scored: int) -> OperatorCost:
    """Return the work of an indexer's scores: `keys` stored keys once, and 2 operations for each number and head of `scored` pairs
    of a query and a key.
    """
    return OperatorCost(
        memory_bytes=keys * indexer.key_bytes,
        memory_limit="read",
        flops=2 * scored * indexer.heads * indexer.width,
        flops_limit="matmul_fp8",
        fallback_flops_limit="matmul",
    )


def compute_product_work(product: memory.LinearShape, rows: int, itemsize: int) -> OperatorCost:
    """Return the work of a linear layer: its weights, inputs and results once, 2 operations per weight and row."""
    through = rows * product.heads * (product.inputs + product.outputs)
    return OperatorCost(
        memory_bytes=(product.elements + through) * itemsize, memory_limit="read", flops=2 * rows * product.elements
    )


def compute_expert_work(
    product: memory.LinearShape,
    *,
    gated: bool,
    rows_in: int,
    assignments: int,
    active_experts: int,
    itemsize: int,
    weights: WeightFormat = UNQUANTISED,
) -> OperatorCost:
    """Return the work of a product of a rank's experts: weights of `active_experts` experts, rows in and results out.

    `assignments` counts pairs of a token and an expert of this rank. With `gated`, the two halves of the results become one.
    With fp8 weights, the rows between both products are fp8 with fp32 scales, too, but the input tokens and the
    final results are not.
    """
    elements, stored = product.inputs * product.outputs, EXPERTS in weights.parts
    weight = weights.compute_bytes(product.inputs, product.outputs) if stored else elements * itemsize
    between = 1 + SCALE_BYTES / SCALE_BLOCK if stored and weights.name == FP8 else itemsize
    into, out = (itemsize, between) if gated else (between, itemsize)
    limit, fallback = _choose_limits(weights if stored else UNQUANTISED)
    through = rows_in * product.inputs * into + assignments * (product.outputs // 2 if gated else product.outputs) * out
    return OperatorCost(
        memory_bytes=round(active_experts * weight + through),
        memory_limit="read",
        flops=2 * assignments * elements,
        flops_limit=limit,
        fallback_flops_limit=fallback,
    )


def compute_linear_work(
    product: memory.LinearShape, rows: int, *, itemsize: int, weights: WeightFormat
) -> OperatorCost:
    """Return the work of a linear layer with unquantised rows and results, over weights in a format."""
    found = compute_product_work(product, rows, itemsize)
    if not weights.is_quantised:
        return found
    fewer = product.elements * itemsize - weights.compute_bytes(product.inputs, product.outputs)
    limit, fallback = _choose_limits(weights)
    return msgspec.structs.replace(
        found, memory_bytes=found.memory_bytes - fewer, flops_limit=limit, fallback_flops_limit=fallback
    )


def _choose_limits(weights: WeightFormat) -> tuple[str, str]:
    """Return the limit for products of weights in a format, and the one of GPUs without it: those widen fp4 weights."""
    return weights.matmul, "matmul" if weights.matmul == FP4_MATMUL else ""


def compute_gather_work(message_bytes: int, ranks: int) -> OperatorCost:
    """Return the work of an all-gather, reduce-scatter or all-to-all: a rank receives (N − 1)/N of the message behind
    one barrier.
    """
    if ranks == 1:
        return OperatorCost()
    return OperatorCost(received_bytes=round((ranks - 1) / ranks * message_bytes), barriers=1)


def compute_all_reduce_work(message_bytes: int, ranks: int) -> OperatorCost:
    """Return the work of summing all ranks' messages on all of them: a rank receives 2·(N − 1)/N of the message."""
    return compute_gather_work(2 * message_bytes, ranks)


def compute_query_work(batch: int, heads: int, ranks: int, width: int, itemsize: int) -> OperatorCost:
    """Return the work of gathering the queries of a DCP group: (N − 1)/N·B·H·Q numbers behind one barrier."""
    return compute_gather_work(batch * heads * width * itemsize, ranks)


def compute_merge_work(batch: int, heads: int, ranks: int, value: int, itemsize: int) -> OperatorCost:
    """Return the work of receiving partial outputs and lse of a rank's heads: (N − 1)/N·B·H·(R numbers + 4 bytes), one
    barrier.

    `value` is the number of columns of an output: R, or V if outputs are projected first.
    """
    return compute_gather_work(batch * heads * (value * itemsize + LSE_BYTES), ranks)


def compute_candidate_bytes(indexer: Indexer, local_keys: Iterable[int], ranks: int) -> int:
    """Return the bytes that a rank receives so that all ranks of a DCP group choose the same tokens: (N − 1)·Σ min(k, keys)·8.

    Each rank holds the indexer's keys of its own tokens and sends the score and the number of its best k of each request, as
    vLLM's `_merge_dcp_topk_global` does: a token among the best k of all is among the best k of its rank.
    """
    return (ranks - 1) * sum(min(indexer.top_k, keys) for keys in local_keys) * CANDIDATE_BYTES


def compute_exchanged_bytes(
    exchange: str, batch: int, heads: int, ranks: int, width: int, value: int, itemsize: int
) -> tuple[int, int]:
    """Return the bytes that a rank receives by an exchange's own algorithm (exchange/*.py): (queries, partial outputs
    with their lse).

    `ag_rs` sums outputs in fp32 (its bench's `-bf16` in two bytes), and gives each rank the lse of all.
    """
    queries = compute_query_work(batch, heads, ranks, width, itemsize).received_bytes
    merged = compute_merge_work(batch, heads, ranks, value, itemsize).received_bytes
    if exchange.startswith("ag_rs"):
        numbers = batch * heads * value * (ranks - 1) // ranks
        merged = numbers * (2 if exchange.endswith("-bf16") else 4) + (ranks - 1) * batch * heads * LSE_BYTES
    return queries, merged


def estimate_experts_hit(experts: int, top_k: int, tokens: int) -> float:
    """Return the expected number of experts with a token if all E are equally likely: E·(1 − (1 − k/E)^T), regardless
    of groups.
    """
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Describe which part of a layer's routing reaches one rank."""

    active_experts: int  # number of the rank's experts that have a row
    assignments: int  # number of pairs of a token and one of the rank's experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """Describe how a model is distributed over its ranks."""

    shape: ModelShape
    layout: Layout
    itemsize: int
    interleave: int = 1
    replicated: QueryReplication = OWN_HEADS
    weights: WeightFormat = UNQUANTISED  # format of the weights of linear layers and experts
    kv_itemsize: int | None = None  # bytes per number in the KV cache; None if they are those of all other tensors
    pcp: int = 1  # ranks that divide prompts' tokens; attention replicas in `layout` (Layout.spread)
    routing: str = OWN  # distribution of the experts that tokens take, as Point.routing
    ep: int | None = None  # expert parallel degree, with experts split over the other ranks; None: all ranks
    drafts: bool = False  # True for the MTP layer, which joins two hidden states by whole bf16 weights on each rank

    @classmethod
    def from_point(cls, point: Point, shape: ModelShape) -> Sharding:
        """Return the sharding of a point."""
        return cls(
            shape=shape,
            layout=point.layout.spread,
            itemsize=ITEMSIZE[point.dtype],
            interleave=point.interleave,
            replicated=point.query_replication,
            ep=point.ep_degree,
            weights=shape.get_weight_format(point.weights_precision),
            routing=point.routing,
            kv_itemsize=ITEMSIZE[point.kv_precision],
            pcp=point.pcp,
        )

    @property
    def row_width(self) -> int:
        """Numbers in a KV row of a rank."""
        return self.shape.compute_kv_width(self.layout.attn_tp)

    @property
    def row_bytes(self) -> int:
        """Bytes of a KV row as it is stored."""
        return self.shape.compute_kv_row_bytes(self.kv_itemsize or self.itemsize, self.layout.attn_tp)

    @property
    def in_fp8(self) -> bool:
        """Return True if linear layers and experts multiply fp8 weights, for which rows are quantised."""
        return self.weights.name == FP8

    def get_linear_work(self, product: memory.LinearShape, rows: int, part: str) -> OperatorCost:
        """Return the work of a linear layer of one of weight_formats.PARTS."""
        weights = self.weights if part in self.weights.parts else UNQUANTISED
        return compute_linear_work(product, rows, itemsize=self.itemsize, weights=weights)

    @property
    def expert_ranks(self) -> int:
        """Expert parallel degree as a number."""
        return self.layout.tp if self.ep is None else self.ep

    @property
    def expert_width(self) -> int:
        """Width of an expert on one rank."""
        return self.shape.moe_intermediate_size * self.expert_ranks // self.layout.tp

    def count_expert_loads(self, ids: Sequence[int]) -> list[ExpertLoad]:
        """Return the work of each rank if tokens select these experts, k per token."""
        each = self.shape.experts // self.expert_ranks
        of_rank = [[e for e in ids if e // each == rank] for rank in range(self.expert_ranks)]
        return [ExpertLoad(active_experts=len(set(found)), assignments=len(found)) for found in of_rank]

    def estimate_expert_load(self, tokens: int) -> ExpertLoad:
        """Return the expected work of a rank if only the number of tokens is known, by the distribution of the routing, the mean of
        all ranks and layers. Without one all experts are equally likely.
        """
        if self.routing == OWN:
            hit = estimate_experts_hit(self.shape.experts, self.shape.top_k, tokens)
        else:
            from dcpbench.points.expert_choices import load_choices  # numpy, which most commands do without

            hit = load_choices(self.routing, self.shape).estimate_hit(tokens)
        return ExpertLoad(
            active_experts=round(hit / self.expert_ranks),
            assignments=round(tokens * self.shape.top_k / self.expert_ranks),
        )

    def make_draft_layer(self) -> Sharding | None:
        """Return the sharding of the layer that drafts tokens, with embedding and head; None if the model has no such layer."""
        s = self.shape
        if not s.mtp_layers:
            return None
        indexer = s.indexer and dataclasses.replace(s.indexer, layers=1)
        gqa = s.gqa and dataclasses.replace(s.gqa, window_layers=0)
        layer = dataclasses.replace(s, layers=1, first_k_dense_replace=0, mtp_layers=0, indexer=indexer, gqa=gqa)
        return dataclasses.replace(self, shape=layer, drafts=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRows:
    """Describe what a step computes, without padding, of the busiest replica unless stated otherwise."""

    decodes: tuple[int, ...] = ()  # KV rows that each decoding request attends to, over all ranks, its own included
    chunks: tuple[tuple[int, int], ...] = ()  # (tokens, stored tokens before them) of each prompt chunk
    queries: int = 1  # query rows of each decoding request: a known token, then drafts; the last sees all its KV rows
    sampled: int = 0  # number of rows for which logits are needed
    tokens: int = 0  # number of rows of all replicas together, which share the experts
    idle: int = 0  # number of padding rows among them that go to no expert (engine/serve_engine.py)
    routing: tuple[tuple[ExpertLoad, ...], ...] = ()  # per layer with experts and rank; empty: `estimate_expert_load`

    @property
    def rows(self) -> int:
        """Number of rows of a replica."""
        return self.decode_rows + sum(tokens for tokens, _ in self.chunks)

    @property
    def decode_rows(self) -> int:
        """Number of query rows of decoding requests."""
        return len(self.decodes) * self.queries

    def make_draft_passes(self) -> list[StepRows]:
        """Return the passes of the layer that drafts tokens behind this step: one over all of its rows, of which it stores the KV, and for each
        further draft one over a row of each request.
        """
        requests = len(self.decodes)
        first = dataclasses.replace(self, sampled=requests + len(self.chunks), routing=())
        if self.queries == 1 or not requests:
            return [first]
        replicas = -(-self.tokens // self.rows)
        other = StepRows(decodes=self.decodes, sampled=requests, tokens=replicas * requests)
        return [first] + [other] * (self.queries - 2)

    @property
    def live(self) -> int:
        """Number of rows of all replicas that go to experts."""
        return self.tokens - self.idle


def compute_step_floors(sharding: Sharding, step: StepRows, limits: Mapping[str, float]) -> dict[str, float] | None:
    """Return the floor in µs of each phase (measuring.ranges.PHASES) with work, over all layers.

    Return None if a limit is unknown: a sum without one of its terms would be too low. Phases are profiled on rank 0,
    so the experts' floor is rank 0's; the floor of the following sum includes the wait for the busiest rank, layer by
    layer, as its measured time does. Without known routing all ranks have the same work.
    """
    found: dict[str, float] = {}
    for phase, calls_per_step, work in iter_phase_works(sharding, step):
        if work.is_empty:
            continue
        us = compute_floor_us(work, limits)
        if us is None:
            return None
        found[phase] = found.get(phase, 0.0) + calls_per_step * us
    for layer in step.routing:
        waits = [_compute_experts_us(sharding, step, load, limits) for load in layer]
        if max(waits) > waits[0]:
            found["mlp_reduce"] = found.get("mlp_reduce", 0.0) + max(waits) - waits[0]
    return found


def compute_local_us(sharding: Sharding, step: StepRows, limits: Mapping[str, float]) -> float:
    """Return the floor of a step in µs without calls between ranks; work with an unknown limit takes no time."""
    works = (
        (calls_per_step, work) for _, calls_per_step, work in iter_phase_works(sharding, step) if not work.barriers
    )
    return sum(calls_per_step * (compute_floor_us(work, limits) or 0.0) for calls_per_step, work in works)


def compute_step_matmul_s(sharding: Sharding, step: StepRows, limits: Mapping[str, float]) -> float | None:
    """Return the seconds that operations of a step take on rank 0 at the matrix rates, each at the rate of its
    operands.

    Counted are all linear layers, experts and attention. Return None if a rate is unknown.
    """
    works = [
        (calls_per_step * work.flops, get_flops_limit(work, limits))
        for _, calls_per_step, work in iter_phase_works(sharding, step)
        if work.flops
    ]
    if any(limit not in limits for _, limit in works):
        return None
    return sum(flops / limits[limit] for flops, limit in works)


def iter_phase_works(sharding: Sharding, step: StepRows) -> Iterator[tuple[str, int, OperatorCost]]:
    """Yield (phase, number of calls in a step, the work of an operator) for rank 0."""
    s, layout, itemsize = sharding.shape, sharding.layout, sharding.itemsize
    hidden_bytes = s.hidden * itemsize
    layers = memory.count_all_layers(s)
    rows = step.rows
    reduced = compute_all_reduce_work(rows * hidden_bytes, layout.attn_tp)
    if s.has_embedding:
        yield "embed", 1, OperatorCost(memory_bytes=2 * rows * hidden_bytes)
        yield "embed", 1, reduced
    # The first reads the residual alone, the one behind the last layer belongs to the LM head.
    yield "norm", 2 * s.layers - 1, OperatorCost(memory_bytes=4 * rows * hidden_bytes)
    yield "norm", 1, OperatorCost(memory_bytes=2 * rows * hidden_bytes)
    if sharding.drafts:
        yield "qkv_proj", 1, compute_product_work(memory.LinearShape(2 * s.hidden, s.hidden), rows, itemsize)
    for phase, work in _iter_projection_works(sharding, step):
        yield phase, s.layers, work
    for phase, work in _iter_indexer_works(sharding, step):
        yield phase, s.indexer.layers if s.indexer else 0, work
    for window, calls_per_step in _count_window_layers(s):
        for phase, work in itertools.chain(
            _iter_attention_works(sharding, step, window), _iter_prefill_works(sharding, step, window)
        ):
            yield phase, calls_per_step, work
    yield "attn_reduce", s.layers, reduced
    yield "dp_gather", s.layers, compute_gather_work(step.tokens * hidden_bytes, layout.dp)
    for product in memory.make_mlp_products(s, s.intermediate_size // layout.tp):
        yield "dense_mlp", layers.dense, sharding.get_linear_work(product, step.tokens, DENSE)
    yield from _iter_moe_works(sharding, step, layers.moe)
    yield "mlp_reduce", s.layers, compute_gather_work(step.tokens * hidden_bytes, layout.dp)
    yield "mlp_reduce", s.layers, reduced
    if not s.has_head:
        return
    head = memory.LinearShape(s.hidden, memory.compute_vocab_rows(s, layout))
    yield "lm_head", 1, compute_product_work(head, step.sampled, itemsize)
    yield "lm_head", 1, compute_gather_work(step.sampled * CANDIDATE_BYTES * layout.attn_tp, layout.attn_tp)


def _count_window_layers(shape: ModelShape) -> list[tuple[int | None, int]]:
    """Return the sliding windows of a model, None for layers without one, each with its number of layers."""
    if shape.gqa is None or not shape.gqa.window_layers:
        return [(None, shape.layers)]
    return [(None, shape.layers - shape.gqa.window_layers), (shape.gqa.window, shape.gqa.window_layers)]


def _iter_projection_works(sharding: Sharding, step: StepRows) -> Iterator[tuple[str, OperatorCost]]:
    """Yield the work of one layer's projections, and of writing the new KV rows."""
    s, layout, itemsize, replicated = sharding.shape, sharding.layout, sharding.itemsize, sharding.replicated
    products = memory.make_attention_products(s, layout, replicated)
    absorbed = functools.partial(compute_product_work, itemsize=itemsize)
    decodes = step.decode_rows
    for name in ("qkv", "qkv_a", "q_b"):
        if name in products:
            yield "qkv_proj", sharding.get_linear_work(products[name], step.rows, memory.ATTENTION_PARTS[name])
    yield "kv_write", OperatorCost(memory_bytes=step.rows * (sharding.row_width * itemsize + sharding.row_bytes))
    yield "o_proj", sharding.get_linear_work(products["o"], step.rows, O)
    if decodes and "w_uk" in products:
        yield "qkv_proj", absorbed(products["w_uk"], decodes)
        yield "o_proj", absorbed(products["w_uv"], decodes)


def _iter_attention_works(sharding: Sharding, step: StepRows, window: int | None) -> Iterator[tuple[str, OperatorCost]]:
    """Yield the work of one layer's decode attention, with the exchange around it."""
    s, layout, itemsize, replicated = sharding.shape, sharding.layout, sharding.itemsize, sharding.replicated
    decodes, heads = step.decode_rows, s.heads // layout.attn_tp * layout.dcp
    if not decodes:
        return
    if not replicated.query:
        yield "q_gather", compute_query_work(decodes, heads, layout.dcp, s.query_width, itemsize)
    most = window or (s.indexer.top_k if s.indexer else None)
    rows = (max(n - back, 1) for n in step.decodes for back in range(step.queries)[::-1])
    seen = [n if most is None else min(n, most) for n in rows]
    lengths = [compute_local_length(n, 0, layout.kv_ranks, sharding.interleave) for n in seen]
    yield (
        "attention",
        compute_attention_work(
            heads,
            lengths,
            itemsize,
            s.query_width,
            s.output_width,
            sharding.kv_itemsize,
            sharding.row_bytes,
            step.queries,
        ),
    )
    value = s.v_head_dim if replicated.value else s.output_width
    if layout.shared_kv > 1:
        yield "merge", compute_all_reduce_work(decodes * heads * value * itemsize, layout.kv_ranks)
        yield "merge", compute_gather_work(layout.kv_ranks * decodes * heads * LSE_BYTES, layout.kv_ranks)
    else:
        yield "merge", compute_merge_work(decodes, heads, layout.dcp, value, itemsize)


def _iter_indexer_works(sharding: Sharding, step: StepRows) -> Iterator[tuple[str, OperatorCost]]:
    """Yield the work of one indexer: projections, and a score of each stored token and head, at the fp8 rate.

    Over N ranks of DCP a rank has the keys of its own tokens. Of decodes it scores those, and the ranks exchange their best; for
    prompts the stored keys are gathered.
    """
    indexer = sharding.shape.indexer
    if indexer is None:
        return
    for name, product in memory.make_indexer_products(sharding.shape).items():
        yield "qkv_proj", sharding.get_linear_work(product, step.rows, QKV if name != "weights_proj" else "")
    ranks = sharding.layout.kv_ranks
    local_keys = [compute_local_length(n, 0, ranks, sharding.interleave) for n in step.decodes]
    keys = sum(local_keys)
    received = compute_candidate_bytes(indexer, local_keys * step.queries, ranks)
    yield "q_gather", OperatorCost(received_bytes=received, barriers=1) if received else OperatorCost()
    yield "prefix_gather", compute_gather_work(sum(p for _, p in step.chunks) * indexer.key_bytes, ranks)
    pairs = sum(_count_pairs(n, p, None) for n, p in step.chunks)
    for phase, read, scored in (
        ("attention", keys, keys * step.queries),
        ("prefill", sum(n + p for n, p in step.chunks), pairs),
    ):
        if scored:
            yield phase, compute_indexer_work(indexer, read, scored)


def _count_pairs(tokens: int, stored: int, window: int | None) -> int:
    """Return the number of pairs of a query of a chunk and a token that it attends to, itself included."""
    pairs = tokens * stored + tokens * (tokens + 1) // 2
    if window is None:
        return pairs
    beyond = min(max(tokens + stored - window, 0), tokens)  # queries with more tokens than the window
    before = tokens - beyond
    return beyond * window + before * stored + before * (before + 1) // 2


def _iter_prefill_works(sharding: Sharding, step: StepRows, window: int | None) -> Iterator[tuple[str, OperatorCost]]:
    """Yield the work of one layer's attention of chunks: n tokens behind p stored ones, with keys and values of this
    rank's heads.

    With MLA, n + p rows are decompressed with 2·(n + p)·R·h·(nope + V) operations; n·p + n·(n + 1)/2 pairs are attended to, each
    with 2·h·(nope + P + V) operations. Rows, weights, q and o count once; keys and values need not pass through memory.
    Stored rows are read, and sent, in their stored precision.
    """
    if not step.chunks:
        return
    s, layout, itemsize = sharding.shape, sharding.layout, sharding.itemsize
    heads = s.heads // layout.attn_tp
    tokens = sum(n for n, _ in step.chunks)
    stored = sum(p if window is None else min(p, window) for _, p in step.chunks)
    pairs = sum(_count_pairs(n, p, window or (s.indexer.top_k if s.indexer else None)) for n, p in step.chunks)
    weights = s.latent * heads * (s.qk_nope_head_dim + s.v_head_dim)
    numbers = (
        tokens * sharding.row_width
        + weights
        + tokens * heads * (s.qk_nope_head_dim + s.qk_rope_head_dim + s.v_head_dim)
    )
    decompressed, attended = (
        (tokens + stored) * weights,
        pairs * heads * (s.qk_nope_head_dim + s.qk_rope_head_dim + s.v_head_dim),
    )
    yield "prefix_gather", compute_gather_work(stored * sharding.row_bytes, layout.kv_ranks)
    yield "prefix_gather", compute_gather_work(sharding.pcp * tokens * sharding.row_width * itemsize, sharding.pcp)
    yield (
        "prefill",
        OperatorCost(
            memory_bytes=numbers * itemsize + stored * sharding.row_bytes,
            memory_limit="read",
            flops=2 * (decompressed + attended),
        ),
    )


def _iter_moe_works(sharding: Sharding, step: StepRows, layers: int) -> Iterator[tuple[str, int, OperatorCost]]:
    """Yield the work of the router, the shared expert and rank 0's experts, for all layers that have them."""
    if not sharding.shape.experts:
        return
    s, layout, itemsize = sharding.shape, sharding.layout, sharding.itemsize
    yield "moe", layers, compute_product_work(memory.LinearShape(s.hidden, s.experts), step.tokens, itemsize)
    if s.shared_experts:
        for product in memory.make_mlp_products(s, s.shared_experts * s.moe_intermediate_size // layout.tp):
            yield "moe", layers, sharding.get_linear_work(product, step.tokens, SHARED)
    routing = [(1, layer[0]) for layer in step.routing] or [(layers, sharding.estimate_expert_load(step.live))]
    for calls_per_step, load in routing:
        for work in iter_expert_works(sharding, step, load):
            yield "moe", calls_per_step, work


def iter_expert_works(sharding: Sharding, step: StepRows, load: ExpertLoad) -> Iterator[OperatorCost]:
    """Yield the work of both products of a rank's experts in one layer."""
    for number, product in enumerate(memory.make_mlp_products(sharding.shape, sharding.expert_width)):
        gated = number == 0
        rows_in = min(step.live, load.assignments) if gated else load.assignments
        yield compute_expert_work(
            product,
            gated=gated,
            rows_in=rows_in,
            assignments=load.assignments,
            active_experts=load.active_experts,
            itemsize=sharding.itemsize,
            weights=sharding.weights,
        )


def _compute_experts_us(sharding: Sharding, step: StepRows, load: ExpertLoad, limits: Mapping[str, float]) -> float:
    return sum(compute_floor_us(work, limits) or 0.0 for work in iter_expert_works(sharding, step, load))
