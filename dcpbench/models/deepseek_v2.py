"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): softmax routing without a bias, whose weights are not normalised. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from dcpbench.models import mla_config
from dcpbench.models.config_fields import format_value
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import SOFTMAX, ModelShape, Yarn

GROUPED = "group_limited_greedy"

_V2 = ModelShape(
    name="deepseek-v2",
    hidden=5120,
    layers=60,
    heads=128,
    q_lora=1536,
    experts=160,
    top_k=6,
    shared_experts=2,
    moe_intermediate_size=1536,
    intermediate_size=12288,
    first_k_dense_replace=1,
    vocab=102400,
    routing=SOFTMAX,
    n_group=8,
    topk_group=3,
    normalise=False,
    routed_scaling_factor=16.0,
    yarn=Yarn(factor=40, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707),
)
_V2_LITE = dataclasses.replace(
    _V2,
    name="deepseek-v2-lite",
    hidden=2048,
    layers=27,
    heads=16,
    q_lora=None,
    experts=64,
    moe_intermediate_size=1408,
    intermediate_size=10944,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
)


def _parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    """Convert a configuration. transformers does not normalise V2's weights, regardless of `norm_topk_prob`."""
    if config.get("rope_interleave") not in (None, True):
        raise ValueError(
            f"'rope_interleave' is {format_value(config['rope_interleave'])}; deepseek_v2 has no other than True"
        )
    return mla_config.parse_shape(
        config, name, grouped=config["topk_method"] == GROUPED, normalise=False, rope_interleaved=True
    )


FAMILY = Family(
    title="DeepSeek-V2",
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    routing=SOFTMAX,
    topk_methods=("greedy", GROUPED),
    defaults={"topk_method": "greedy", "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    read_shape=mla_config.read_shape,
    parse_shape=_parse_shape,
    presets=(
        Preset(shape=_V2_LITE, repositories={"deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite"}),
        Preset(shape=_V2, repositories={"deepseek-v2": "deepseek-ai/DeepSeek-V2"}),
    ),
    transformers_config="DeepseekV2Config",
)
