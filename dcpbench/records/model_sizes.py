"""Describe the sizes of a model that is given as a folder, and find the published model that has them. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import ModelError
from dcpbench.models import ALIASES, SHAPES, load_shape
from dcpbench.points.bounds import Count

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the sizes that tell published models apart, named as in ModelShape."""

    layers: Count
    hidden: Count
    heads: Count
    experts: Count
    top_k: Count
    moe_intermediate_size: Count
    intermediate_size: Count
    first_k_dense_replace: Count
    latent: Count
    vocab: Count
    kv_heads: Count = 0  # 0 without grouped-query attention
    indexer_heads: Count = 0  # 0 without sparse attention

    @classmethod
    def from_shape(cls, shape: ModelShape) -> ModelSizes:
        """Return the sizes of a model."""
        own = {name: getattr(shape, name) for name in cls.__struct_fields__ if hasattr(shape, name)}
        kv_heads, indexer_heads = shape.gqa.kv_heads if shape.gqa else 0, shape.indexer.heads if shape.indexer else 0
        return cls(**own, kv_heads=kv_heads, indexer_heads=indexer_heads)


@dataclasses.dataclass(frozen=True)
class ShortenedModel:
    """Describe a published model of which only the first layers are kept."""

    name: str  # name of the published model, such as `deepseek-v3`
    layers: int
    all_layers: int


def is_published_name(model: str) -> bool:
    """Return True if `--model` names a published model instead of a folder."""
    return model.lower() in SHAPES or model.lower() in ALIASES


def read_model_sizes(model: str) -> ModelSizes | msgspec.UnsetType:
    """Return the sizes in a model folder's config.json.

    They are unset for a published name, and for a folder that this machine does not have or of no known family.
    """
    if is_published_name(model):
        return msgspec.UNSET
    try:
        return ModelSizes.from_shape(load_shape(model))
    except ModelError:
        return msgspec.UNSET


def shorten_shape(shape: ModelShape, layers: int) -> ModelShape:
    """Return the shape with only its first `layers` layers."""
    return dataclasses.replace(shape, layers=layers, first_k_dense_replace=min(shape.first_k_dense_replace, layers))


def find_shortened_model(sizes: ModelSizes) -> ShortenedModel | None:
    """Return the published model that differs from these sizes only in having more layers; None if there is none."""
    for name, shape in SHAPES.items():
        if sizes.layers < shape.layers and ModelSizes.from_shape(shorten_shape(shape, sizes.layers)) == sizes:
            return ShortenedModel(name, sizes.layers, shape.layers)
    return None
