"""All-gather q, all-gather lse, scale, reduce-scatter over heads: SGLang's first implementation (#14194).

Received bytes per rank, layer and request, with N ranks and H heads in the group: q (N−1)/N·H·Q·2, lse (N−1)·H·4, o
(N−1)/N·H·R·4. With `q_replicate` no q; with `project_first` V for R. The partial outputs are sent and received as fp32,
as in SGLang: in bf16 (the spec's `reduce_dtype`) the collective's sums and the result are rounded once more each.

`ag_rs_registered` is the same with the input and the output of each collective in memory that is registered with NCCL.
A batch smaller than the largest uses the beginning of each part, on all ranks. All kernels run on one stream, so a part
is overwritten only after its last local reader; readers on other ranks end inside their collectives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dcpbench.exchange import InOwnMemory
from dcpbench.exchange.registered_memory import get_shared_buffer
from dcpbench.exchange.torch_collectives import gather_heads
from dcpbench.kernels.merge import correct_attn_out
from dcpbench.kernels.symm_mem import BufferAllocator
from dcpbench.measuring.ranges import record_range
from dcpbench.points.names import REGISTERED

if TYPE_CHECKING:
    from dcpbench.exchange import ExchangeSpec
    from dcpbench.exchange.torch_collectives import Group


class AllGatherReduceScatter(InOwnMemory):
    """Exchange by all-gather and reduce-scatter through NCCL."""

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.merge_partials."""
        with record_range("merge"):
            lse_NBH = self.group.all_gather(lse_BH)
            share_HBR = correct_attn_out(o_BHR, lse_NBH, self.group.rank, self.spec.reduce_dtype)
            return self.group.reduce_scatter(share_HBR)


class _Parts:
    """Inputs and outputs of the three collectives, for the largest batch, as flat memory."""

    def __init__(self, allocator: BufferAllocator, spec: ExchangeSpec, ranks: int) -> None:
        q = 0 if spec.q_replicate else spec.batch * spec.heads // ranks * spec.width
        lse, o = spec.batch * spec.heads, spec.batch * spec.heads * spec.value
        self.q, self.all_q = (
            allocator.allocate_tensor(q, dtype=spec.dtype),
            allocator.allocate_tensor(ranks * q, dtype=spec.dtype),
        )
        self.lse = allocator.allocate_tensor(lse, dtype=torch.float32)
        self.all_lse = allocator.allocate_tensor(ranks * lse, dtype=torch.float32)
        self.share, self.merged = (
            allocator.allocate_tensor(o, dtype=spec.reduce_dtype),
            allocator.allocate_tensor(o // ranks, dtype=spec.reduce_dtype),
        )


def _slice_first(flat: torch.Tensor, *shape: int) -> torch.Tensor:
    return flat[: math.prod(shape)].view(shape)


class InRegisteredMemory(InOwnMemory):
    """Exchange by all-gather and reduce-scatter in registered memory. Each instance has its own memory."""

    def __init__(self, group: Group, spec: ExchangeSpec) -> None:
        """Register the memory; collective. Raise CapacityError if memory cannot be registered with NCCL."""
        super().__init__(group, spec)
        size = BufferAllocator()
        _Parts(size, spec, group.size)
        own = get_shared_buffer(self, group, size.used, spec.device, f"--exchange {REGISTERED}", "--exchange ag_rs")
        self.parts = _Parts(BufferAllocator(own), spec, group.size)

    def get_query_buffer(self, batch: int) -> torch.Tensor:
        """Implement Exchange.get_query_buffer."""
        if self.spec.q_replicate:
            return super().get_query_buffer(batch)
        return _slice_first(self.parts.q, batch, self.spec.heads // self.group.size, self.spec.width)

    def gather_q(self, q_BhQ: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.gather_q. The gathered q is valid until the next layer's."""
        if self.spec.q_replicate:
            return q_BhQ
        return gather_heads(self.group, q_BhQ, _slice_first(self.parts.all_q, self.group.size, *q_BhQ.shape))

    def get_partial_buffers(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Exchange.get_partial_buffers."""
        o_BHR, _ = super().get_partial_buffers(batch)
        return o_BHR, _slice_first(self.parts.lse, batch, self.spec.heads)

    def merge_partials(self, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Implement Exchange.merge_partials. The result is valid until the next layer's."""
        batch, heads, columns = o_BHR.shape
        ranks, parts = self.group.size, self.parts
        with record_range("merge"):
            lse_NBH = self.group.all_gather(lse_BH, _slice_first(parts.all_lse, ranks, batch, heads))
            share_HBR = _slice_first(parts.share, heads, batch, columns)
            correct_attn_out(o_BHR, lse_NBH, self.group.rank, self.spec.reduce_dtype, share_HBR)
            return self.group.reduce_scatter(share_HBR, _slice_first(parts.merged, heads // ranks, batch, columns))
