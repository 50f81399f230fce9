"""DeepSeek-V3 and R1 (arXiv 2412.19437): sigmoid routing with a correction bias, published in fp8. No torch."""

from __future__ import annotations

from typing import Any

from dcpbench.models import mla_config
from dcpbench.models.config_fields import parse_bool
from dcpbench.models.family import Family, Preset
from dcpbench.models.shapes import SIGMOID, ModelShape, Yarn
from dcpbench.models.weight_formats import FORMATS, FP8

SHAPE = ModelShape(
    name="deepseek-v3",
    hidden=7168,
    layers=61,
    heads=128,
    q_lora=1536,
    experts=256,
    top_k=8,
    shared_experts=1,
    moe_intermediate_size=2048,
    intermediate_size=18432,
    first_k_dense_replace=3,
    vocab=129280,
    routing=SIGMOID,
    n_group=8,
    topk_group=4,
    normalise=True,
    routed_scaling_factor=2.5,
    yarn=Yarn(factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
    published=FORMATS[FP8],
    mtp_layers=1,
)
TINY = ModelShape(  # V3 in small sizes, for CPUs; it has no checkpoint
    name="tiny",
    hidden=64,
    layers=3,
    heads=8,
    q_lora=32,
    experts=8,
    top_k=2,
    shared_experts=1,
    moe_intermediate_size=32,
    intermediate_size=128,
    first_k_dense_replace=1,
    vocab=512,
    routing=SIGMOID,
    n_group=2,
    topk_group=1,
    normalise=True,
    routed_scaling_factor=2.5,
    latent=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    max_position=65536,
    mtp_layers=1,
)


def parse_shape(config: dict[str, Any], name: str) -> ModelShape:
    """Convert a configuration of V3 or of a model that is V3 in other sizes."""
    return mla_config.parse_shape(
        config,
        name,
        grouped=True,
        normalise=parse_bool(config, "norm_topk_prob", default=True),
        rope_interleaved=parse_bool(config, "rope_interleave", default=True),
    )


FAMILY = Family(
    title="DeepSeek-V3/R1",
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    routing=SIGMOID,
    topk_methods=("noaux_tc", None),
    defaults={
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    read_shape=mla_config.read_shape,
    parse_shape=parse_shape,
    presets=(
        Preset(
            shape=SHAPE,
            repositories={"deepseek-v3": "deepseek-ai/DeepSeek-V3", "deepseek-r1": "deepseek-ai/DeepSeek-R1"},
            title="DeepSeek-V3",
        ),
    ),
    transformers_config="DeepseekV3Config",
)
