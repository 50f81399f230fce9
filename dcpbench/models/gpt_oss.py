"""gpt-oss (arXiv 2508.10925): every second layer attends to a window, experts are published in mxfp4. Planned, not run. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcpbench.models import gqa_config
from dcpbench.models.config_fields import parse_bool, parse_int
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import Gqa, ModelShape, Yarn
from dcpbench.models.weight_formats import EXPERTS, FORMATS, MXFP4


def _make_attention(window_layers: int) -> Gqa:
    return Gqa(kv_heads=8, qkv_bias=True, o_bias=True, window=128, window_layers=window_layers, sinks=True)


_120B = gqa_config.make_shape(
    name="gpt-oss-120b",
    hidden=2880,
    layers=36,
    heads=64,
    experts=128,
    top_k=4,
    moe_intermediate_size=2880,
    intermediate_size=2880,
    first_k_dense_replace=0,
    vocab=201088,
    expert_bias=True,
    gqa=_make_attention(18),
    head=64,
    rms_eps=1e-5,
    rope_theta=150_000.0,
    yarn=Yarn(factor=32.0, original_max_position=4096, truncate=False),
    max_position=131072,
    published=dataclasses.replace(FORMATS[MXFP4], parts=frozenset({EXPERTS})),
)
_20B = dataclasses.replace(_120B, name="gpt-oss-20b", layers=24, experts=32, gqa=_make_attention(12))


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    layers = parse_int(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    alternating = (layers + 1) // 2  # transformers' default: even layers have the window
    bias = parse_bool(config, "attention_bias", default=True)
    gqa = Gqa(
        kv_heads=gqa_config.count_kv_heads(config),
        qkv_bias=bias,
        o_bias=bias,
        window=parse_int(config, "sliding_window"),
        window_layers=kinds.count(gqa_config.SLIDING) if isinstance(kinds, list) else alternating,
        sinks=True,
    )
    return gqa_config.parse_shape(
        config,
        name,
        gqa,
        first_k_dense_replace=0,
        experts=parse_int(config, "num_local_experts"),
        top_k=parse_int(config, "num_experts_per_tok"),
        moe_intermediate_size=parse_int(config, "intermediate_size"),
        expert_bias=True,
    )


FAMILY = Family(
    title="gpt-oss",
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    defaults={"head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4},
    read_shape=gqa_config.read_shape,
    parse_shape=_parse_shape,
    presets=(
        Preset(shape=_20B, repositories={"gpt-oss-20b": "openai/gpt-oss-20b"}, title="gpt-oss-20b"),
        Preset(shape=_120B, repositories={"gpt-oss-120b": "openai/gpt-oss-120b"}, title="gpt-oss-120b"),
    ),
    transformers_config="GptOssConfig",
)
