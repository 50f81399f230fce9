"""Read the `quantization_config` of a Hugging Face config.json: the format, and which linear layers have it. No torch.

Layers are listed by the names of their modules: compressed-tensors' `ignore` with regular expressions behind `re:`, modelopt's
`ignore` with wildcards, and transformers' `modules_to_not_convert`. All layers of a kind must have one format. modelopt's list is named
`exclude_modules` in hf_quant_config.json alone: in config.json engines read no list of that name, and quantise all layers.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from typing import TYPE_CHECKING, Any

from dcpbench.models.config_fields import format_value
from dcpbench.models.weight_formats import (
    DENSE,
    EXPERTS,
    FORMATS,
    FP8,
    INT4,
    MXFP4,
    NVFP4,
    Q_B,
    QKV,
    SCALE_BLOCK,
    SHARED,
    UNQUANTISED,
    O,
    UnknownFormat,
    WeightFormat,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.models.shapes import ModelShape

FP8_BLOCKS = {  # `quantization_config` of DeepSeek-V3
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
    "activation_scheme": "dynamic",
}
TORCH_E4M3 = "float8_e4m3fn"  # torch's name for e4m3, which some configurations have
_QUANTISER = {"fmt": "e4m3", "activation_scheme": "dynamic"}  # fields that transformers' fp8 quantiser omits
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers")  # fields that list the modules which are not quantised


def find_published_format(config: dict[str, Any], shape: ModelShape) -> WeightFormat | UnknownFormat:
    """Return the format of a model's published weights; UNQUANTISED without a `quantization_config`."""
    found = config.get("quantization_config")
    if not found:
        return UNQUANTISED
    if not isinstance(found, dict):
        return UnknownFormat(name=str(format_value(found)))
    one = _find_format(found)
    if one is None:
        return UnknownFormat(name=_describe_quantisation(found))
    return _limit_parts(one, found, shape) or UnknownFormat(
        name=f"{_describe_quantisation(found)}, in some layers alone"
    )


def get_quantisation(config: dict[str, Any]) -> dict[str, object]:
    """Return the fields of FP8_BLOCKS as a configuration has them; empty if nothing is quantised."""
    found = config.get("quantization_config")
    if not found:
        return {}
    if not isinstance(found, dict):
        return dict.fromkeys(FP8_BLOCKS, found)
    fields = {name: found.get(name, _QUANTISER.get(name)) for name in FP8_BLOCKS}
    return fields | ({"fmt": FP8_BLOCKS["fmt"]} if fields["fmt"] == TORCH_E4M3 else {})


def _find_format(found: dict[str, Any]) -> WeightFormat | None:
    """Return the format of quantised layers, with all parts; None for one of unknown size."""
    if get_quantisation({"quantization_config": found}) == FP8_BLOCKS:
        return FORMATS[FP8]
    method, algorithm = found.get("quant_method"), found.get("quant_algo")
    weights = _get_group_weights(found)
    if method == "mxfp4":
        return _hold_all(FORMATS[MXFP4])
    if method == "modelopt" and algorithm == "NVFP4":
        size = found.get("group_size", weights.get("group_size", 16))
        return _hold_all(FORMATS[NVFP4]) if size == FORMATS[NVFP4].columns else None
    kind = {name: weights.get(name) for name in ("num_bits", "type", "strategy", "group_size")}
    if method != "compressed-tensors" or kind["num_bits"] != FORMATS[INT4].bits:
        return None
    if (kind["type"], kind["strategy"], kind["group_size"]) == ("float", "tensor_group", 16):
        return _hold_all(FORMATS[NVFP4])
    if (kind["type"], kind["strategy"], kind["group_size"]) == ("float", "group", FORMATS[MXFP4].columns):
        return _hold_all(FORMATS[MXFP4])
    size, zero = kind["group_size"], 0 if weights.get("symmetric", True) else FORMATS[INT4].bits
    if kind["type"] != "int" or kind["strategy"] not in ("group", None) or type(size) is not int or size < 1:
        return None
    return dataclasses.replace(FORMATS[INT4], columns=size, scale_bits=FORMATS[INT4].scale_bits + zero)


