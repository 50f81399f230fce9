"""Read or generate token ids that `verify --checkpoint` feeds to the model. No torch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.models.shapes import ModelShape

Prompts = tuple[tuple[int, ...], ...]
EXAMPLE = "Write lists of token ids, for example [[1, 5, 7], [2]]."


def make_random_prompts(shape: ModelShape, count: int, max_tokens: int) -> Prompts:
    """Return seeded prompts of lengths from 1 to `max_tokens`, so that some DCP ranks hold no token of a short one."""
    rng = random.Random(0)
    lengths = [1 + (max_tokens - 1) * i // (count - 1) for i in range(count)] if count > 1 else [max_tokens]
    return tuple(tuple(rng.randrange(shape.vocab) for _ in range(n)) for n in lengths)


def read_prompts(path: Path, shape: ModelShape, new_tokens: int) -> Prompts:
    """Return the prompts in a JSON file; raise UsageError, naming the prompt, for one that this model cannot read."""
    try:
        prompts = msgspec.json.decode(path.read_bytes(), type=Prompts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(f"--prompts {path}: {e}. {EXAMPLE}") from e
    if not prompts:
        raise UsageError(f"--prompts {path} holds no prompt. {EXAMPLE}")
    for number, prompt in enumerate(prompts, 1):
        where = f"--prompts {path}, prompt {number}"
        if not prompt:
            raise UsageError(f"{where} is empty; give it at least one token id, or leave it out.")
        wrong = next((token for token in prompt if not 0 <= token < shape.vocab), None)
        if wrong is not None:
            raise UsageError(f"{where}: {wrong} is no token of {shape.name}; ids go from 0 to {shape.vocab - 1}.")
        if len(prompt) + new_tokens > shape.max_position:
            raise UsageError(
                f"{where}: {len(prompt)} tokens and {new_tokens} new ones pass {shape.name}'s {shape.max_position} "
                "positions; shorten it or lower --new-tokens."
            )
    return prompts
