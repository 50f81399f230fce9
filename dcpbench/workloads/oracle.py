"""What `transformers` says of a checkpoint: logits and greedy tokens in fp32, whole sequences at once, no cache."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import MissingPackageError, how_to_install

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True)
class Truth:
    """The oracle's view of one prompt and its continuation."""

    tokens: list[int]
    logits: torch.Tensor
    """[positions, vocab] of the prompt and all new tokens, fp32 on the CPU."""


@functools.cache
@torch.no_grad()
def greedy(folder: str, prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> list[Truth]:
    """Truth for each prompt, the same for all points of a job, so it is computed once.

    The whole model must fit in host memory. Raises MissingPackageError.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as e:
        raise MissingPackageError(
            f"comparing logits needs transformers ({e}); {how_to_install('test')}, or leave --checkpoint out."
        ) from e
    # Plain experts: the grouped product takes only rows that are multiples of 16 bytes.
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=_config(folder), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    return [_greedy(model, prompt, new_tokens) for prompt in prompts]


def _config(folder: str) -> PreTrainedConfig:
    """The checkpoint's config.json for a class of transformers itself: Kimi-K2 has none of its own, and is V3.

    Null is left to the class, which has no null for most fields; no shared experts are experts of width 0.
    """
    from transformers import DeepseekV2Config, DeepseekV3Config

    given = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = DeepseekV2Config if given["model_type"] == "deepseek_v2" else DeepseekV3Config
    absent = {"n_shared_experts": 0, "q_lora_rank": None, "num_key_value_heads": given["num_attention_heads"]}
    fields = {name: value for name, value in given.items() if value is not None and name != "model_type"}
    return kind.from_dict({name: value for name, value in absent.items() if name not in fields} | fields)


def _greedy(model: torch.nn.Module, prompt: tuple[int, ...], new_tokens: int) -> Truth:
    text = list(prompt)
    for _ in range(new_tokens):
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
        text.append(int(logits[-1].argmax()))
    return Truth(tokens=text[len(prompt) :], logits=model(torch.tensor([text]), use_cache=False).logits[0].float())
