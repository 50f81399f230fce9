"""Kernels that use the memory of other GPUs: gather q, merge partial outputs, add up; each contains a barrier.

Every rank holds a buffer of the same layout. Data of a peer lies at the same offset as the rank's own, so that a tensor
in the own buffer identifies all ranks' tensors. The kernels are collective: all ranks of a group call them in the same
order with the same sizes.

A kernel that waits for peers must not keep their kernels from starting: with one block of at most 8 warps on each
multiprocessor, several of them fit on a GPU at one time.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

MAX_BLOCKS = 256  # blocks of the largest grid of any kernel here; each has its counters


@dataclasses.dataclass(frozen=True)
class Peers:
    """A buffer at each rank of a group, as one of the ranks sees them."""

    rank: int
    addresses: tuple[int, ...]  # buffers' addresses in this process: its own, that of rank + 1, … around the group
    own: torch.Tensor  # this rank's buffer, [bytes] uint8, zeroed before ranks read it; all have the same size

    @property
    def size(self) -> int:
        """Return N, the number of ranks."""
        return len(self.addresses)

    @functools.cached_property
    def launch_arguments(self) -> dict[str, int]:
        """Return the arguments common to all kernels here: N, and whether a kernel may be started before the preceding
        one has ended.
        """
        device = self.own.device
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        sizes = {"N": self.size, "N_BLOCK": triton.next_power_of_2(self.size)}
        return sizes | {"DEPENDENT": hopper, "launch_pdl": hopper}

    def compute_offset(self, tensor: torch.Tensor) -> int:
        """Return the offset in bytes of a tensor in the own buffer; 16-byte reads require a multiple of 16."""
        found = tensor.data_ptr() - self.addresses[0]
        assert 0 <= found <= self.own.numel() - tensor.nbytes, "not in this buffer: use the tensors that it allocated"
        assert found % 16 == 0
        return found


class BufferAllocator:
    """Divide a buffer into consecutive parts; without a buffer only add up their sizes.

    Ranks that request the same parts in the same order find them at the same places.
    """

    ALIGNMENT = 256

    def __init__(self, own: torch.Tensor | None = None) -> None:
        self.own = own
        self.used = 0

    def allocate_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor, contiguous; on the meta device without a buffer."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        start, self.used = self.used, self.used + -(-meta.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        if self.own is None:
            return meta
        return self.own[start : start + meta.nbytes].view(dtype).view(shape)

    def allocate_counters(self, size: int) -> torch.Tensor:
        """Return the counters of one kind of barrier; all ranks' must be zero before one is used."""
        return self.allocate_tensor(MAX_BLOCKS + 1, size, dtype=torch.int32)


@functools.cache
def count_blocks(device: torch.device) -> int:
    """Return the grid of kernels here: a block on each multiprocessor; in Triton's interpreter, where they queue, a
    few.
    """
    if device.type != "cuda":
        return 3
    return min(MAX_BLOCKS, torch.cuda.get_device_properties(device).multi_processor_count)


def get_triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's name of a dtype. Tensors in buffers are passed as offsets, which carry no dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))
