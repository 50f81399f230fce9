"""Synthetic weights with routers that choose experts by a stated distribution, in an engine that routes hidden states.

An engine computes a router's scores from its own hidden states, so the choice cannot be given to it, as in dcpbench's engine. It can be
biased: models that add a correction bias to scores for the selection (DeepSeek-V3, Kimi-K2) get the bias with which standard normal logits
choose each expert as often as stated. Logits are standard normal for hidden states of random direction, after a norm with weights of 1;
those of a real engine are so only approximately.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.errors import ModelError
from dcpbench.kernels.moe.routing import select_experts_reference
from dcpbench.models.shapes import SIGMOID
from dcpbench.points.expert_choices import load_choices

if TYPE_CHECKING:
    import numpy as np

    from dcpbench.models.shapes import ModelShape

TOKENS, ROUNDS, SETTLED = 4096, 400, 40  # tokens and rounds of the search for a bias; then shorter steps
STEP, MAX_STEP = 0.05, 3.0  # change of a bias per ln(stated / found share), and the largest such logarithm


class RoutedSource(SyntheticSource):
    """Synthetic weights with correction biases by which routers choose experts as stated."""

    def __init__(self, seed: int, device: torch.device, shape: ModelShape, routing: str) -> None:
        """Prepare the biases of all layers; raise ModelError if the model has none."""
        super().__init__(seed, torch.bfloat16, device)
        if shape.routing != SIGMOID:
            raise ModelError(
                f"{shape.name} adds no correction bias to the scores of its experts, so its routing cannot be stated in another engine."
            )
        shares_LE = load_choices(routing, shape).shares_LE
        names = (shape.tensors.layer.format(index) for index in range(shape.first_k_dense_replace, shape.layers))
        self.shape, self.shares = shape, dict(zip(names, shares_LE, strict=True))
        self.known: dict[bytes, torch.Tensor] = {}

    def get_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Implement weights.Source.get_tensor."""
        if not name.endswith(self.shape.tensors.routing_bias):
            return super().get_tensor(name, shape, rows=rows, columns=columns, dtype=dtype)
        shares_E = self.shares[name.removesuffix(self.shape.tensors.routing_bias)]
        return self._find_bias(shares_E).to(dtype or self.dtype)

    def _find_bias(self, shares_E: np.ndarray) -> torch.Tensor:
        """Return the bias of a layer. Layers that differ only in the order of their experts, as with a Zipf law, share one search."""
        grouped_Ge = torch.from_numpy(shares_E).to(self.device).view(self.shape.n_group, -1)
        sorted_Ge, within_Ge = grouped_Ge.sort(dim=1, descending=True)
        first_G = torch.tensor(
            sorted(range(self.shape.n_group), key=lambda g: sorted_Ge[g].tolist()), device=self.device
        )
        key = sorted_Ge[first_G].cpu().numpy().tobytes()
        if key not in self.known:
            self.known[key] = find_bias(sorted_Ge[first_G].flatten(), self.shape)
        found_Ge = torch.empty_like(grouped_Ge)
        found_Ge[first_G[:, None], within_Ge[first_G]] = self.known[key].view_as(found_Ge)
        return found_Ge.flatten()


def find_bias(shares_E: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Return the correction bias with which standard normal logits choose experts as often as stated, in fp64.

    The bias of each expert moves against the logarithm of the ratio of found to stated share in each round (Wang et al. 2024,
    arXiv 2408.15664, move it by the sign). The result is the mean of the second half of the rounds.
    """
    device, rule = shares_E.device, shape
    generator = torch.Generator(device).manual_seed(0)
    bias_E, mean_E = torch.zeros_like(shares_E), torch.zeros_like(shares_E)
    least = 1 / TOKENS
    for number in range(ROUNDS):
        logits_TE = torch.randn(TOKENS, len(shares_E), device=device, generator=generator)
        _, ids_Tk = select_experts_reference(logits_TE, bias_E.float(), rule)
        found_E = torch.bincount(ids_Tk.flatten().long(), minlength=len(shares_E)) / TOKENS
        ratio_E = ((shares_E + least) / (found_E + least)).log().clamp(-MAX_STEP, MAX_STEP)
        bias_E = bias_E + STEP / math.sqrt(1 + number / SETTLED) * ratio_E
        if number >= ROUNDS // 2:
            mean_E += bias_E / (ROUNDS - ROUNDS // 2)
    return mean_E
