"""Llama 3.1 (arXiv 2407.21783): grouped-query attention and dense MLPs. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcpbench.models import gqa_config
from dcpbench.models.config_fields import parse_bool
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import Gqa, Llama3Rope, ModelShape

_70B = gqa_config.make_shape(
    name="llama-3.1-70b",
    hidden=8192,
    layers=80,
    heads=64,
    intermediate_size=28672,
    first_k_dense_replace=80,
    vocab=128256,
    gqa=Gqa(kv_heads=8),
    rms_eps=1e-5,
    rope_theta=500_000.0,
    llama3_rope=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    max_position=131072,
)
_8B = dataclasses.replace(
    _70B, name="llama-3.1-8b", hidden=4096, layers=32, heads=32, intermediate_size=14336, first_k_dense_replace=32
)


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    bias = parse_bool(config, "attention_bias", default=False)
    return gqa_config.parse_shape(
        config, name, Gqa(kv_heads=gqa_config.count_kv_heads(config), qkv_bias=bias, o_bias=bias)
    )


FAMILY = Family(
    title="Llama-3.1",
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    defaults={},
    read_shape=gqa_config.read_shape,
    parse_shape=_parse_shape,
    presets=(
        Preset(shape=_8B, repositories={"llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct"}, title="Llama-3.1-8B"),
        Preset(shape=_70B, repositories={"llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct"}, title="Llama-3.1-70B"),
    ),
    transformers_config="LlamaConfig",
)
