"""Kimi-K2: DeepSeek-V3 in other sizes, without expert groups. No torch."""

from __future__ import annotations

import dataclasses

from dcpbench.models import deepseek_v3
from dcpbench.models.family import Preset
from dcpbench.models.shapes import Yarn

SHAPE = dataclasses.replace(
    deepseek_v3.SHAPE,
    name="kimi-k2",
    heads=64,
    experts=384,
    first_k_dense_replace=1,
    vocab=163840,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.827,
    rope_theta=50000.0,
    yarn=Yarn(factor=32, original_max_position=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_position=131072,
    mtp_layers=0,
)
SHAPE_0905 = dataclasses.replace(
    SHAPE,
    name="kimi-k2-0905",
    yarn=Yarn(factor=64, original_max_position=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_position=262144,
)

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    title="Kimi-K2",
    model_type="kimi_k2",
    architectures=("KimiK2ForCausalLM",),
    presets=(
        Preset(shape=SHAPE, repositories={"kimi-k2": "moonshotai/Kimi-K2-Instruct"}, title="Kimi-K2"),
        Preset(
            shape=SHAPE_0905, repositories={"kimi-k2-0905": "moonshotai/Kimi-K2-Instruct-0905"}, title="Kimi-K2-0905"
        ),
    ),
)
