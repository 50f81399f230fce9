"""Plugins for serving engines, found by their entry points: the synthetic weights of this package's own engine.

All engines then compute the same function at every degree of tensor parallelism, and routing, values and power draw are
like those of a trained model. An engine's own dummy weights are nearly all zero in e4m3, and route every token to the
same experts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any

from dcpbench.servers.engine_log import ROUTING_VARIABLE, format_weights_report

if TYPE_CHECKING:
    from torch import nn

    from dcpbench.models.shapes import ModelShape

SEED_VARIABLE = "DCPBENCH_WEIGHTS_SEED"  # environment variable that holds the seed of the weights; 0 by default
SAMPLED = 64  # elements of each parameter that enter the fingerprint


def fill_model(model: nn.Module, config: Any) -> None:  # noqa: ANN401 -- a configuration of transformers
    """Load synthetic weights into an engine's model through the model's own `load_weights`.

    `config` is the model's Hugging Face configuration; DCPBENCH_ROUTING states which experts routers choose. Raises ModelError if
    its config.json is not that of a model that this package knows, if its weights are neither in bf16 nor in fp8, if tensors are not
    described, or if the model has no correction bias for a stated routing; and ValueError if the seed is not a whole number.
    """
    import torch

    from dcpbench.engine.checkpoint_tensors import iter_checkpoint_tensors
    from dcpbench.engine.synthetic import SyntheticSource
    from dcpbench.engine_plugins.routed_weights import RoutedSource
    from dcpbench.errors import ModelError
    from dcpbench.models.weight_formats import FP8

    shape = _load_shape(config)
    if lack := find_lack(shape, shape.published.name):
        raise ModelError(lack)
    seed = int(os.environ.get(SEED_VARIABLE, "0"))
    device = next(model.parameters()).device
    routing = os.environ.get(ROUTING_VARIABLE, "")
    source = RoutedSource(seed, device, shape, routing) if routing else SyntheticSource(seed, torch.bfloat16, device)
    with torch.no_grad():
        model.load_weights(iter_checkpoint_tensors(source, shape, fp8=shape.published.name == FP8))  # type: ignore[operator]
        sys.stderr.write(format_weights_report(seed, compute_fingerprint(model)) + "\n")
        sys.stderr.flush()


def find_lack(shape: ModelShape, weights_format: str) -> str | None:
    """Return why there are no synthetic weights of a model in a format; None if there are."""
    from dcpbench.models.weight_formats import BF16, FP8

    if weights_format not in (BF16, FP8):
        return f"synthetic weights exist in bf16 and in fp8, and this model has others: {weights_format}."
    if shape.indexer or shape.expert_bias or (shape.gqa and shape.gqa.qk_norm_over_heads):
        return (
            f"synthetic weights lack tensors of {shape.name}: an indexer, biases of experts, or norms over all heads."
        )
    return None


def compute_fingerprint(model: nn.Module) -> str:
    """Return 8 hex digits, a CRC-32 over names, shapes and the first bytes of a rank's parameters."""
    import torch

    found = 0
    for name, parameter in model.named_parameters():
        head = parameter.detach().reshape(-1)[:SAMPLED].contiguous().view(torch.uint8).cpu()
        found = zlib.crc32(f"{name} {tuple(parameter.shape)} ".encode() + bytes(head.tolist()), found)
    return f"{found:08x}"


def _load_shape(config: Any) -> ModelShape:  # noqa: ANN401 -- a configuration of transformers
    """Return the shape of the model's config.json with the number of layers that the engine has built.

    Engines change the loaded configuration, not the file: they rewrite its rope fields and add fields of their own, such
    as SGLang's `context_len`.
    """
    from transformers.utils.hub import cached_file

    from dcpbench.models import load_shape

    path = cached_file(config.name_or_path, "config.json")
    return dataclasses.replace(load_shape(str(path)), layers=config.get_text_config().num_hidden_layers)
