"""Read and check fields of a Hugging Face config.json. Errors are ValueErrors that name the field. No torch."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from dcpbench.models.shapes import SIGMOID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.models.family import Family
    from dcpbench.models.shapes import ModelShape

MAX_INT = (1 << 31) - 1  # maximum of integers: some kernels count sizes of tensors in 32 bits
FP32_RANGE = (1e-38, 1e38)  # sizes of numbers that fp32 holds with all its digits


def parse_int(
    config: dict[str, Any], field: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INT
) -> int:
    """Return a field that must be an integer within limits; raise KeyError if it is missing and has no default."""
    value = config[field] if default is None else config.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(
            f"{field!r} is {format_value(value)}, which is not a {'positive' if minimum else 'non-negative'} integer"
        )
    if value > maximum:
        raise ValueError(f"{field!r} is {format_value(value)}; it can be up to {maximum:,}")
    return value


def parse_number(
    config: dict[str, Any], field: str, default: float | None = None, *, minimum: float | None = None
) -> float:
    """Return a field that must be a number in the range of fp32; raise KeyError if it is missing and has no default."""
    value = config[field] if default is None else config.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{field!r} is {format_value(value)}, which is not a number")  # noqa: TRY004 - input, not a bug
    if value != 0 and not FP32_RANGE[0] <= abs(value) <= FP32_RANGE[1]:
        raise ValueError(f"{field!r} is {format_value(value)}, which fp32 cannot hold")
    if minimum is not None and value < minimum:
        raise ValueError(f"{field!r} is {format_value(value)}, which is below {minimum:g}")
    return float(value)


def parse_positive(config: dict[str, Any], field: str, default: float | None = None) -> float:
    """Return a field that must be a number above 0, as `parse_number` does."""
    value = parse_number(config, field, default)
    if value <= 0:
        raise ValueError(f"{field!r} is {value:g}, which is not a positive number")
    return value


def parse_bool(config: dict[str, Any], field: str, *, default: bool) -> bool:
    """Return a field that must be true or false, or the default if it is missing."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ValueError(f"{field!r} is {format_value(value)}, which is neither true nor false")  # noqa: TRY004 - input
    return value


def parse_mtp_layers(config: dict[str, Any]) -> int:
    """Return the number of layers for multi-token prediction; a model without them may have null."""
    field = "num_nextn_predict_layers"
    return parse_int(config, field, minimum=0, maximum=MAX_LAYERS) if config.get(field) is not None else 0


def format_value(value: object) -> str:
    """Format a value of a file for a sentence; long ones are shortened in the middle."""
    return reprlib.repr(value)


def split_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_OF_TRAINING = split_words(  # fields about training, and about additional layers that predict further tokens
    """
    attention_dropout aux_loss_alpha gradient_checkpointing initializer_range num_mtp_layers
    num_nextn_predict_layers output_router_logits router_aux_loss_coef seq_aux
    """
)
_OF_STORAGE = split_words(  # fields about how weights are stored, and how some engine runs them
    """
    auto_map compression_config dtype ep_size pretraining_tp quantization_config torch_dtype
    transformers_version use_cache attn_implementation experts_implementation
    """
)
_OF_SAMPLERS = split_words(  # fields for a tokenizer or a sampler
    """
    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length model_max_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pad_token_id prefix
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature
    tokenizer_class top_k top_p typical_p unk_token_id
    """
)
_OF_TRANSFORMERS = split_words(  # fields that transformers writes for every model
    """
    chunk_size_feed_forward cross_attention_hidden_size finetuning_task id2label is_decoder label2id num_labels
    output_attentions output_hidden_states problem_type pruned_heads return_dict task_specific_params
    tf_legacy_loss torchscript use_bfloat16 unsloth_fixed unsloth_version
    """
)
HARMLESS = _OF_TRAINING | _OF_STORAGE | _OF_SAMPLERS | _OF_TRANSFORMERS  # no effect here, whatever their value
_UNSET: tuple[object, ...] = (None, False, 0, "", [], {})
MAX_LAYERS = 10_000
MAX_VOCAB = 1 << 24  # maximum vocabulary: greedy choices carry token ids in fp32, which is exact up to it


def check_fields(config: dict[str, Any], read: Iterable[str], fixed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ValueError for fields that request, or may request, a computation that the engine does not have.

    `read` are the fields that are converted, and `fixed` the only values that other fields can have, null counting as absent.
    """
    for field, values in fixed.items():
        value = config.get(field)
        if value is not None and not any(type(value) is type(known) and value == known for known in values):
            raise ValueError(f"{field!r} is {format_value(value)}; only {values[0]!r} is supported")
    for field, value in config.items():
        if field in read or field in fixed or field in HARMLESS or field.startswith("_") or value in _UNSET:
            continue
        raise ValueError(
            f"{format_value(field)} is {format_value(value)}, and dcpbench does not know what that changes; if it changes nothing "
            "that is computed, take it out of a copy of this file and give the copy"
        )


def drop_ignored_fields(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the fields that have no effect in its family."""
    return {name: value for name, value in config.items() if name not in family.ignored_fields}


def check_architectures(config: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError if `architectures` has another value than those of the known families."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or any(name not in known for name in architectures):
        raise ValueError(f"'architectures' is {format_value(architectures)}; {', '.join(known)} are supported")


def check_routing(shape: ModelShape) -> None:
    """Raise ValueError unless a token can be routed to `top_k` experts within the groups it may choose."""
    if shape.experts % shape.n_group:
        raise ValueError(f"'n_group' is {shape.n_group}, which does not divide {shape.experts} experts")
    if shape.routing == SIGMOID and shape.experts // shape.n_group == 1:
        raise ValueError(
            f"'n_group' is {shape.n_group} for {shape.experts} experts, one in each; a group is scored by its best two"
        )
    if shape.topk_group > shape.n_group:
        raise ValueError(f"'topk_group' is {shape.topk_group} of {shape.n_group} groups")
    reachable = shape.experts // shape.n_group * shape.topk_group
    if shape.top_k > reachable:
        raise ValueError(f"'num_experts_per_tok' is {shape.top_k}, but a token can reach {reachable} experts")
