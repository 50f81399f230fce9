"""All-gather q, all-gather lse, scale, reduce-scatter over heads: SGLang's first implementation (#14194).

Received bytes per rank, layer and request, with N ranks and H heads in the group: q (N−1)/N·H·Q·2, lse (N−1)·H·4,
o (N−1)/N·H·R·4. With `q_replicate` no q; with `project_first` V for R. The partial outputs travel and arrive as fp32,
as in SGLang: in bf16 (the spec's `wire`) the collective's sums and the result are rounded once more each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.exchange.collectives import gather_heads
from dcpbench.kernels.merge import correct
from dcpbench.measuring.ranges import phase

if TYPE_CHECKING:
    import torch

    from dcpbench.exchange import ExchangeSpec
    from dcpbench.exchange.collectives import Group


class AllGatherReduceScatter:
    """See the module."""

    def __init__(self, group: Group, spec: ExchangeSpec) -> None:
        self.group, self.spec = group, spec

    def query(self, batch: int) -> torch.Tensor:
        """See Exchange."""
        return self.spec.new_query(batch, self.group.size)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        return q_BhQ if self.spec.q_replicate else gather_heads(self.group, q_BhQ)

    def partial(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Exchange."""
        return self.spec.new_partial(batch)

    def merge(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        with phase("merge"):
            lse_NBH = self.group.all_gather(lse_BH)
            share_HBR = correct(o_BHR, lse_NBH, self.group.rank, self.spec.wire)
            return self.group.reduce_scatter(share_HBR)
