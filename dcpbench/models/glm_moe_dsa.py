"""GLM-5 to 5.3: DeepSeek-V3.2's sparse attention in other sizes; layers may share an indexer. Planned, not run. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.models import deepseek_v32
from dcpbench.models.config_fields import format_value, parse_int, split_words

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape

FULL, SHARED = "full", "shared"  # `indexer_types`: a layer with an indexer; one with an earlier layer's choice


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    shape = deepseek_v32.parse_shape(config, name)
    assert shape.indexer is not None
    return dataclasses.replace(
        shape, indexer=dataclasses.replace(shape.indexer, layers=_count_indexers(config, shape.layers))
    )


def _count_indexers(config: dict[str, Any], layers: int) -> int:
    """Return the number of layers with an indexer, by `indexer_types`, or `index_topk_freq` from an offset on."""
    kinds = config.get("indexer_types")
    if kinds is None:
        every = parse_int(config, "index_topk_freq", 1) if config.get("index_topk_freq") is not None else 1
        offset = parse_int(config, "index_skip_topk_offset", 0, minimum=0) if every > 1 else 0
        return sum(index < offset or (index - offset) % every == 0 for index in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SHARED) for kind in kinds):
        raise ValueError(
            f"'indexer_types' is {format_value(kinds)}; it must be {FULL!r} or {SHARED!r} for each of {layers} layers"
        )
    return kinds.count(FULL)


FAMILY = dataclasses.replace(
    deepseek_v32.FAMILY,
    title="GLM-5",
    model_type="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    defaults={**deepseek_v32.FAMILY.defaults, "n_group": 1, "topk_group": 1},
    parse_shape=_parse_shape,
    presets=(),
    more_fields=deepseek_v32.FAMILY.more_fields
    | split_words(
        """
        indexer_types indexer_rope_interleave index_topk_freq index_topk_pattern index_skip_topk_offset
        index_share_for_mtp_iteration moe_router_dtype
        """
    ),
    ignored_fields=frozenset(("head_dim",)),
    transformers_config="GlmMoeDsaConfig",
)
