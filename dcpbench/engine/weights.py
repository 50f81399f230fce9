"""Weights of one rank: how each tensor of the published checkpoints is sharded, and which distinct layers are held.

One description serves both sources. A `Source` returns parts of tensors by their Hugging Face name and either draws
them (synthetic.py) or reads them (checkpoint.py):

    source.get_tensor(name, shape, rows=…, columns=…)      a [rows, columns] part of a 2-D tensor, or a whole 1-D tensor
    source.get_scaled(…)                                the same of a 2-D tensor, as e4m3 in blocks with scales

All tensors have the model's dtype with two exceptions: the routing bias, which is published and computed with in fp32,
and, for points with fp8 weights, the tensors that DeepSeek-V3 publishes in fp8: the linear layers of attention and the
experts. Of those, the decompression of k and v is converted back to the model's dtype, as in vLLM on NVIDIA GPUs:
absorbed, it is a product per head, with other blocks than the checkpoint's. For points with int4 weights routed experts are
quantised to int4 as they are loaded (kernels/int4.py).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from dcpbench.engine.scaled_weights import ALL, join_rows
from dcpbench.kernels import int4
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.kernels.int4 import Int4
from dcpbench.models.shapes import SIGMOID
from dcpbench.points import memory
from dcpbench.points.layout import OWN_HEADS
from dcpbench.points.names import MOE_EP

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.attention import LayerWeights
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.layout import Layout, QueryReplication


class Source(Protocol):
    """Source of weights."""

    kind: str  # `synthetic`, or the checkpoint's folder
    dtype: torch.dtype  # default dtype of tensors

    def get_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return part of the tensor `name` of full shape `shape`, on the device in the model's dtype or in `dtype`."""

    def get_scaled(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Scaled:
        """Return a part of an fp8 weight: its numbers, and the scales of its blocks as in the whole weight."""


Linear = torch.Tensor | Scaled  # weights [out, in] of a linear layer, or of one for each expert
ExpertLinear = Linear | Int4  # weights [E, out, in] of one linear layer of all experts


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A dense MLP or a shared expert, split over its inner width."""

    gate_up: Linear
    down: Linear


@dataclasses.dataclass(frozen=True)
class Moe:
    """Router, this rank's experts or its slice of all of them, and its slice of the shared expert."""

    router: torch.Tensor
    bias: torch.Tensor  # [E], fp32 for every model dtype
    gate_up: ExpertLinear  # [E_local, 2·I, D]; with tensor-parallel experts all, with I / tp rows each of gate and up
    down: ExpertLinear  # [E_local, D, I]; the same columns
    first: int  # global id of the first local expert; 0 with tensor-parallel experts
    shared: Mlp | None  # shared expert; None if the model has none


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights of a distinct layer."""

    attention: LayerWeights
    mlp: Mlp | Moe


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """Weights of the layer that drafts tokens."""

    layer: Layer
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    join: torch.Tensor  # [D, 2·D]: projects normed embedding ‖ normed previous hidden state; whole on each rank
    final_norm: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Weights:
    """All weights of a rank."""

    embed: torch.Tensor  # [vocab rows of this rank, D]; rows past the vocabulary are zero
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    dense: list[Layer]
    moe: list[Layer]
    first_k_dense_replace: int
    layers: int  # layers of the model; the layer that drafts tokens has this index
    draft: DraftLayer | None = None

    def get_layer(self, index: int) -> Layer:
        """Return the weights used by layer `index`: its own, or those of a distinct layer of its kind, used in turn."""
        if self.draft is not None and index == self.layers:
            return self.draft.layer
        if index < self.first_k_dense_replace:
            return self.dense[index % len(self.dense)]
        return self.moe[(index - self.first_k_dense_replace) % len(self.moe)]


def load_weights(
    source: Source,
    shape: ModelShape,
    layout: Layout,
    rank: int,
    held: memory.Layers,
    alive: Callable[[], None] = lambda: None,
    replicated: QueryReplication = OWN_HEADS,
    ep: str = MOE_EP,
    *,
    fp8: bool = False,
    int4_group: int = 0,
) -> Weights:
    """Return this rank's shard of the first layers of each kind, `held` of them.

    `alive` is called before each layer, for the hang watchdog; `replicated` selects the tensors held for all heads of the DCP
    group, `ep` the placement of experts, and `fp8` whether linear layers and experts are Scaled. With `int4_group`, experts are in
    int4 with so many inputs per scale.
    """
    names = shape.tensors
    loader = Loader(source, shape, layout, rank, alive, replicated, ep, fp8, int4_group)
    embed = loader.load_vocab(names.embedding)
    return Weights(
        embed=embed,
        lm_head=embed if shape.tie_word_embeddings else loader.load_vocab(names.lm_head),
        final_norm=source.get_tensor(names.final_norm, (shape.hidden,)),
        dense=[loader.load_layer(i) for i in range(held.dense)],
        moe=[loader.load_layer(shape.first_k_dense_replace + i) for i in range(held.moe)],
        first_k_dense_replace=shape.first_k_dense_replace,
        layers=shape.layers,
        draft=loader.load_draft_layer() if shape.drafts else None,
    )


class Loader:
    """Load the shards of a rank."""

    def __init__(
        self,
        source: Source,
        shape: ModelShape,
        layout: Layout,
        rank: int,
        alive: Callable[[], None],
        replicated: QueryReplication,
        ep: str,
        fp8: bool,
        int4_group: int,
    ) -> None:
        self.alive, self.replicated, self.ep, self.int4_group = alive, replicated, ep, int4_group
        self.fp8, self.linear = fp8, source.get_scaled if fp8 else source.get_tensor
        self.source, self.shape, self.layout, self.rank = source, shape, layout, rank
        self.names = shape.tensors
        heads = shape.heads // layout.attn_tp
        first = layout.get_attn_rank(rank) * heads
        self.own = range(first, first + heads)  # query heads of this rank
        first -= layout.get_dcp_rank(rank) * heads
        self.group = range(first, first + layout.dcp * heads)  # query heads of its DCP group

    def load_vocab(self, name: str) -> torch.Tensor:
        """Return this rank's rows of the embedding or the LM head."""
        shape, per_rank = self.shape, memory.compute_vocab_rows(self.shape, self.layout)
        first = self.layout.get_attn_rank(self.rank) * per_rank
        last = min(first + per_rank, shape.vocab)
        part = self.source.get_tensor(name, (shape.vocab, shape.hidden), rows=slice(min(first, last), last))
        return torch.nn.functional.pad(part, (0, 0, 0, per_rank - part.shape[0])) if part.shape[0] < per_rank else part

    def load_layer(self, index: int) -> Layer:
        """Return the weights of layer `index`."""
        self.alive()
        prefix = self.names.layer.format(index)
        mlp = (
            self.load_mlp(prefix + self.names.dense, self.shape.intermediate_size)
            if index < self.shape.first_k_dense_replace
            else self.load_moe(prefix)
        )
        return Layer(attention=load_attention(self, prefix), mlp=mlp)

    def load_draft_layer(self) -> DraftLayer:
        """Return the layer that drafts tokens, which a checkpoint has behind the others."""
        names, hidden, get = self.names, self.shape.hidden, self.source.get_tensor
        prefix = names.layer.format(self.shape.layers)
        return DraftLayer(
            layer=self.load_layer(self.shape.layers),
            embedding_norm=get(prefix + names.embedding_norm, (hidden,)),
            hidden_norm=get(prefix + names.hidden_norm, (hidden,)),
            join=get(prefix + names.join, (hidden, 2 * hidden)),
            final_norm=get(prefix + names.draft_norm, (hidden,)),
        )

    def select_heads(self, heads: range, width: int, columns: int) -> dict[str, Any]:
        """Return the shape and rows of a projection's part for some heads, with `width` outputs per head."""
        return {"shape": (self.shape.heads * width, columns), "rows": slice(heads.start * width, heads.stop * width)}

    def load_output_projection(self, name: str) -> Linear:
        """Return the columns of o_proj of this rank's heads."""
        value = self.shape.v_head_dim
        inner = slice(self.own.start * value, self.own.stop * value)
        return self.linear(name, (self.shape.hidden, self.shape.heads * value), columns=inner)

    def load_mlp(self, prefix: str, inner: int) -> Mlp:
        """Return a slice of the inner width over all tp ranks."""
        width = inner // self.layout.tp
        return self.load_mlp_slice(prefix, inner, slice(self.rank * width, (self.rank + 1) * width))

    def load_mlp_slice(self, prefix: str, inner: int, mine: slice) -> Mlp:
        """Return a range of the inner width of an MLP."""
        hidden, names = self.shape.hidden, self.names
        gate = self.linear(prefix + names.gate, (inner, hidden), rows=mine)
        up = self.linear(prefix + names.up, (inner, hidden), rows=mine)
        down = self.linear(prefix + names.down, (hidden, inner), columns=mine)
        return Mlp(gate_up=join_linears((gate, up)), down=down)

    def load_moe(self, prefix: str) -> Moe:
        """Return whole experts, assigned to the tp ranks in contiguous runs, or a slice of each; and a slice of the
        shared one.
        """
        s, names = self.shape, self.names
        held, width = range(s.experts), s.moe_intermediate_size
        if self.ep == MOE_EP:
            local = s.experts // self.layout.tp
            held = range(self.rank * local, (self.rank + 1) * local)
        else:
            width //= self.layout.tp
        start = 0 if self.ep == MOE_EP else self.rank * width
        router = self.source.get_tensor(prefix + names.router, (s.experts, s.hidden))
        gate_up, down = _Stack(len(held)), _Stack(len(held))
        for i, expert in enumerate(held):
            one = self.load_mlp_slice(
                prefix + names.expert.format(expert), s.moe_intermediate_size, slice(start, start + width)
            )
            gate_up.set_expert(i, self.quantize_expert(one.gate_up))
            down.set_expert(i, self.quantize_expert(one.down))
        bias = load_routing_bias(self.source, s, prefix)
        if bias is None:
            bias = torch.zeros(s.experts, dtype=torch.float32, device=router.device)
        shared = (
            self.load_mlp(prefix + names.shared, s.shared_experts * s.moe_intermediate_size)
            if s.shared_experts
            else None
        )
        return Moe(
            router=router, bias=bias, gate_up=gate_up.get_all(), down=down.get_all(), first=held.start, shared=shared
        )

    def quantize_expert(self, weight: Linear) -> ExpertLinear:
        """Return an expert's weight as it is stored: in int4 the only one of its tensor."""
        if not self.int4_group:
            return weight
        assert isinstance(weight, torch.Tensor)
        return int4.quantize(weight[None], self.int4_group)


def load_routing_bias(source: Source, shape: ModelShape, prefix: str) -> torch.Tensor | None:
    """Return the bias added to the scores of a layer's experts for their selection, [E] in fp32; None if the model has
    none.

    It is read in fp32: rounded to bf16, biases around 8 would be multiples of 1/16, and would decide the selection
    among scores between 0 and 1.
    """
    if shape.routing != SIGMOID:
        return None
    return source.get_tensor(prefix + shape.tensors.routing_bias, (shape.experts,), dtype=torch.float32)


def join_linears(parts: tuple[Linear, ...]) -> Linear:
    """Return the weights stacked along the rows."""
    if isinstance(parts[0], Scaled):
        return join_rows(cast("tuple[Scaled, ...]", parts))
    return torch.cat(cast("tuple[torch.Tensor, ...]", parts))


class _Stack:
    """Experts' weights in one tensor, filled while they are loaded, because together they are most of a model."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.found: ExpertLinear | None = None

    def set_expert(self, index: int, one: ExpertLinear) -> None:
        """Store an expert; all experts have the same shape and blocks."""
        if isinstance(one, Scaled):
            if self.found is None:
                data, scale = (t.new_empty(self.count, *t.shape) for t in (one.data, one.scale))
                self.found = Scaled(data, scale, one.block)
            assert isinstance(self.found, Scaled)
            assert self.found.block == one.block
            self.found.data[index], self.found.scale[index] = one.data, one.scale
        elif isinstance(one, Int4):
            if self.found is None:
                data, scale = (t.new_empty(self.count, *t.shape[1:]) for t in (one.data, one.scale))
                self.found = dataclasses.replace(one, data=data, scale=scale)
            assert isinstance(self.found, Int4)
            self.found.data[index], self.found.scale[index] = one.data[0], one.scale[0]
        else:
            if self.found is None:
                self.found = one.new_empty(self.count, *one.shape)
            assert isinstance(self.found, torch.Tensor)
            self.found[index] = one

    def get_all(self) -> ExpertLinear:
        """Return all experts."""
        assert self.found is not None
        return self.found


def load_attention(loader: Loader, prefix: str) -> LayerWeights:
    """Return the attention weights of a layer, of the model's kind of attention."""
    from dcpbench.engine.attention.gqa import load_gqa
    from dcpbench.engine.attention.mla import load_mla

    return (load_gqa if loader.shape.gqa else load_mla)(loader, prefix)
