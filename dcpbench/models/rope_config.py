"""Read the rope settings of a Hugging Face config.json. Errors are ValueErrors that name the field. No torch."""

from __future__ import annotations

from typing import Any

from dcpbench.models.config_fields import format_value, parse_bool, parse_int, parse_number, parse_positive, split_words
from dcpbench.models.shapes import Llama3Rope, ModelShape, Yarn

_ROPE = split_words(
    """
    type rope_type rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    attention_factor truncate partial_rotary_factor
    """
)
_LLAMA3 = split_words("low_freq_factor high_freq_factor")
LLAMA3 = "llama3"


def check_rope(shape: ModelShape) -> None:
    """Raise ValueError for rope settings that no table can be made of."""
    if shape.qk_rope_head_dim % 2:
        raise ValueError(f"'qk_rope_head_dim' is {shape.qk_rope_head_dim}, which is odd; rope rotates pairs")
    if shape.rope_theta <= 1:
        raise ValueError(f"'rope_theta' is {shape.rope_theta:g}; frequencies fall only where it is above 1")


def parse_rope(config: dict[str, Any], *, mla: bool = True) -> dict[str, Any]:
    """Return the rope settings of a configuration; without `mla`, Llama 3.1's are known and a part of a head may be rotated."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the rope settings are {format_value(rope)}, not an object")  # noqa: TRY004 - input, not a bug
    for field, value in rope.items():
        if (
            field not in _ROPE
            and value is not None
            and not (field in _LLAMA3 and not mla and _get_kind(rope) == LLAMA3)
        ):
            raise ValueError(
                f"the rope setting {format_value(field)} is {format_value(value)}; it is none of YaRN as DeepSeek has it"
            )
    if mla and rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"'partial_rotary_factor' is {format_value(rope['partial_rotary_factor'])}; only 1 is supported"
        )
    return rope


def parse_yarn(rope: dict[str, Any], max_position: int) -> Yarn | None:
    """Return the parameters of YaRN; None if rope is not scaled. Raise ValueError for other scaling."""
    kind = _get_kind(rope)
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(
            f"rope scaling {format_value(kind)} is not supported, only 'yarn' and, with grouped-query attention, {LLAMA3!r}"
        )
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


def parse_llama3_rope(rope: dict[str, Any]) -> Llama3Rope | None:
    """Return the parameters of Llama 3.1's scaling; None for another kind."""
    if _get_kind(rope) != LLAMA3:
        return None
    return Llama3Rope(
        factor=parse_positive(rope, "factor"),
        low_freq_factor=parse_positive(rope, "low_freq_factor"),
        high_freq_factor=parse_positive(rope, "high_freq_factor"),
        original_max_position=parse_int(rope, "original_max_position_embeddings"),
    )


def _get_kind(rope: dict[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _drop_unset(rope: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the settings without a field that is null or 0: transformers replaces either by the default."""
    return rope if rope.get(field) else {}
