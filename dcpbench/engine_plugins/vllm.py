"""vLLM: the load format `dcpbench` (`vllm serve FOLDER --load-format dcpbench`), found by the entry point vllm.general_plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.engine_plugins import fill_model

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

LOAD_FORMAT = "dcpbench"


def register() -> None:
    """Register the load format; vLLM calls this in each of its processes."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SyntheticModelLoader(BaseModelLoader):  # type: ignore[misc]  # untyped without vLLM
        """Fills a model with synthetic weights."""

        def download_model(self, model_config: ModelConfig) -> None:
            """Download nothing."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            """Fill the model in place."""
            fill_model(model, model_config.hf_config)

    register_model_loader(LOAD_FORMAT)(SyntheticModelLoader)
