"""SGLang: synthetic weights in place of those of `--load-format dummy`, found by the entry point sglang.srt.plugins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dcpbench.engine_plugins import fill_model
from dcpbench.servers.engine_log import SYNTHETIC_VARIABLE

if TYPE_CHECKING:
    from torch import nn

TARGET = "sglang.srt.model_loader.loader.initialize_dummy_weights"


def register() -> None:
    """Replace the fill of dummy weights if DCPBENCH_SYNTHETIC_WEIGHTS is 1; SGLang calls this in each of its processes.

    A variable turns it on because SGLang's list of load formats is closed.
    """
    if os.environ.get(SYNTHETIC_VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def initialize_dummy_weights(model: nn.Module, *_: Any, **__: Any) -> None:  # noqa: ANN401 -- SGLang's signature
        fill_model(model, model.config)

    HookRegistry.register(TARGET, initialize_dummy_weights, HookType.REPLACE)
