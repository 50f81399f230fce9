"""Tensors of a whole checkpoint under their published names, for engines that load weights from an iterator.

A serving engine that loads these tensors shards and converts them as it does with a downloaded checkpoint. Its weights
then equal those of this package's engine, which reads its shards from the same source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcpbench.engine.checkpoint import SCALE
from dcpbench.engine.scaled_weights import ALL
from dcpbench.engine.weights import load_routing_bias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.engine.weights import Source
    from dcpbench.points.shapes import ModelShape

NamedTensor = tuple[str, torch.Tensor]


def iter_checkpoint_tensors(source: Source, shape: ModelShape, *, fp8: bool) -> Iterator[NamedTensor]:
    """Yield (name, tensor) for every tensor of a model of this shape, layer by layer, on the source's device.

    With `fp8` linear layers and experts are e4m3, each followed by its fp32 scales of 128 × 128 blocks under the name
    `…weight_scale_inv`, as DeepSeek-V3 is published.
    """
    tensors = _Tensors(source, shape, fp8=fp8)
    yield tensors.read_vocabulary("model.embed_tokens.weight")
    for index in range(shape.layers):
        yield from tensors.iter_layer(index)
    yield tensors.read_vector("model.norm.weight", shape.hidden)
    if not shape.tied:
        yield tensors.read_vocabulary("lm_head.weight")


class _Tensors:
    """Reads whole tensors; each along the dimension along which ranks read their parts, so that both see the same numbers."""

    def __init__(self, source: Source, shape: ModelShape, *, fp8: bool) -> None:
        self.source, self.shape, self.fp8 = source, shape, fp8

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
        prefix, s = f"model.layers.{index}.", self.shape
        yield self.read_vector(prefix + "input_layernorm.weight", s.hidden)
        yield from self.iter_attention(prefix + "self_attn.")
        yield self.read_vector(prefix + "post_attention_layernorm.weight", s.hidden)
        if index < s.first_dense:
            yield from self.iter_mlp(prefix + "mlp.", s.dense_inter)
            return
        yield prefix + "mlp.gate.weight", self.source.get_tensor(prefix + "mlp.gate.weight", (s.experts, s.hidden))
        if (bias := load_routing_bias(self.source, s, prefix)) is not None:
            yield prefix + "mlp.gate.e_score_correction_bias", bias
        for expert in range(s.experts):
            yield from self.iter_mlp(f"{prefix}mlp.experts.{expert}.", s.moe_inter)
        if s.shared_experts:
            yield from self.iter_mlp(prefix + "mlp.shared_experts.", s.shared_experts * s.moe_inter)

    def iter_attention(self, prefix: str) -> Iterator[NamedTensor]:
        s = self.shape
        queries = s.heads * (s.nope + s.rope)
        if s.q_lora is None:
            yield from self.iter_linear(prefix + "q_proj.weight", queries, s.hidden, split="rows")
        else:
            yield from self.iter_linear(prefix + "q_a_proj.weight", s.q_lora, s.hidden)
            yield self.read_vector(prefix + "q_a_layernorm.weight", s.q_lora)
            yield from self.iter_linear(prefix + "q_b_proj.weight", queries, s.q_lora, split="rows")
        yield from self.iter_linear(prefix + "kv_a_proj_with_mqa.weight", s.kv_width, s.hidden)
        yield self.read_vector(prefix + "kv_a_layernorm.weight", s.latent)
        yield from self.iter_linear(prefix + "kv_b_proj.weight", s.heads * (s.nope + s.value), s.latent, split="rows")
        yield from self.iter_linear(prefix + "o_proj.weight", s.hidden, s.heads * s.value, split="columns")

    def iter_mlp(self, prefix: str, inner: int) -> Iterator[NamedTensor]:
        hidden = self.shape.hidden
        yield from self.iter_linear(prefix + "gate_proj.weight", inner, hidden, split="rows")
        yield from self.iter_linear(prefix + "up_proj.weight", inner, hidden, split="rows")
        yield from self.iter_linear(prefix + "down_proj.weight", hidden, inner, split="columns")
