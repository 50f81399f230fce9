"""Qwen3 without experts (arXiv 2505.09388): grouped-query attention with normalised heads. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcpbench.models import gqa_config
from dcpbench.models.config_fields import parse_bool
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import Gqa, ModelShape

_32B = gqa_config.make_shape(
    name="qwen3-32b",
    hidden=5120,
    layers=64,
    heads=64,
    intermediate_size=25600,
    first_k_dense_replace=64,
    vocab=151936,
    gqa=Gqa(kv_heads=8, qk_norm=True),
    rope_theta=1_000_000.0,
    max_position=40960,
)
_8B = dataclasses.replace(
    _32B, name="qwen3-8b", hidden=4096, layers=36, heads=32, intermediate_size=12288, first_k_dense_replace=36
)


def parse_attention(config: dict[str, Any]) -> Gqa:
    """Return the attention of Qwen3: heads are normalised, and projections may have biases."""
    bias = parse_bool(config, "attention_bias", default=False)
    return Gqa(kv_heads=gqa_config.count_kv_heads(config), qk_norm=True, qkv_bias=bias, o_bias=bias)


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    return gqa_config.parse_shape(config, name, parse_attention(config))


FAMILY = Family(
    title="Qwen3",
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    defaults={"head_dim": 128},
    read_shape=gqa_config.read_shape,
    parse_shape=_parse_shape,
    presets=(
        Preset(shape=_8B, repositories={"qwen3-8b": "Qwen/Qwen3-8B"}, title="Qwen3-8B"),
        Preset(shape=_32B, repositories={"qwen3-32b": "Qwen/Qwen3-32B"}, title="Qwen3-32B"),
    ),
    transformers_config="Qwen3Config",
)
