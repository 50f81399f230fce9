"""Recognition of model folders with fewer layers of a published model."""

from __future__ import annotations

import dataclasses

import pytest

from dcpbench.models import SHAPES, load_shape
from dcpbench.records.model_sizes import ModelSizes, ShortenedModel, find_shortened_model, shorten_shape


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.layers > 4])
def test_model_with_fewer_layers_is_recognised(name: str) -> None:
    shape = load_shape(name)
    found = find_shortened_model(ModelSizes.from_shape(shorten_shape(shape, 4)))
    assert found == ShortenedModel(name, 4, shape.layers)


def test_model_with_other_kv_heads_is_not_recognised() -> None:
    shape = shorten_shape(load_shape("qwen3-30b-a3b"), 16)
    assert shape.gqa is not None
    other = dataclasses.replace(shape, gqa=dataclasses.replace(shape.gqa, kv_heads=1))
    assert find_shortened_model(ModelSizes.from_shape(other)) is None