def _hold_all(one: WeightFormat) -> WeightFormat:
    """Return a format with the parts of int4: a configuration lists those that it leaves out."""
    return dataclasses.replace(one, parts=FORMATS[INT4].parts)


def _get_group_weights(found: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of weights of a configuration with one group of layers; empty for others."""
    groups = found.get("config_groups")
    weights = _get_group(found).get("weights") if isinstance(groups, dict) and len(groups) == 1 else None
    return weights if isinstance(weights, dict) else {}


def _get_group(found: dict[str, Any]) -> dict[str, Any]:
    """Return the first group of layers of a configuration; empty without one."""
    groups = found.get("config_groups")
    one = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    return one if isinstance(one, dict) else {}


def _limit_parts(one: WeightFormat, found: dict[str, Any], shape: ModelShape) -> WeightFormat | None:
    """Return the format with the parts that the configuration does not leave out; None if layers of a part differ."""
    left_out = [name for field in _LISTS for name in _get_names(found.get(field))]
    targets = _get_names(_get_group(found).get("targets")) or ["Linear"]
    parts = set()
    for part, modules in _list_modules(shape).items():
        stored = {_is_listed(module, targets) and not _is_listed(module, left_out) for module in modules}
        if len(stored) > 1:
            return None
        parts |= {part} if True in stored else set()
    expert = _name_module(shape, shape.layers, shape.tensors.expert.format(0) + shape.tensors.gate)
    return dataclasses.replace(one, parts=frozenset(parts), mtp=not _is_listed(expert, left_out))


def _list_modules(shape: ModelShape) -> dict[str, list[str]]:
    """Return the names of modules of each part of a model, of one expert and one matrix of an MLP in every layer."""
    names, dense = shape.tensors, range(shape.first_k_dense_replace)
    every, moe = range(shape.layers), range(shape.first_k_dense_replace, shape.layers)
    first = names.q if shape.gqa or shape.q_lora is None else names.q_a
    found = {
        QKV: (every, first),
        O: (every, names.o),
        DENSE: (dense, names.dense + names.gate),
        EXPERTS: (moe, names.expert.format(0) + names.gate),
    }
    if shape.gqa is None and shape.q_lora is not None:
        found[Q_B] = (every, names.q_b)
    if shape.shared_experts:
        found[SHARED] = (moe, names.shared + names.gate)
    return {
        part: [_name_module(shape, i, tensor) for i in layers] for part, (layers, tensor) in found.items() if layers
    }


def _name_module(shape: ModelShape, layer: int, tensor: str) -> str:
    return (shape.tensors.layer.format(layer) + tensor).removesuffix(".weight")


def _get_names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _is_listed(module: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern names the module or one around it; `Linear` names all. Multimodal models may leave out a prefix."""
    plain = module.removeprefix("language_model.")
    return any(_matches(name, pattern) for name in {module, plain} for pattern in patterns)


def _matches(module: str, pattern: str) -> bool:
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as e:
            raise ValueError(f"{format_value(pattern)} of 'quantization_config' is no regular expression: {e}") from e
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")


def _describe_quantisation(found: dict[str, Any]) -> str:
    """Return a `quantization_config` in words: `compressed-tensors, 4 bits, groups of 32`."""
    weights = _get_group(found).get("weights")
    nested = {**found, **weights} if isinstance(weights, dict) else found
    words = [found.get("quant_method") or "quantised", found.get("quant_algo") or found.get("fmt")]
    bits, group = nested.get("num_bits") or nested.get("bits"), nested.get("group_size")
    words += [f"{bits} bits" if bits else None, f"groups of {group}" if group else None]
    block = found.get("weight_block_size")
    words += [f"blocks of {block}" if block else None, found.get("activation_scheme")]
    return ", ".join(str(word) for word in words if word)
