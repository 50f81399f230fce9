"""Convert the configuration of an MLA + MoE model to its shape, and refuse what the engine does not compute. No torch.

Fields are named as in transformers' configurations of DeepSeek-V2 and V3.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.models.config_fields import (
    MAX_LAYERS,
    MAX_VOCAB,
    check_fields,
    check_routing,
    drop_ignored_fields,
    format_value,
    parse_bool,
    parse_int,
    parse_mtp_layers,
    parse_number,
    split_words,
)
from dcpbench.models.quantization_config import find_published_format
from dcpbench.models.rope_config import check_rope, parse_rope, parse_yarn
from dcpbench.models.shapes import ModelShape

if TYPE_CHECKING:
    from dcpbench.models.family import Family

_FIXED: dict[str, tuple[object, ...]] = {  # fields that change the computation: supported values; null: absent
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1, 1.0),
    "use_mla": (True,),
}


_READ = split_words(
    """
    model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads q_lora_rank
    kv_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim head_dim n_routed_experts num_experts
    num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size intermediate_size
    first_k_dense_replace vocab_size scoring_func topk_method n_group topk_group norm_topk_prob
    routed_scaling_factor rms_norm_eps rope_theta rope_scaling rope_parameters rope_interleave
    max_position_embeddings tie_word_embeddings layer_types mlp_layer_types
    """
) | frozenset(_FIXED)


def read_shape(family: Family, config: dict[str, Any], name: str) -> ModelShape:
    """Convert the fields of a family's language model, and check them. Raise KeyError or ValueError, naming the field."""
    config = _apply_defaults(family, drop_ignored_fields(family, config))
    check_fields(config, _READ | family.more_fields, _FIXED)
    shape = dataclasses.replace(family.parse_shape(config, name), tensors=family.tensors)
    shape = dataclasses.replace(shape, published=find_published_format(config, shape))
    _check_sizes(config, shape)
    check_routing(shape)
    check_rope(shape)
    return shape


def parse_shape(
    config: dict[str, Any], name: str, *, grouped: bool, normalise: bool, rope_interleaved: bool
) -> ModelShape:
    """Convert a checked configuration, in which the routing rule and the order of rope are the family's."""
    rope = parse_rope(config)
    layers = parse_int(config, "num_hidden_layers", maximum=MAX_LAYERS)
    position = parse_int(config, "max_position_embeddings")
    return ModelShape(
        name=name,
        hidden=parse_int(config, "hidden_size"),
        layers=layers,
        heads=parse_int(config, "num_attention_heads"),
        q_lora=None if config["q_lora_rank"] is None else parse_int(config, "q_lora_rank"),
        experts=parse_int(config, "n_routed_experts"),
        top_k=parse_int(config, "num_experts_per_tok"),
        shared_experts=0 if config["n_shared_experts"] is None else parse_int(config, "n_shared_experts", minimum=0),
        moe_intermediate_size=parse_int(config, "moe_intermediate_size"),
        intermediate_size=parse_int(config, "intermediate_size"),
        first_k_dense_replace=min(parse_int(config, "first_k_dense_replace", minimum=0), layers),
        vocab=parse_int(config, "vocab_size", maximum=MAX_VOCAB),
        routing=config["scoring_func"],
        n_group=parse_int(config, "n_group") if grouped else 1,
        topk_group=parse_int(config, "topk_group") if grouped else 1,
        normalise=normalise,
        routed_scaling_factor=parse_number(config, "routed_scaling_factor"),
        latent=parse_int(config, "kv_lora_rank"),
        qk_rope_head_dim=parse_int(config, "qk_rope_head_dim"),
        qk_nope_head_dim=parse_int(config, "qk_nope_head_dim"),
        v_head_dim=parse_int(config, "v_head_dim"),
        rms_eps=parse_number(config, "rms_norm_eps", 1e-6, minimum=0),
        rope_theta=parse_number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0),
        rope_interleaved=rope_interleaved,
        yarn=parse_yarn(rope, position),
        max_position=position,
        tie_word_embeddings=parse_bool(config, "tie_word_embeddings", default=False),
        mtp_layers=parse_mtp_layers(config),
    )


def _apply_defaults(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with its family's defaults for the fields that it leaves out."""
    found = {**family.defaults, **config}
    found["scoring_func"] = found.get("scoring_func") or family.routing
    if found["scoring_func"] != family.routing:
        raise ValueError(
            f"'scoring_func' is {format_value(found['scoring_func'])}; {family.model_type} has {family.routing!r}"
        )
    if found["topk_method"] not in family.topk_methods:
        known = " or ".join(repr(known) for known in family.topk_methods if known)
        raise ValueError(f"'topk_method' is {format_value(found['topk_method'])}; {family.model_type} has {known}")
    return found


def _check_sizes(config: dict[str, Any], shape: ModelShape) -> None:
    """Raise ValueError if a field that repeats other ones contradicts them."""
    mlps = ["dense"] * shape.first_k_dense_replace + ["sparse"] * (shape.layers - shape.first_k_dense_replace)
    repeated: dict[str, tuple[object, str]] = {
        "num_key_value_heads": (shape.heads, "'num_attention_heads'"),
        "head_dim": (shape.qk_rope_head_dim, "'qk_rope_head_dim'"),
        "qk_head_dim": (shape.qk_nope_head_dim + shape.qk_rope_head_dim, "'qk_nope_head_dim' + 'qk_rope_head_dim'"),
        "num_experts": (shape.experts, "'n_routed_experts'"),
        "num_local_experts": (shape.experts, "'n_routed_experts'"),
        "layer_types": (["full_attention"] * shape.layers, "'num_hidden_layers' times 'full_attention'"),
        "mlp_layer_types": (mlps, "'first_k_dense_replace' times 'dense' and then 'sparse'"),
    }
    for field, (value, source) in repeated.items():
        if config.get(field) is not None and config[field] != value:
            raise ValueError(
                f"{field!r} is {format_value(config[field])}; here it must be {source}, {format_value(value)}"
            )
