"""Groups of ranks of which there is but one: its work is real, and what it would wait for is modelled (points/wire.py).

A call between ranks leaves data of the right shape and size in the right place, this rank's own in place of the others',
and takes the time that the model says. So kernels, graphs, page tables and the scheduler behave as they would; logits
mean nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from dcpbench.exchange.collectives import Group
from dcpbench.kernels.hold import hold
from dcpbench.measuring.ranges import phase

if TYPE_CHECKING:
    from dcpbench.exchange import ExchangeSpec
    from dcpbench.points.wire import Seconds, Wire

LSE_BYTES = 4


@dataclasses.dataclass
class Tally:
    """What the calls of a step were modelled as; microseconds."""

    calls: int = 0
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0

    def add(self, seconds: Seconds) -> None:
        """One call."""
        self.calls += 1
        self.us += seconds.mean * 1e6
        self.low_us += seconds.low * 1e6
        self.high_us += seconds.high * 1e6


@dataclasses.dataclass
class Emulation:
    """What all groups of an emulated rank share."""

    wire: Wire
    tally: Tally = dataclasses.field(default_factory=Tally)
    """Of the calls since it was made anew."""

    def hold(
        self, what: str, ranks: int, received: int, x: torch.Tensor, out: torch.Tensor | None = None, meetings: int = 1
    ) -> None:
        """A call over so many ranks, of which each receives so many bytes; see kernels.hold."""
        seconds = self.wire.seconds(what, ranks, received, meetings)
        self.tally.add(seconds)
        hold(x, out, seconds.mean)


@dataclasses.dataclass(frozen=True)
class EmulatedGroup(Group):
    """This rank's place among ranks that are not there."""

    emulation: Emulation

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Group; all ranks have what this one has."""
        if out is None:
            out = x.new_empty(self.size, *x.shape)
        self.emulation.hold("all-gather", self.size, (self.size - 1) * x.nbytes, x, out)
        return out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Group; the sum is this rank's own part."""
        if out is None:
            out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        mine = x.view(self.size, -1)[self.rank]
        self.emulation.hold("reduce-scatter", self.size, self._others(x), mine, out)
        return out

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Group; from every rank comes what this one sends to itself."""
        if out is None:
            out = torch.empty_like(x)
        self.emulation.hold("all-to-all", self.size, self._others(x), x.view(self.size, -1)[self.rank], out)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Group; x stays what it is, as norms follow."""
        self.emulation.hold("all-reduce", self.size, 2 * self._others(x), x)
        return x

    def all_reduce_symm(self, x: torch.Tensor) -> torch.Tensor:
        """The same, as long as over symmetric memory."""
        self.emulation.hold("all-reduce-symm", self.size, 2 * self._others(x), x)
        return x

    def _others(self, x: torch.Tensor) -> int:
        return math.ceil((self.size - 1) * x.nbytes / self.size)


class EmulatedSymmetricMemory:
    """Exchange `symm` of an emulated rank: each of its two kernels as one call, which has its own reading and merging in it."""

    def __init__(self, group: EmulatedGroup, spec: ExchangeSpec) -> None:
        self.group, self.spec = group, spec

    def query(self, batch: int) -> torch.Tensor:
        """See Exchange."""
        return self.spec.new_query(batch, self.group.size)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """See Exchange. Heads lie as they come, each rank's batch after another's: nobody looks which is whose."""
        if self.spec.q_replicate:
            return q_BhQ
        ranks = self.group.size
        with phase("q_gather"):
            all_BHQ = q_BhQ.new_empty(q_BhQ.shape[0], ranks * q_BhQ.shape[1], q_BhQ.shape[2])
            self.group.emulation.hold("symm", ranks, (ranks - 1) * q_BhQ.nbytes, q_BhQ, all_BHQ)
            return all_BHQ

    def partial(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Exchange."""
        return self.spec.new_partial(batch)

    def merge(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """See Exchange."""
        batch, heads, columns = o_BHR.shape
        ranks = self.group.size
        received = (ranks - 1) * batch * heads * (columns * o_BHR.dtype.itemsize + LSE_BYTES) // ranks
        with phase("merge"):
            out_hBR = self.spec.new_merged(batch, heads // ranks)
            mine = o_BHR.view(-1)[: out_hBR.numel()]
            flat = out_hBR.transpose(0, 1) if self.spec.project_first else out_hBR
            self.group.emulation.hold("symm", ranks, received, mine, flat.reshape(-1))
            return out_hBR
