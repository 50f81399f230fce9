"""Tensors of a whole checkpoint under their published names, for engines that load weights from an iterator.

A serving engine that loads these tensors shards and converts them as it does with a downloaded checkpoint. Its weights
then equal those of this package's engine, which reads its shards from the same source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcpbench.engine.scaled_weights import ALL
from dcpbench.engine.weights import load_routing_bias
from dcpbench.models.tensor_names import SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.engine.weights import Source
    from dcpbench.models.shapes import ModelShape

NamedTensor = tuple[str, torch.Tensor]


def iter_checkpoint_tensors(source: Source, shape: ModelShape, *, fp8: bool) -> Iterator[NamedTensor]:
    """Yield (name, tensor) for every tensor of a model of this shape, layer by layer, on the source's device.

    With `fp8` linear layers and experts are e4m3, each followed by its fp32 scales of 128 × 128 blocks under the name
    `…weight_scale_inv`, as DeepSeek-V3 is published.
    """
    tensors, names = _Tensors(source, shape, fp8=fp8), shape.tensors
    yield tensors.read_vocabulary(names.embedding)
    for index in range(shape.layers):
        yield from tensors.iter_layer(index)
    yield tensors.read_vector(names.final_norm, shape.hidden)
    if not shape.tie_word_embeddings:
        yield tensors.read_vocabulary(names.lm_head)


class _Tensors:
    """Reads whole tensors; each along the dimension along which ranks read their parts, so that both see the same numbers."""

    def __init__(self, source: Source, shape: ModelShape, *, fp8: bool) -> None:
        self.source, self.shape, self.names, self.fp8 = source, shape, shape.tensors, fp8

    def read_vocabulary(self, name: str) -> NamedTensor:
        s = self.shape
        return name, self.source.get_tensor(name, (s.vocab, s.hidden), rows=slice(0, s.vocab))

    def read_vector(self, name: str, size: int) -> NamedTensor:
        return name, self.source.get_tensor(name, (size,))

    def iter_linear(self, name: str, outputs: int, inputs: int, *, split: str = "") -> Iterator[NamedTensor]:
        """Yield a linear layer [outputs, inputs], and its scales where it has some. `split`: rows, columns, or neither."""
        rows = slice(0, outputs) if split == "rows" else None
        columns = slice(0, inputs) if split == "columns" else None
        if not self.fp8:
            yield name, self.source.get_tensor(name, (outputs, inputs), rows=rows, columns=columns)
            return
        weight = self.source.get_scaled(name, (outputs, inputs), rows=rows or ALL, columns=columns or ALL)
        yield name, weight.data
        yield name + SCALE, weight.scale

    def iter_layer(self, index: int) -> Iterator[NamedTensor]:
        s, names, prefix = self.shape, self.names, self.names.layer.format(index)
        yield self.read_vector(prefix + names.input_norm, s.hidden)
        yield from self.iter_grouped_attention(prefix) if s.gqa else self.iter_latent_attention(prefix)
        yield self.read_vector(prefix + names.post_norm, s.hidden)
        if index < s.first_k_dense_replace:
            yield from self.iter_mlp(prefix + names.dense, s.intermediate_size)
            return
        router = prefix + names.router
        yield router, self.source.get_tensor(router, (s.experts, s.hidden))
        if (bias := load_routing_bias(self.source, s, prefix)) is not None:
            yield prefix + names.routing_bias, bias
        for expert in range(s.experts):
            yield from self.iter_mlp(prefix + names.expert.format(expert), s.moe_intermediate_size)
        if s.shared_experts:
            yield from self.iter_mlp(prefix + names.shared, s.shared_experts * s.moe_intermediate_size)

    def iter_grouped_attention(self, prefix: str) -> Iterator[NamedTensor]:
        s, names = self.shape, self.names
        assert s.gqa is not None
        yield from self.iter_linear(prefix + names.q, s.heads * s.qk_head_dim, s.hidden, split="rows")
        for name in (names.k, names.v):
            yield from self.iter_linear(prefix + name, s.gqa.kv_heads * s.qk_head_dim, s.hidden, split="rows")
        for name in (names.q_head_norm, names.k_head_norm) if s.gqa.qk_norm else ():
            yield self.read_vector(prefix + name, s.qk_head_dim)
        yield from self.iter_linear(prefix + names.o, s.hidden, s.heads * s.v_head_dim, split="columns")

    def iter_latent_attention(self, prefix: str) -> Iterator[NamedTensor]:
        s, names = self.shape, self.names
        queries = s.heads * s.qk_head_dim
        if s.q_lora is None:
            yield from self.iter_linear(prefix + names.q, queries, s.hidden, split="rows")
        else:
            yield from self.iter_linear(prefix + names.q_a, s.q_lora, s.hidden)
            yield self.read_vector(prefix + names.q_norm, s.q_lora)
            yield from self.iter_linear(prefix + names.q_b, queries, s.q_lora, split="rows")
        yield from self.iter_linear(prefix + names.kv_a, s.kv_width, s.hidden)
        yield self.read_vector(prefix + names.kv_norm, s.latent)
        yield from self.iter_linear(
            prefix + names.kv_b, s.heads * (s.qk_nope_head_dim + s.v_head_dim), s.latent, split="rows"
        )
        yield from self.iter_linear(prefix + names.o, s.hidden, s.heads * s.v_head_dim, split="columns")

    def iter_mlp(self, prefix: str, inner: int) -> Iterator[NamedTensor]:
        hidden, names = self.shape.hidden, self.names
        yield from self.iter_linear(prefix + names.gate, inner, hidden, split="rows")
        yield from self.iter_linear(prefix + names.up, inner, hidden, split="rows")
        yield from self.iter_linear(prefix + names.down, hidden, inner, split="columns")
