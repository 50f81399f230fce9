"""Define Family: the published models of a family, and how their files are read. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.models.shapes import SOFTMAX
from dcpbench.models.tensor_names import DEEPSEEK_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcpbench.models.shapes import ModelShape
    from dcpbench.models.tensor_names import TensorNames


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Hold a published model."""

    shape: ModelShape
    repositories: Mapping[str, str]  # Hugging Face repositories by command-line name, the shape's first
    title: str | None = None  # name in reports; None: the name of the shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Hold the published models of a family, and how its config.json and checkpoints are read."""

    title: str  # name of the family in messages, such as `DeepSeek-V2`
    model_type: str  # `model_type` of config.json
    architectures: tuple[str, ...]  # values of `architectures` in config.json
    routing: str = SOFTMAX  # SIGMOID or SOFTMAX, which is also `scoring_func` in config.json of an MLA model
    topk_methods: tuple[str | None, ...] = ()  # values of `topk_method` of an MLA model
    defaults: Mapping[str, Any]  # fields that a config.json may leave out, as transformers 5 takes them
    read_shape: Callable[[Family, dict[str, Any], str], ModelShape]  # check and convert: mla_config's or gqa_config's
    parse_shape: Callable[[dict[str, Any], str], ModelShape]  # convert checked fields and a name; ValueError, KeyError
    presets: tuple[Preset, ...]
    tensors: TensorNames = DEEPSEEK_NAMES
    transformers_config: str  # class of transformers for the configuration, of the model to compare with
    more_fields: frozenset[str] = frozenset()  # fields that `parse_shape` reads besides its attention kind's
    ignored_fields: frozenset[str] = frozenset()  # fields with another meaning in this family and no effect
    nested_in: str | None = None  # field of config.json with the language model's fields; None: they are at the top
