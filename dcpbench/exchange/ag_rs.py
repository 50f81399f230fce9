"""All-gather q, all-gather lse, scale, reduce-scatter over heads: SGLang's first implementation (#14194).

Received bytes per rank, layer and request, with N ranks and H heads in the group: q (N−1)/N·H·Q·2, lse (N−1)·H·4,
o (N−1)/N·H·R·4. With `q_replicate` no q; with `project_first` V for R. The partial outputs travel and arrive as fp32,
as in SGLang: in bf16 (the spec's `wire`) the collective's sums and the result are rounded once more each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.exchange import InOwnMemory
from dcpbench.kernels.merge import correct
from dcpbench.measuring.ranges import phase

if TYPE_CHECKING:
    import torch


class AllGatherReduceScatter(InOwnMemory):
    """See the module."""

    def merge(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        with phase("merge"):
            lse_NBH = self.group.all_gather(lse_BH)
            share_HBR = correct(o_BHR, lse_NBH, self.group.rank, self.spec.wire)
            return self.group.reduce_scatter(share_HBR)
