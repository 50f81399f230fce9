"""What `transformers` says of a checkpoint: logits and greedy tokens in fp32, whole sequences at once, no cache."""

from __future__ import annotations

import dataclasses

import torch

from dcpbench.errors import MissingPackageError, how_to_install


@dataclasses.dataclass(frozen=True)
class Truth:
    """The oracle's view of one prompt and its continuation."""

    tokens: list[int]
    logits: torch.Tensor
    """[positions, vocab] of the prompt and all new tokens, fp32 on the CPU."""


def greedy(folder: str, prompts: list[list[int]], new_tokens: int) -> list[Truth]:
    """Truth for each prompt. The whole model must fit in host memory. Raises MissingPackageError."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as e:
        raise MissingPackageError(
            f"comparing logits needs transformers ({e}); {how_to_install('test')}, or leave --checkpoint out."
        ) from e
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_greedy(model, prompt, new_tokens) for prompt in prompts]


def _greedy(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> Truth:
    text = list(prompt)
    for _ in range(new_tokens):
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
        text.append(int(logits[-1].argmax()))
    return Truth(tokens=text[len(prompt) :], logits=model(torch.tensor([text]), use_cache=False).logits[0].float())
