"""Convert the configuration of an MLA + MoE model to its shape, and refuse what the engine does not compute. No torch.

Fields are named as in transformers' configurations of DeepSeek-V2 and V3.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.models.config_fields import format_value, parse_bool, parse_int, parse_number, parse_positive
from dcpbench.models.shapes import BF16, FP8, SCALE_BLOCK, SIGMOID, ModelShape, Yarn

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _split_words(
    """
    model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads q_lora_rank
    kv_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim head_dim n_routed_experts num_experts
    num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size intermediate_size
    first_k_dense_replace vocab_size scoring_func topk_method n_group topk_group norm_topk_prob
    routed_scaling_factor rms_norm_eps rope_theta rope_scaling rope_parameters rope_interleave
    max_position_embeddings tie_word_embeddings layer_types mlp_layer_types
    """
) | frozenset(_FIXED)
_OF_TRAINING = _split_words(
    """
    attention_dropout aux_loss_alpha gradient_checkpointing initializer_range num_mtp_layers
    num_nextn_predict_layers output_router_logits router_aux_loss_coef seq_aux
    """
)
"""Fields about training, and about additional layers that predict further tokens."""
_OF_STORAGE = _split_words(
    """
    auto_map compression_config dtype ep_size pretraining_tp quantization_config torch_dtype
    transformers_version use_cache attn_implementation experts_implementation
    """
)
"""Fields about how weights are stored, and how some engine runs them."""
_OF_SAMPLERS = _split_words(
    """
    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length model_max_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pad_token_id prefix
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature
    tokenizer_class top_k top_p typical_p unk_token_id
    """
)
"""Fields for a tokenizer or a sampler."""
_OF_TRANSFORMERS = _split_words(
    """
    chunk_size_feed_forward cross_attention_hidden_size finetuning_task id2label is_decoder label2id num_labels
    output_attentions output_hidden_states problem_type pruned_heads return_dict task_specific_params
    tf_legacy_loss torchscript use_bfloat16 unsloth_fixed unsloth_version
    """
)
"""Fields that transformers writes for every model."""
_HARMLESS = _OF_TRAINING | _OF_STORAGE | _OF_SAMPLERS | _OF_TRANSFORMERS
"""Fields that have no effect here, whatever their value, like those that begin with `_`."""
_ROPE = _split_words(
    """
    type rope_type rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    attention_factor truncate partial_rotary_factor
    """
)
_UNSET: tuple[object, ...] = (None, False, 0, "", [], {})
MAX_LAYERS = 10_000
MAX_VOCAB = 1 << 24
"""Maximum size of a vocabulary: the greedy choice over ranks carries token ids in fp32, which has
no odd numbers above.
"""
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
    _check_fields(config)
    shape = dataclasses.replace(family.parse_shape(config, name), tensors=family.tensors)
    _check_sizes(config, shape)
    _check_routing(shape)
    _check_rope(shape)
    return shape


def check_architectures(config: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError if `architectures` has another value than those of the known families."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or any(name not in known for name in architectures):
        raise ValueError(f"'architectures' is {format_value(architectures)}; {', '.join(known)} are supported")


def parse_shape(
    config: dict[str, Any], name: str, *, grouped: bool, normalise: bool, rope_interleaved: bool
) -> ModelShape:
    """Convert a checked configuration, in which the routing rule and the order of rope are the family's."""
    rope = _parse_rope(config)
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
        yarn=_parse_yarn(rope, position),
        max_position=position,
        tied=parse_bool(config, "tie_word_embeddings", default=False),
        published=_parse_published_precision(config),
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


def _check_fields(config: dict[str, Any]) -> None:
    """Raise ValueError for fields that request, or may request, a computation that the engine does not have."""
    for field, values in _FIXED.items():
        value = config.get(field)
        if value is not None and not any(type(value) is type(known) and value == known for known in values):
            raise ValueError(f"{field!r} is {format_value(value)}; only {values[0]!r} is supported")
    for field, value in config.items():
        if field in _READ or field in _HARMLESS or field.startswith("_") or value in _UNSET:
            continue
        raise ValueError(
            f"{format_value(field)} is {format_value(value)}, and dcpbench does not know what that changes; if it changes nothing "
            "that is computed, take it out of a copy of this file and give the copy"
        )


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


def _check_routing(shape: ModelShape) -> None:
    """Raise ValueError unless a token can be routed to `top_k` experts within the groups it may choose."""
    if shape.experts % shape.groups:
        raise ValueError(f"'n_group' is {shape.groups}, which does not divide {shape.experts} experts")
    if shape.routing == SIGMOID and shape.experts // shape.groups == 1:
        raise ValueError(
            f"'n_group' is {shape.groups} for {shape.experts} experts, one in each; a group is scored by its best two"
        )
    if shape.top_groups > shape.groups:
        raise ValueError(f"'topk_group' is {shape.top_groups} of {shape.groups} groups")
    reachable = shape.experts // shape.groups * shape.top_groups
    if shape.top_k > reachable:
        raise ValueError(f"'num_experts_per_tok' is {shape.top_k}, but a token can reach {reachable} experts")


def _check_rope(shape: ModelShape) -> None:
    """Raise ValueError for rope settings that no table can be made of."""
    if shape.rope % 2:
        raise ValueError(f"'qk_rope_head_dim' is {shape.rope}, which is odd; rope rotates pairs")
    if shape.rope_theta <= 1:
        raise ValueError(f"'rope_theta' is {shape.rope_theta:g}; frequencies fall only where it is above 1")


def _parse_rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the rope settings are {format_value(rope)}, not an object")  # noqa: TRY004 - input, not a bug
    for field, value in rope.items():
        if field not in _ROPE and value is not None:
            raise ValueError(
                f"the rope setting {format_value(field)} is {format_value(value)}; it is none of YaRN as DeepSeek has it"
            )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"'partial_rotary_factor' is {format_value(rope['partial_rotary_factor'])}; only 1 is supported"
        )
    return rope


def _parse_yarn(rope: dict[str, Any], max_position: int) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope scaling {format_value(kind)} is not supported, only 'yarn'")
    factor = rope.get("attention_factor")
    return Yarn(
        factor=parse_positive(rope, "factor"),
        original_max_position=parse_int(rope, "original_max_position_embeddings", max_position),
        beta_fast=parse_positive(_drop_unset(rope, "beta_fast"), "beta_fast", 32.0),
        beta_slow=parse_positive(_drop_unset(rope, "beta_slow"), "beta_slow", 1.0),
        mscale=parse_number(_drop_unset(rope, "mscale"), "mscale", 0.0, minimum=0),
        mscale_all_dim=parse_number(_drop_unset(rope, "mscale_all_dim"), "mscale_all_dim", 0.0, minimum=0),
        attention_factor=None if factor is None else parse_number(rope, "attention_factor"),
        truncate=parse_bool(rope, "truncate", default=True),
    )


def _drop_unset(rope: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the settings without a field that is null or 0: transformers replaces either by the default."""
    return rope if rope.get(field) else {}


def _parse_published_precision(config: dict[str, Any]) -> str:
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
