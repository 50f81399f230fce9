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
    format_value,
    parse_bool,
    parse_int,
    parse_number,
    split_words,
)
from dcpbench.models.rope_config import check_rope, parse_rope, parse_yarn
from dcpbench.models.shapes import BF16, FP8, SCALE_BLOCK, ModelShape

if TYPE_CHECKING:
    from dcpbench.models.family import Family

_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1, 1.0),
    "use_mla": (True,),
}
"""Fields that change the computation, each with the only values that the engine supports; null counts as absent."""


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
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
    "activation_scheme": "dynamic",
}
"""`quantization_config` of DeepSeek-V3."""
_QUANTISER = {"fmt": "e4m3", "activation_scheme": "dynamic"}
"""Defaults of transformers' fp8 quantiser for fields that it does not write."""


def read_shape(family: Family, config: dict[str, Any], name: str) -> ModelShape:
    """Convert the fields of a family's language model, and check them. Raise KeyError or ValueError, naming the field."""
    config = _apply_defaults(family, config)
    check_fields(config, _READ, _FIXED)
    shape = dataclasses.replace(family.parse_shape(config, name), tensors=family.tensors)
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
        moe_inter=parse_int(config, "moe_intermediate_size"),
        dense_inter=parse_int(config, "intermediate_size"),
        first_dense=min(parse_int(config, "first_k_dense_replace", minimum=0), layers),
        vocab=parse_int(config, "vocab_size", maximum=MAX_VOCAB),
        routing=config["scoring_func"],
        groups=parse_int(config, "n_group") if grouped else 1,
        top_groups=parse_int(config, "topk_group") if grouped else 1,
        normalise=normalise,
        routed_scale=parse_number(config, "routed_scaling_factor"),
        latent=parse_int(config, "kv_lora_rank"),
        rope=parse_int(config, "qk_rope_head_dim"),
        nope=parse_int(config, "qk_nope_head_dim"),
        value=parse_int(config, "v_head_dim"),
        rms_eps=parse_number(config, "rms_norm_eps", 1e-6, minimum=0),
        rope_theta=parse_number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0),
        rope_interleaved=rope_interleaved,
        yarn=parse_yarn(rope, position),
        max_position=position,
        tied=parse_bool(config, "tie_word_embeddings", default=False),
        published=parse_published_precision(config),
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
    mlps = ["dense"] * shape.first_dense + ["sparse"] * (shape.layers - shape.first_dense)
    repeated: dict[str, tuple[object, str]] = {
        "num_key_value_heads": (shape.heads, "'num_attention_heads'"),
        "head_dim": (shape.rope, "'qk_rope_head_dim'"),
        "qk_head_dim": (shape.nope + shape.rope, "'qk_nope_head_dim' + 'qk_rope_head_dim'"),
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


def parse_published_precision(config: dict[str, Any]) -> str:
    """Return `bf16` without a `quantization_config`, `fp8` if it equals DeepSeek-V3's, else a description of the format."""
    found = get_quantisation(config)
    if not found:
        return BF16
    return FP8 if found == FP8_BLOCKS else _describe_quantisation(config["quantization_config"])


def _describe_quantisation(found: object) -> str:
    """Return a `quantization_config` in words: `compressed-tensors, 4 bits, groups of 32`."""
    if not isinstance(found, dict):
        return str(format_value(found))
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    nested = {**found, **weights} if isinstance(weights, dict) else found
    words = [found.get("quant_method") or "quantised", found.get("quant_algo") or found.get("fmt")]
    bits, group = nested.get("num_bits") or nested.get("bits"), nested.get("group_size")
    words += [f"{bits} bits" if bits else None, f"groups of {group}" if group else None]
    block = found.get("weight_block_size")
    words += [f"blocks of {block}" if block else None, found.get("activation_scheme")]
    return ", ".join(str(word) for word in words if word)


def get_quantisation(config: dict[str, Any]) -> dict[str, object]:
    """Return the fields of FP8_BLOCKS as a configuration has them; empty if nothing is quantised."""
    found = config.get("quantization_config")
    if not found:
        return {}
    if not isinstance(found, dict):
        return dict.fromkeys(FP8_BLOCKS, found)
    return {name: found.get(name, _QUANTISER.get(name)) for name in FP8_BLOCKS}
