"""Merge partial attention over the ranks of a DCP group, with interchangeable exchanges behind one small protocol."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch

from dcpbench.errors import UsageError
from dcpbench.exchange.torch_collectives import gather_heads
from dcpbench.points.comm_model import GATHERS
from dcpbench.points.names import EXCHANGES, NO_EXCHANGE, REGISTERED

if TYPE_CHECKING:
    from dcpbench.exchange.torch_collectives import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """Sizes that an exchange is built for."""

    batch: int  # most requests of one call, padding rows included
    heads: int  # H: query heads of the whole DCP group
    width: int  # Q: columns of a query
    value: int  # columns of a partial output: R of the latent, or V if it is projected before the exchange
    dtype: torch.dtype
    device: torch.device
    q_replicate: bool = False  # True if every rank computes the queries of all heads, so that none are gathered
    project_first: bool = False  # True if partial outputs are projected first; merged ones may be rounded to `dtype`
    reduce_dtype: torch.dtype = torch.float32  # dtype of ag_rs's reduction of partial outputs; engines use the default

    def allocate_query(self, batch: int, ranks: int) -> torch.Tensor:
        """Return memory for one rank's queries, [B, h, Q]; [B, H, Q] if they are replicated."""
        heads = self.heads if self.q_replicate else self.heads // ranks
        return torch.empty(batch, heads, self.width, dtype=self.dtype, device=self.device)

    def allocate_partial(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for one rank's partial result of all heads: o_BHR and lse_BH (fp32)."""
        o_BHR = torch.empty(batch, self.heads, self.value, dtype=self.dtype, device=self.device)
        return o_BHR, torch.empty(batch, self.heads, dtype=torch.float32, device=self.device)

    def allocate_merged(self, batch: int, heads: int) -> torch.Tensor:
        """Return memory for the merged output o_hBR: fp32, heads first; projected values are laid out by request in
        `dtype`.
        """
        if self.project_first:
            return torch.empty(batch, heads, self.value, dtype=self.dtype, device=self.device).transpose(0, 1)
        return torch.empty(heads, batch, self.value, dtype=torch.float32, device=self.device)


class Exchange(Protocol):
    """Steps 1 and 4 of a decode attention layer: gathering queries and merging. Both are collective and captured in
    CUDA graphs.

    `get_query_buffer` and `get_partial_buffers` return the buffers that preceding operations write to, because an exchange may need them in
    memory that peers read. Each layer calls query, gather_q, partial and merge once, in this order and with the same
    batch.
    """

    def get_query_buffer(self, batch: int) -> torch.Tensor:
        """Return the buffer for this rank's q, contiguous [B, h, Q]; [B, H, Q] with `q_replicate`."""

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """Return all heads of the group, contiguous [B, H, Q] with H = N·h, in rank order; `q_BhQ` is the buffer from
        `get_query_buffer`.
        """

    def get_partial_buffers(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers for this rank's partial result of all heads: o_BHR in the spec's dtype and lse_BH in fp32."""

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads of the merged output, [h, B, R] in o's dtype or a wider one.

        Strides are the exchange's choice; the last dimension is contiguous. An fp32 result is not rounded before it is
        projected.

        R is the spec's `value`; lse is natural log. Where lse is -inf, o is ignored, including NaN; the result is 0
        where lse is -inf on all ranks. The arguments are the buffers from `get_partial_buffers`.
        """


class InOwnMemory:
    """Base of exchanges with all tensors in memory of this rank alone: q is all-gathered."""

    def __init__(self, group: Group, spec: ExchangeSpec) -> None:
        self.group, self.spec = group, spec

    def get_query_buffer(self, batch: int) -> torch.Tensor:
        """Implement Exchange.get_query_buffer."""
        return self.spec.allocate_query(batch, self.group.size)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.gather_q."""
        return q_BhQ if self.spec.q_replicate or self.group.size == 1 else gather_heads(self.group, q_BhQ)

    def get_partial_buffers(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Exchange.get_partial_buffers."""
        return self.spec.allocate_partial(batch)


class NoExchange(InOwnMemory):
    """Exchange of dcp 1, where every rank holds all tokens of its requests."""

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Implement Exchange.merge_partials."""
        return o_BHR.transpose(0, 1)


def make_exchange(name: str, group: Group, spec: ExchangeSpec) -> Exchange:
    """Return the exchange called `name` over a DCP group. Raise UsageError for an unknown name."""
    if name == NO_EXCHANGE:
        return NoExchange(group, spec)
    from dcpbench.exchange.emulated import EmulatedExchange, EmulatedGroup

    if isinstance(group, EmulatedGroup) and name in GATHERS:
        return EmulatedExchange(name, group, spec)
    if name == "ag_rs":
        from dcpbench.exchange.ag_rs import AllGatherReduceScatter

        return AllGatherReduceScatter(group, spec)
    if name == REGISTERED:
        from dcpbench.exchange.ag_rs import AllGatherReduceScatter, InRegisteredMemory

        return AllGatherReduceScatter(group, spec) if group.handle is None else InRegisteredMemory(group, spec)
    if name == "a2a":
        from dcpbench.exchange.a2a import AllToAll

        return AllToAll(group, spec)
    if name == "symm":
        from dcpbench.exchange.symm import SymmetricMemory

        return SymmetricMemory(group, spec)
    raise UsageError(f"--exchange {name} does not exist; choose one of {', '.join(EXCHANGES)}.")
