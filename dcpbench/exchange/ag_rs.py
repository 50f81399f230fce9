"""All-gather q, all-gather lse, scale, reduce-scatter over heads: SGLang's first implementation (#14194).

Received bytes per rank, layer and request, with N ranks and H heads in the group: q (N−1)/N·H·Q·2, lse (N−1)·H·4,
o (N−1)/N·H·R·4. The partial outputs travel and arrive as fp32, as in SGLang: in bf16 the collective's sums and the
result would be rounded once more each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcpbench.kernels.merge import correct
from dcpbench.ranges import phase

if TYPE_CHECKING:
    from dcpbench.exchange import ExchangeSpec
    from dcpbench.exchange.collectives import Group


class AllGatherReduceScatter:
    """See the module. `wire` is the dtype in which partial outputs are reduced."""

    def __init__(self, group: Group, spec: ExchangeSpec, wire: torch.dtype = torch.float32) -> None:
        self.group, self.spec, self.wire = group, spec, wire

    def query(self, batch: int) -> torch.Tensor:
        """See Exchange."""
        return self.spec.new_query(batch, self.group.size)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """See Exchange. The gathered [N, B, h, Q] is copied: attention kernels want one stride per head."""
        if self.spec.q_replicate:
            return q_BhQ
        with phase("q_gather"):
            q_NBhQ = self.group.all_gather(q_BhQ)
            return q_NBhQ.transpose(0, 1).flatten(1, 2).contiguous()

    def partial(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Exchange."""
        return self.spec.new_partial(batch)

    def merge(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        with phase("merge"):
            lse_NBH = self.group.all_gather(lse_BH)
            share_HBR = correct(o_BHR, lse_NBH, self.group.rank, self.wire)
            return self.group.reduce_scatter(share_HBR)
