"""All-gather q, then one all-to-all of packed partial outputs and their lse, merged by the receiver.

Received bytes per rank, layer and request, with N ranks and H heads in the group and 2-byte numbers: q (N−1)/N·H·Q·2, o
(N−1)/N·H·R·2, lse (N−1)/N·H·4. With `q_replicate` no q; with `project_first` V for R. Partial outputs are sent as the
attention kernel rounded them and are summed in fp32, so the exchange rounds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.exchange import InOwnMemory
from dcpbench.kernels.pack import Message, merge_messages, pack_messages
from dcpbench.measuring.ranges import record_range

if TYPE_CHECKING:
    import torch


class AllToAll(InOwnMemory):
    """Exchange by one all-to-all of packed partial outputs."""

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.merge_partials. Projected values are [B, h, V] in the spec's dtype, else fp32."""
        with record_range("merge"):
            received_NW = self.group.all_to_all(pack_messages(o_BHR, lse_BH, self.group.size))
            batch, heads, columns = o_BHR.shape
            message = Message(batch, heads // self.group.size, columns, o_BHR.dtype)
            out_hBR = self.spec.allocate_merged(batch, message.heads)
            merge_messages(received_NW, message, out_hBR)
            return out_hBR
