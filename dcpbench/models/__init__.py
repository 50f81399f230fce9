"""Models: a file per family, and the list of them. No torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.errors import ModelError
from dcpbench.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    kimi_k2,
    kimi_k25,
    llama,
    minimax_m2,
    qwen3,
    qwen3_moe,
)
from dcpbench.models.config_fields import check_architectures, format_value
from dcpbench.models.weight_formats import UnknownFormat

if TYPE_CHECKING:
    from dcpbench.models.family import Family
    from dcpbench.models.shapes import ModelShape

FAMILIES: tuple[Family, ...] = (
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    glm_moe_dsa.FAMILY,
    kimi_k2.FAMILY,
    kimi_k25.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    llama.FAMILY,
    glm4_moe.FAMILY,
    minimax_m2.FAMILY,
    gpt_oss.FAMILY,
)
_LINEAR = "linear attention, which keeps a state of fixed size for each request instead of KV rows"
_COMPRESSED = "attention over compressed KV rows and a sliding window, with hyper-connections between layers"
NOT_PLANNED = {  # values of `model_type` that cannot be planned, with the parts that are not described
    "deepseek_v4": _COMPRESSED,
    "kimi_k3": f"most layers have {_LINEAR} (Kimi Delta Attention)",
    "kimi_linear": f"most layers have {_LINEAR} (Kimi Delta Attention)",
    "minimax": f"most layers have {_LINEAR} (lightning attention)",
    "minimax_m1": f"most layers have {_LINEAR} (lightning attention)",
    "minimax_m3": "grouped-query attention over blocks of tokens that an indexer chooses",
    "minimax_m3_vl": "grouped-query attention over blocks of tokens that an indexer chooses",
    "qwen3_5": f"most layers have {_LINEAR} (Gated DeltaNet)",
    "qwen3_5_moe": f"most layers have {_LINEAR} (Gated DeltaNet)",
    "qwen3_next": f"most layers have {_LINEAR} (Gated DeltaNet)",
}

_PRESETS = [(family, preset) for family in FAMILIES for preset in family.presets]
SHAPES = {
    preset.shape.name: dataclasses.replace(preset.shape, tensors=family.tensors) for family, preset in _PRESETS
} | {deepseek_v3.TINY.name: deepseek_v3.TINY}
ALIASES = {  # further names of published models -> name of their shape
    name: preset.shape.name for _, preset in _PRESETS for name in preset.repositories if name not in SHAPES
}
REPOSITORIES = {  # Hugging Face repositories of models that the command line names
    name: repository for _, preset in _PRESETS for name, repository in preset.repositories.items()
}
OF_ALL = ("quantization_config",)  # fields that a config.json with a nested language model may have at the top instead
QUANT_FILE = "hf_quant_config.json"  # modelopt's quantisation, next to config.json, which it overrides
_TITLES = {preset.shape.name: preset.title for _, preset in _PRESETS if preset.title}


def get_title(model: str) -> str:
    """Return the name of a model as its maker writes it, if the family states it; else the name as given."""
    return _TITLES.get(model, model)


def find_family(config: dict[str, Any]) -> Family | None:
    """Return the family of a config.json by its `model_type`; None if there is none."""
    return next((family for family in FAMILIES if family.model_type == config.get("model_type")), None)


def get_text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model in a config.json: all fields, unless its family nests them.

    Raise KeyError or ValueError if the nested fields are missing or no object.
    """
    family = find_family(config)
    if family is None or family.nested_in is None:
        return config
    fields = config[family.nested_in]
    if not isinstance(fields, dict):
        raise ValueError(f"{family.nested_in!r} is {format_value(fields)}, not an object")  # noqa: TRY004 - input, not a bug
    around = {name: config[name] for name in OF_ALL if name in config}
    return around | fields


def get_published_precision(shape: ModelShape) -> str:
    """Return the name of the format in which weights are published, such as `fp8`; raise ModelError if its size is unknown."""
    if isinstance(shape.published, UnknownFormat):
        raise ModelError(
            f"the weights of {shape.name} are published in a format that dcpbench cannot size ({shape.published.name}); with "
            "--weights-dtype fp8 or bf16, the same layers are planned and measured in that precision instead."
        )
    return shape.published.name


def load_shape(model: str) -> ModelShape:
    """Load a published shape by name, or from a Hugging Face config.json or its folder."""
    name = ALIASES.get(model.lower(), model.lower())
    if name in SHAPES:
        return dataclasses.replace(SHAPES[name], name=model.lower())
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        known = path.is_file()
    except OSError:  # a name that no file can have
        known = False
    if not known:
        raise ModelError(
            f"--model {model}: neither a known model nor a folder with a config.json; "
            f"known models: {', '.join([*SHAPES, *ALIASES])}."
        )
    config = _read_json(path)
    described = path.with_name(QUANT_FILE)
    quantization = (
        _read_json(described).get("quantization") if path.name == "config.json" and described.is_file() else None
    )
    return from_config(config, path, quantization)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} is not readable as JSON: {e}.") from e
    except RecursionError as e:
        raise ModelError(f"{path} is nested too deeply for a model configuration.") from e
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not a model configuration.")
    return config


def from_config(config: dict[str, Any], path: Path, quantization: object = None) -> ModelShape:
    """Convert a Hugging Face configuration of one of the families to a ModelShape; `quantization` is that of QUANT_FILE.

    Raise ModelError, naming the field, if the model is of no known family, if a field is missing or is no usable number, or
    if a field requests a computation that is not described.
    """
    try:
        return _parse_config(config, path, quantization)
    except KeyError as e:
        raise ModelError(f"{path} lacks the field {e}; models of this family need it.") from e
    except ValueError as e:
        raise ModelError(f"{path}: {e}.") from e


def _parse_config(config: dict[str, Any], path: Path, quantization: object) -> ModelShape:
    family = find_family(config)
    kind = config["model_type"]
    if isinstance(kind, str) and kind in NOT_PLANNED:
        raise ModelError(
            f"{path}: models with 'model_type' {format_value(kind)} are neither planned nor run: {NOT_PLANNED[kind]}. "
            f"Give a configuration of {format_titles()}, or one of: {', '.join(SHAPES)}."
        )
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ModelError(
            f"{path}: 'model_type' is {format_value(kind)}, which may compute otherwise; {known} are "
            f"supported. Give a configuration of {format_titles()}, or one of: {', '.join(SHAPES)}."
        )
    fields = get_text_fields(config)
    if quantization:
        found = quantization
        if isinstance(quantization, dict):
            found = {"quant_method": "modelopt", **quantization, "ignore": quantization.get("exclude_modules")}
        fields = fields | {"quantization_config": found}
    check_architectures(fields, [name for family in FAMILIES for name in family.architectures])
    name = path.parent.name if path.name == "config.json" else path.stem
    return family.read_shape(family, fields, name)


def format_titles() -> str:
    """Return the titles of all families: `DeepSeek-V2, DeepSeek-V3/R1 or Kimi-K2`."""
    *first, last = (family.title for family in FAMILIES)
    return f"{', '.join(first)} or {last}"
