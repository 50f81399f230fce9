"""Exchange over symmetric memory: two kernels and no collective library.

One kernel writes this rank's q into all peers' gathered q and has a barrier. Attention writes its partial output and lse
in place, and one kernel has a barrier, reads this rank's heads of all of them and merges in fp32.

Received bytes per rank, layer and request, with N ranks and H heads in the group: q (N−1)/N·H·Q·2, lse (N−1)/N·H·4, o
(N−1)/N·H·R·2. A GPU's links carry both directions at once, so the lower bound is these bytes over the peer bandwidth
plus two barriers.

Two barriers are sufficient: kernels of a rank run one after the other, so a rank that has passed a barrier in one kernel
knows that the peer's earlier kernels have ended.

- The gathered q is overwritten by peers after this layer's merge; its barrier implies that attention has read q.
- o and lse are overwritten after the next layer's gather; its barrier implies that all peers have merged them.

With replicated queries nothing is gathered and a layer has one barrier. Then o and lse have two slots, used in turn: a
slot is overwritten after the next layer's merge; its barrier implies that all peers are done with the slot. This
requires that the slots alternate in the order of execution, which is known for calls captured into one graph. It is not
known at the beginning of a graph (the last layer of the preceding work may have used the same slot: a graph with an odd
number of layers replayed twice, or two graphs in any order) or outside graphs: there a `launch_fence`, one more barrier, comes
first. It costs one barrier per replay, not per layer.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch

from dcpbench.exchange.signals import BarrierKind, BufferBarriers
from dcpbench.exchange.symmetric_memory import allocate_peers
from dcpbench.kernels.symm_mem import BufferAllocator
from dcpbench.kernels.symm_mem.barrier import launch_fence
from dcpbench.kernels.symm_mem.gather import gather_queries
from dcpbench.kernels.symm_mem.pull_merge import merge_from_peers
from dcpbench.measuring.ranges import record_range

if TYPE_CHECKING:
    from dcpbench.exchange import ExchangeSpec
    from dcpbench.exchange.torch_collectives import Group


class _Parts:
    """Layout of the buffer of one exchange: counters first, then the data that peers write and read."""

    def __init__(self, allocator: BufferAllocator, spec: ExchangeSpec, ranks: int) -> None:
        slots = 2 if spec.q_replicate else 1
        self.q_counters = allocator.allocate_counters(ranks)
        self.o_counters = allocator.allocate_counters(ranks)
        self.fence_counters = allocator.allocate_counters(ranks)
        self.q = allocator.allocate_tensor(
            0 if spec.q_replicate else spec.batch, spec.heads, spec.width, dtype=spec.dtype
        )
        self.o = [allocator.allocate_tensor(spec.batch, spec.heads, spec.value, dtype=spec.dtype) for _ in range(slots)]
        self.lse = [allocator.allocate_tensor(spec.batch, spec.heads, dtype=torch.float32) for _ in range(slots)]


class SymmetricMemory:
    """Exchange over symmetric memory, see the module. Each instance has its own buffer and counters."""

    def __init__(self, group: Group, spec: ExchangeSpec) -> None:
        """Allocate the buffer; collective. Raise CapacityError if the ranks cannot read each other's memory."""
        self.spec = spec
        size = BufferAllocator()
        _Parts(size, spec, group.size)
        self.peers = allocate_peers(group, size.used, spec.device, "--exchange symm", "--exchange a2a")
        self.parts = _Parts(BufferAllocator(self.peers.own), spec, group.size)
        self.barriers = BufferBarriers(
            group,
            [
                BarrierKind(what="q_gather of symm", phase="q_gather", counters=self.parts.q_counters, by_blocks=True),
                BarrierKind(what="merge of symm", phase="merge", counters=self.parts.o_counters, by_blocks=False),
                BarrierKind(what="fence of symm", phase="merge", counters=self.parts.fence_counters, by_blocks=False),
            ],
        )
        self.slot = 0
        self.graph: int | None = None

    def get_query_buffer(self, batch: int) -> torch.Tensor:
        """Implement Exchange.get_query_buffer."""
        return self.spec.allocate_query(batch, self.peers.size)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.gather_q. The gathered q is valid until this layer's merge."""
        if self.spec.q_replicate:
            return q_BhQ
        with record_range("q_gather"):
            all_BHQ = self.parts.q[: q_BhQ.shape[0]]
            gather_queries(self.peers, self.parts.q_counters, q_BhQ, all_BHQ)
            return all_BHQ

    def get_partial_buffers(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Exchange.get_partial_buffers."""
        if self.spec.q_replicate:
            self._move_to_next_slot()
        return self.parts.o[self.slot][:batch], self.parts.lse[self.slot][:batch]

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.merge_partials."""
        with record_range("merge"):
            out_hBR = self.spec.allocate_merged(o_BHR.shape[0], o_BHR.shape[1] // self.peers.size)
            merge_from_peers(self.peers, self.parts.o_counters, o_BHR, lse_BH, out_hBR)
            return out_hBR

    def _move_to_next_slot(self) -> None:
        graph = get_capture_id(self.spec.device)
        if graph is None or graph != self.graph:
            with record_range("merge"):
                launch_fence(self.peers, self.parts.fence_counters)
        self.graph = graph
        self.slot = 1 - self.slot


def get_capture_id(device: torch.device) -> int | None:
    """Return the number of the CUDA graph that the current stream is being captured into, unique among graphs, or None."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    failed = _load_driver().cuStreamGetCaptureInfo_v2(
        stream, ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    assert not failed, f"cuStreamGetCaptureInfo: error {failed}"
    return number.value


@functools.cache
def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
