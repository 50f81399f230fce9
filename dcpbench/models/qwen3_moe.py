"""Qwen3 with experts (arXiv 2505.09388): softmax routing with normalised weights, without shared experts. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcpbench.models import gqa_config, qwen3
from dcpbench.models.config_fields import parse_bool, parse_int
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import Gqa, ModelShape

_235B = gqa_config.make_shape(
    name="qwen3-235b-a22b",
    hidden=4096,
    layers=94,
    heads=64,
    experts=128,
    top_k=8,
    moe_intermediate_size=1536,
    intermediate_size=12288,
    first_k_dense_replace=0,
    vocab=151936,
    gqa=Gqa(kv_heads=4, qk_norm=True),
    rope_theta=1_000_000.0,
    max_position=40960,
)
_30B = dataclasses.replace(
    _235B, name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, moe_intermediate_size=768, intermediate_size=6144
)


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    return gqa_config.parse_shape(
        config,
        name,
        qwen3.parse_attention(config),
        first_k_dense_replace=0,
        experts=parse_int(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        top_k=parse_int(config, "num_experts_per_tok"),
        moe_intermediate_size=parse_int(config, "moe_intermediate_size"),
        normalise=parse_bool(config, "norm_topk_prob", default=False),
    )


FAMILY = Family(
    title="Qwen3-MoE",
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    defaults={},
    read_shape=gqa_config.read_shape,
    parse_shape=_parse_shape,
    presets=(
        Preset(shape=_30B, repositories={"qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B"}, title="Qwen3-30B-A3B"),
        Preset(shape=_235B, repositories={"qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B"}, title="Qwen3-235B-A22B"),
    ),
    transformers_config="Qwen3MoeConfig",
)
