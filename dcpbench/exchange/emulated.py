"""Groups of ranks of which only one exists: its work is real, and the waits for the others are modelled
(points/comm_model.py).

A collective leaves data of the right shape and size in the right place, with this rank's own data in place of the
others', and takes the modelled time. An exchange is modelled as a whole, including its own kernels, from benchmarks of
the exchange. Kernels, graphs, page tables and the scheduler therefore behave as in the full layout; logits are
meaningless.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dcpbench.exchange import InOwnMemory
from dcpbench.exchange.torch_collectives import Group
from dcpbench.kernels.delay import copy_and_wait
from dcpbench.measuring.ranges import record_range
from dcpbench.points.comm_model import GATHERS
from dcpbench.points.roofline import compute_exchanged_bytes

if TYPE_CHECKING:
    import torch

    from dcpbench.exchange import ExchangeSpec
    from dcpbench.points.comm_model import CallTime, CommModel


@dataclasses.dataclass
class Tally:
    """Modelled time of the calls in a step; microseconds."""

    calls: int = 0
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0

    def add_call(self, seconds: CallTime) -> None:
        """Add one call."""
        self.calls += 1
        self.us += seconds.mean * 1e6
        self.low_us += seconds.low * 1e6
        self.high_us += seconds.high * 1e6


@dataclasses.dataclass
class Emulation:
    """State shared by all groups of an emulated rank."""

    comm_model: CommModel
    tally: Tally = dataclasses.field(default_factory=Tally)  # sum over the calls since the last reset

    def launch_call(
        self, what: str, ranks: int, received: int, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> None:
        """Emulate a collective over `ranks` ranks, each of which receives `received` bytes; see kernels.delay.copy_and_wait."""
        self.launch_delay(self.comm_model.predict_seconds(what, ranks, received), x, out)

    def launch_delay(self, seconds: CallTime, x: torch.Tensor, out: torch.Tensor | None = None) -> None:
        """Hold the stream for the time of an operation between ranks."""
        self.tally.add_call(seconds)
        copy_and_wait(x, out, seconds.mean)


@dataclasses.dataclass(frozen=True)
class EmulatedGroup(Group):
    """Group of this rank and of emulated ranks."""

    emulation: Emulation

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Implement Group.all_gather. Each rank's part is a copy of this rank's."""
        if out is None:
            out = x.new_empty(self.size, *x.shape)
        self.emulation.launch_call("all-gather", self.size, (self.size - 1) * x.nbytes, x, out)
        return out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Implement Group.reduce_scatter. The sum is this rank's own part."""
        if out is None:
            out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        mine = x.view(self.size, -1)[self.rank]
        self.emulation.launch_call("reduce-scatter", self.size, self._count_received_bytes(x), mine, out)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Implement Group.all_reduce. x is unchanged, because norms follow."""
        self.emulation.launch_call("all-reduce", self.size, 2 * self._count_received_bytes(x), x)
        return x

    def all_reduce_symm(self, x: torch.Tensor) -> torch.Tensor:
        """Emulate an all-reduce over symmetric memory."""
        self.emulation.launch_call("all-reduce-symm", self.size, 2 * self._count_received_bytes(x), x)
        return x

    def _count_received_bytes(self, x: torch.Tensor) -> int:
        return math.ceil((self.size - 1) * x.nbytes / self.size)


class EmulatedExchange(InOwnMemory):
    """An exchange of an emulated rank.

    `gather_q` takes the time of its collective, and `merge_partials` the rest of the modelled time of the whole exchange.
    """

    def __init__(self, name: str, group: EmulatedGroup, spec: ExchangeSpec) -> None:
        """Raise UsageError if the exchange was not measured on the emulated machine."""
        super().__init__(group, spec)
        self.name, self.emulation = name, group.emulation
        self._split_time(spec.batch)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.gather_q. Heads lie in the order of arrival, each rank's batch after another's, because
        their order does not matter.
        """
        if self.spec.q_replicate:
            return q_BhQ
        with record_range("q_gather"):
            all_BHQ = q_BhQ.new_empty(q_BhQ.shape[0], self.spec.heads, q_BhQ.shape[2])
            self.emulation.launch_delay(self._split_time(len(q_BhQ))[0], q_BhQ, all_BHQ)
            return all_BHQ

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Implement Exchange.merge_partials."""
        with record_range("merge"):
            out_hBR = self.spec.allocate_merged(len(o_BHR), self.spec.heads // self.group.size)
            mine = o_BHR.view(-1)[: out_hBR.numel()]
            flat = out_hBR.transpose(0, 1) if self.spec.project_first else out_hBR
            self.emulation.launch_delay(self._split_time(len(o_BHR))[1], mine, flat.reshape(-1))
            return out_hBR

    def _split_time(self, batch: int) -> tuple[CallTime, CallTime]:
        """Return the times of gathering queries and of merging."""
        spec, ranks, comm_model = self.spec, self.group.size, self.emulation.comm_model
        sizes = (batch, spec.heads, ranks, spec.width, spec.value, spec.dtype.itemsize)
        q_bytes, o_bytes = compute_exchanged_bytes(self.name, *sizes)
        if spec.q_replicate:
            merged = comm_model.predict_seconds(self.name, ranks, o_bytes)
            return merged.apply_factor(0.0), merged
        whole = comm_model.predict_seconds(self.name, ranks, q_bytes + o_bytes, barriers=2)
        share = min(comm_model.predict_seconds(GATHERS[self.name], ranks, q_bytes).mean / whole.mean, 1.0)
        return whole.apply_factor(share), whole.apply_factor(1 - share)
