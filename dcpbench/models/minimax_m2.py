"""MiniMax-M2 to M2.7: sigmoid routing and grouped-query attention that normalises all heads together. Planned, not run. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcpbench.models import gqa_config
from dcpbench.models.config_fields import format_value, parse_bool, parse_int, split_words
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import SIGMOID, Gqa, ModelShape
from dcpbench.models.tensor_names import TensorNames
from dcpbench.models.weight_formats import EXPERTS, FORMATS, FP8, QKV, O

_M2 = gqa_config.make_shape(
    name="minimax-m2",
    hidden=3072,
    layers=62,
    heads=48,
    experts=256,
    top_k=8,
    moe_intermediate_size=1536,
    intermediate_size=1536,
    first_k_dense_replace=0,
    vocab=200064,
    routing=SIGMOID,
    gqa=Gqa(kv_heads=8, qk_norm=True, qk_norm_over_heads=True),
    rotated=64,
    rope_theta=5_000_000.0,
    max_position=196608,
    published=dataclasses.replace(FORMATS[FP8], parts=frozenset((QKV, O, EXPERTS))),
)


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    kind = config.get("qk_norm_type", "per_layer")
    if kind != "per_layer":
        raise ValueError(f"'qk_norm_type' is {format_value(kind)}; minimax_m2 has 'per_layer'")
    norm = parse_bool(config, "use_qk_norm", default=True)
    head = parse_int(config, "head_dim")
    return gqa_config.parse_shape(
        config,
        name,
        Gqa(kv_heads=gqa_config.count_kv_heads(config), qk_norm=norm, qk_norm_over_heads=norm),
        rotated=parse_int(config, "rotary_dim", head, maximum=head) / head,
        first_k_dense_replace=0,
        experts=parse_int(config, "num_local_experts"),
        top_k=parse_int(config, "num_experts_per_tok"),
        moe_intermediate_size=parse_int(config, "intermediate_size"),
        routing=SIGMOID,
    )


FAMILY = Family(
    title="MiniMax-M2",
    model_type="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    routing=SIGMOID,
    defaults={"head_dim": 128},
    read_shape=gqa_config.read_shape,
    parse_shape=_parse_shape,
    presets=(Preset(shape=_M2, repositories={"minimax-m2": "MiniMaxAI/MiniMax-M2"}, title="MiniMax-M2"),),
    tensors=TensorNames(
        router="block_sparse_moe.gate.weight",
        routing_bias="block_sparse_moe.e_score_correction_bias",
        expert="block_sparse_moe.experts.{}.",
        gate="w1.weight",
        up="w3.weight",
        down="w2.weight",
    ),
    transformers_config="MiniMaxM2Config",
    more_fields=split_words(
        """
        qk_norm_type rotary_dim use_mtp num_mtp_modules mtp_transformer_layers use_routing_bias scoring_func
        attn_type_list layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
        router_jitter_noise shared_intermediate_size
        """
    ),
)
