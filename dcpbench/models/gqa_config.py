"""Convert the configuration of a model with grouped-query attention to its shape, and refuse what is not described. No torch.

Fields are named as in transformers' configurations of Llama, Qwen3 and GLM-4.
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
from dcpbench.models.rope_config import check_rope, parse_llama3_rope, parse_rope, parse_yarn
from dcpbench.models.shapes import Gqa, ModelShape

if TYPE_CHECKING:
    from dcpbench.models.family import Family

_FIXED: dict[str, tuple[object, ...]] = {  # fields that change the computation: described values; null: absent
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "swiglu_limit": (7.0, 7),
}
_READ = split_words(
    """
    model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    attention_bias use_qk_norm num_experts n_routed_experts num_local_experts num_experts_per_tok experts_per_token
    n_shared_experts moe_intermediate_size intermediate_size first_k_dense_replace vocab_size n_group topk_group
    norm_topk_prob routed_scaling_factor rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor
    max_position_embeddings tie_word_embeddings layer_types sliding_window max_window_layers initial_context_length
    """
)
FULL, SLIDING = "full_attention", "sliding_attention"


def read_shape(family: Family, config: dict[str, Any], name: str) -> ModelShape:
    """Convert the fields of a family, and check them. Raise KeyError or ValueError, naming the field."""
    config = {**family.defaults, **drop_ignored_fields(family, config)}
    check_fields(config, _READ | family.more_fields, _FIXED)
    shape = dataclasses.replace(family.parse_shape(config, name), tensors=family.tensors)
    shape = dataclasses.replace(shape, published=find_published_format(config, shape))
    _check_heads(shape)
    _check_layer_types(config, shape)
    if shape.experts:
        check_routing(shape)
    check_rope(shape)
    return shape


def parse_shape(config: dict[str, Any], name: str, gqa: Gqa, *, rotated: float = 1.0, **experts: Any) -> ModelShape:  # noqa: ANN401 -- fields of several types
    """Convert a checked configuration; `experts` are fields of the shape about experts, and `rotated` the part of a head with rope."""
    rope = parse_rope(config, mla=False)
    position = parse_int(config, "max_position_embeddings")
    layers = parse_int(config, "num_hidden_layers", maximum=MAX_LAYERS)
    heads, hidden = parse_int(config, "num_attention_heads"), parse_int(config, "hidden_size")
    head = parse_int(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    rotated_width = int(head * rotated)
    if not rotated_width:
        raise ValueError(f"a head has {head} numbers, of which rope rotates {rotated_width}")
    llama3 = parse_llama3_rope(rope)
    return make_shape(
        head=head,
        rotated=rotated_width,
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate_size=parse_int(config, "intermediate_size"),
        vocab=parse_int(config, "vocab_size", maximum=MAX_VOCAB),
        gqa=gqa,
        rms_eps=parse_number(config, "rms_norm_eps", 1e-6, minimum=0),
        rope_theta=parse_number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0),
        yarn=None if llama3 else parse_yarn(rope, position),
        llama3_rope=llama3,
        max_position=position,
        tie_word_embeddings=parse_bool(config, "tie_word_embeddings", default=False),
        mtp_layers=parse_mtp_layers(config),
        **({"first_k_dense_replace": layers} | experts),
    )


def make_shape(*, head: int = 128, rotated: int | None = None, **fields: Any) -> ModelShape:  # noqa: ANN401 -- as above
    """Return a shape of `fields` with heads of `head` numbers, of which rope rotates the first `rotated`, by default all."""
    rope = head if rotated is None else rotated
    return ModelShape(
        latent=0, qk_rope_head_dim=rope, qk_nope_head_dim=head - rope, v_head_dim=head, rope_interleaved=False, **fields
    )


def count_kv_heads(config: dict[str, Any]) -> int:
    """Return the number of KV heads, which is that of query heads if the field is missing."""
    field = "num_key_value_heads"
    return parse_int(config, field if config.get(field) is not None else "num_attention_heads")


def parse_rotated(config: dict[str, Any], default: float) -> float:
    """Return the part of a head that rope rotates."""
    rope = parse_rope(config, mla=False)
    field = "partial_rotary_factor"
    part = parse_number(rope if field in rope else config, field, default)
    if not 0 < part <= 1:
        raise ValueError(f"{field!r} is {part:g}; it lies between 0 and 1")
    return part


def _check_heads(shape: ModelShape) -> None:
    """Raise ValueError unless query heads divide evenly over KV heads."""
    assert shape.gqa is not None
    if shape.heads % shape.gqa.kv_heads:
        raise ValueError(
            f"'num_key_value_heads' is {shape.gqa.kv_heads}, which does not divide {shape.heads} attention heads"
        )


def _check_layer_types(config: dict[str, Any], shape: ModelShape) -> None:
    """Raise ValueError if `layer_types` is not a kind of attention for each layer, as the shape counts them."""
    assert shape.gqa is not None
    found = config.get("layer_types")
    if found is None:
        return
    windows = found.count(SLIDING) if isinstance(found, list) else -1
    if windows != shape.gqa.window_layers or len(found) != shape.layers or windows + found.count(FULL) != shape.layers:
        raise ValueError(
            f"'layer_types' is {format_value(found)}; here it must be {shape.layers - shape.gqa.window_layers} times "
            f"{FULL!r} and {shape.gqa.window_layers} times {SLIDING!r}"
        )
