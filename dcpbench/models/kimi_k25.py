"""Kimi-K2.5, K2.6 and K2.7: the language model of Kimi-K2, nested in a model with a vision encoder that is not measured. No torch."""

from __future__ import annotations

import dataclasses

from dcpbench.models import kimi_k2
from dcpbench.models.tensor_names import TensorNames

FAMILY = dataclasses.replace(
    kimi_k2.FAMILY,
    title="Kimi-K2.5",
    model_type="kimi_k25",
    architectures=("KimiK25ForConditionalGeneration",),
    nested_in="text_config",
    tensors=TensorNames(
        embedding="language_model.model.embed_tokens.weight",
        final_norm="language_model.model.norm.weight",
        lm_head="language_model.lm_head.weight",
        layer="language_model.model.layers.{}.",
    ),
    presets=(),
)
