"""How partial attention is merged over the ranks of a DCP group, behind one small protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dcpbench.choices import EXCHANGES, NO_EXCHANGE
from dcpbench.errors import UsageError

if TYPE_CHECKING:
    import torch

    from dcpbench.exchange.collectives import Group


class Exchange(Protocol):
    """Step 1 and step 4 of a decode attention layer. Both are collective and captured in CUDA graphs."""

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """All heads of the group, contiguous [B, H, Q] with H = N·h, in rank order."""

    def merge(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """This rank's heads of the merged output, [h, B, R] in o's dtype or a wider one; lse is natural log, fp32."""


class NoExchange:
    """dcp 1: every rank holds all tokens of its requests."""

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        return q_BhQ

    def merge(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """See Exchange."""
        return o_BHR.transpose(0, 1)


def make_exchange(name: str, group: Group) -> Exchange:
    """The exchange called `name` over a DCP group. Raises UsageError for an unknown name."""
    if name == NO_EXCHANGE:
        return NoExchange()
    if name == "ag_rs":
        from dcpbench.exchange.ag_rs import AllGatherReduceScatter

        return AllGatherReduceScatter(group)
    raise UsageError(f"--exchange {name} does not exist; choose one of {', '.join(EXCHANGES)}.")
