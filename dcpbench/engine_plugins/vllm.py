"""vLLM: the load format `dcpbench` (`vllm serve FOLDER --load-format dcpbench`), found by the entry point vllm.general_plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.engine_plugins import fill_model

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

LOAD_FORMAT = "dcpbench"
MAX_SPLIT_MB = 64
"""Size in MiB from which torch's allocator splits no free memory while weights are filled.

vLLM sets 20 for the time of loading. Memory for tensors below 10 MiB is then taken in pieces of 20 MiB that are never used again once
they are free, so that filling allocates new memory for each tensor: on an H200, 83 s instead of 8 s for 8 layers of DeepSeek-V3 at tp2.
"""


def register() -> None:
    """Register the load format; vLLM calls this in each of its processes."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SyntheticModelLoader(BaseModelLoader):  # type: ignore[misc]  # untyped without vLLM
        """Fills a model with synthetic weights."""

        def download_model(self, model_config: ModelConfig) -> None:
            """Download nothing."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            """Fill the model in place."""
            set_split_limit = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001 - vLLM calls it too
            if set_split_limit is not None and next(model.parameters()).is_cuda:
                set_split_limit(f"max_split_size_mb:{MAX_SPLIT_MB}")
            fill_model(model, model_config.hf_config)

    register_model_loader(LOAD_FORMAT)(SyntheticModelLoader)
