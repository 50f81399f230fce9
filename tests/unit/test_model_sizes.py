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
    same = [n for n in SHAPES if ModelSizes.from_shape(load_shape(n)) == ModelSizes.from_shape(shape)]
    assert found == ShortenedModel(same[0], 4, shape.layers)
    assert same == [name] or {name, *same} == {"kimi-k2", "kimi-k2-0905"}, "these differ in positions alone"


def test_model_with_other_kv_heads_is_not_recognised() -> None:
    shape = shorten_shape(load_shape("qwen3-30b-a3b"), 16)
    assert shape.gqa is not None
    other = dataclasses.replace(shape, gqa=dataclasses.replace(shape.gqa, kv_heads=1))
    assert find_shortened_model(ModelSizes.from_shape(other)) is None
