"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): V3's routing with grouped-query attention that rotates half of each head. No torch."""

from __future__ import annotations

from typing import Any

from dcpbench.models import gqa_config
from dcpbench.models.config_fields import parse_bool, parse_int, parse_number
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import SIGMOID, Gqa, ModelShape

_GLM_46 = gqa_config.make_shape(
    name="glm-4.6",
    hidden=5120,
    layers=92,
    heads=96,
    experts=160,
    top_k=8,
    shared_experts=1,
    moe_intermediate_size=1536,
    intermediate_size=12288,
    first_k_dense_replace=3,
    vocab=151552,
    routing=SIGMOID,
    routed_scaling_factor=2.5,
    gqa=Gqa(kv_heads=8, qk_norm=True, qkv_bias=True),
    rotated=64,
    rms_eps=1e-5,
    rope_theta=1_000_000.0,
    max_position=202752,
    mtp_layers=1,
)


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    layers = parse_int(config, "num_hidden_layers")
    gqa = Gqa(
        kv_heads=gqa_config.count_kv_heads(config),
        qk_norm=parse_bool(config, "use_qk_norm", default=False),
        qkv_bias=parse_bool(config, "attention_bias", default=False),
    )
    return gqa_config.parse_shape(
        config,
        name,
        gqa,
        rotated=gqa_config.parse_rotated(config, 0.5),
        first_k_dense_replace=min(parse_int(config, "first_k_dense_replace", minimum=0), layers),
        experts=parse_int(config, "n_routed_experts"),
        top_k=parse_int(config, "num_experts_per_tok"),
        shared_experts=parse_int(config, "n_shared_experts", minimum=0),
        moe_intermediate_size=parse_int(config, "moe_intermediate_size"),
        routing=SIGMOID,
        n_group=parse_int(config, "n_group"),
        topk_group=parse_int(config, "topk_group"),
        normalise=parse_bool(config, "norm_topk_prob", default=True),
        routed_scaling_factor=parse_number(config, "routed_scaling_factor"),
    )


FAMILY = Family(
    title="GLM-4.6",
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    routing=SIGMOID,
    defaults={
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    read_shape=gqa_config.read_shape,
    parse_shape=_parse_shape,
    presets=(Preset(shape=_GLM_46, repositories={"glm-4.6": "zai-org/GLM-4.6"}, title="GLM-4.6"),),
    transformers_config="Glm4MoeConfig",
)
