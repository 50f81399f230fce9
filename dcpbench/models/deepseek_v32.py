"""DeepSeek-V3.2 (arXiv 2512.02556): V3 with an indexer that chooses the tokens to attend to. Planned, not run. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.models import deepseek_v3
from dcpbench.models.config_fields import parse_int
from dcpbench.models.family import Preset
from dcpbench.models.shapes import Indexer

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape

SHAPE = dataclasses.replace(
    deepseek_v3.SHAPE, name="deepseek-v3.2", indexer=Indexer(heads=64, width=128, top_k=2048, layers=61)
)


def parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    """Convert a configuration of V3.2 or of a model that has its indexer in every layer."""
    shape = deepseek_v3.parse_shape(config, name)
    indexer = Indexer(
        heads=parse_int(config, "index_n_heads"),
        width=parse_int(config, "index_head_dim"),
        top_k=parse_int(config, "index_topk"),
        layers=shape.layers,
    )
    return dataclasses.replace(shape, indexer=indexer)


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    title="DeepSeek-V3.2",
    model_type="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    parse_shape=parse_shape,
    presets=(Preset(shape=SHAPE, repositories={"deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2"}, title="DeepSeek-V3.2"),),
    more_fields=frozenset(("index_n_heads", "index_head_dim", "index_topk")),
)
