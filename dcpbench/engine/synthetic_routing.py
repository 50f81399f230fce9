"""Router inputs drawn per request and layer, for synthetic weights: every layout routes to the same experts.

Random weights amplify rounding from layer to layer. After some dozen layers two layouts that compute the same step in a
different order route tokens to different experts, and which rank happens to get the most decides the step time by some
percent. So the router multiplies seeded random vectors instead of hidden states: the same work, a choice as close to
uniform, and the same experts in every layout, repeat and context.
"""

from __future__ import annotations

import torch

_PRIMES = (1_000_003, 7_368_787)


def router_inputs(
    numbers: list[int], *, layers: int, hidden: int, seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[layers, T, hidden] standard normal; a row depends on (seed, layer, request number) and on nothing else."""
    out = torch.empty(layers, len(numbers), hidden, dtype=dtype, device=device)
    generator = torch.Generator(device)
    for t, number in enumerate(numbers):
        generator.manual_seed((seed * _PRIMES[0] + number + 1) * _PRIMES[1])
        out[:, t] = torch.empty(layers, hidden, dtype=dtype, device=device).normal_(generator=generator)
    return out
