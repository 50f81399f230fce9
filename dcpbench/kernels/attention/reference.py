"""MLA decode attention, slow and obvious: the truth that every backend is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec, DecodeSpec, Shards


def compute_mla_decode(
    q_HQ: torch.Tensor, rows_KQ: torch.Tensor, latent: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one request's heads over its KV rows in q's dtype.

    score = q·k·scale over all Q columns, value = the first `latent` columns (DeepSeek-V2, arXiv 2405.04434, absorbed
    form). Returns o_HR and lse_H (natural log); zeros and -inf where K = 0.
    """
    if rows_KQ.shape[0] == 0:
        return q_HQ.new_zeros(q_HQ.shape[0], latent), q_HQ.new_full((q_HQ.shape[0],), float("-inf"))
    scores_HK = q_HQ @ rows_KQ.T * scale
    return torch.softmax(scores_HK, dim=-1) @ rows_KQ[:, :latent], torch.logsumexp(scores_HK, dim=-1)


class RequestLoop:
    """Find the KV pages of each request, for backends that loop over requests. For CPU runs and comparisons, not for timing."""

    tables = None
    rounds: tuple[str, ...] = ()

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec
        self.shards: list[tuple[torch.Tensor, int]] = []

    def plan_on_device(self) -> None:
        """Implement Backend.plan_on_device. `plan` does the work."""

    def plan(self, shards: Shards) -> None:
        """Implement Backend.plan."""
        self.shards = [
            (torch.as_tensor(pages, dtype=torch.int64).to(self.spec.device), length)
            for pages, length in zip(shards.repeat_pages(), shards.lengths, strict=True)
        ]


class ReferenceBackend(RequestLoop):
    """Computes in fp32 (fp64 for fp64 input)."""

    spec: AttentionSpec

    def run(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run."""
        wide = torch.promote_types(q_BHQ.dtype, torch.float32)
        for b, (pages, length) in enumerate(self.shards):
            rows_KQ = kv[pages].flatten(0, 1)[:length].to(wide) * self.spec.kv_scale
            o_HR, lse_BH[b] = compute_mla_decode(q_BHQ[b].to(wide), rows_KQ, self.spec.latent, self.spec.scale)
            o_BHR[b] = o_HR
