"""Request slots: which requests are in flight and where their tokens lie in the KV cache.

Slot 0 is padding. A decode graph captured for a larger batch fills its unused rows with slot 0, and the reads and
writes of those rows must not affect any request: row 0 of the table stays zero, so they use location 0, in the padding
page that `DcpAllocator` never allocates.

Slots are integers of the host; only the table lies on the device. No function here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from dcpbench.errors import CapacityError


class OutOfSlotsError(CapacityError):
    """Error for an allocation without a free slot. Nothing has changed, so the caller may wait and try again."""


class RequestPool:
    """Slots 1…size, each with a row of virtual KV locations: `table[slot, token_idx] = loc`.

    Exhaustion raises OutOfSlotsError, misuse (double free, unknown slot, row too long) ValueError.
    """

    def __init__(self, size: int, max_context: int, device: torch.device | str) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} request slots holds nothing")
        self.max_context = max_context
        self.slots = range(1, 1 + size)
        self.free_all()
        self.host = np.zeros((size + 1, max_context), dtype=np.int32)  # table on the host: plans need no device
        self.table = torch.zeros((size + 1, max_context), dtype=torch.int32, device=device)
        """int32 [size + 1, max_context] on the device; one tensor for life, as captured graphs hold its address."""
        self.tokens = torch.zeros((size + 1, max_context + 1), dtype=torch.int64, device=device)
        """int64 [size + 1, max_context + 1] on the device: token ids. A step reads its tokens here and writes the next
        ones behind them, so that the host can launch the following step without knowing the sampled tokens.
        """

    @property
    def available(self) -> int:
        """Return the number of requests that can still be admitted."""
        return len(self._free)

    def allocate_slot(self) -> int:
        """Return a slot for a new request: the lowest one of a fresh pool, later the last one freed.

        Its row holds the entries of the last owner until `set_locs`.
        """
        if not self._free:
            raise OutOfSlotsError(f"all {len(self.slots)} request slots are in use; free one or make the pool larger")
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        """End a request. Raises ValueError for a slot that is not in use: freed twice or never allocated."""
        self._check_slot(slot)
        self._used.remove(slot)
        self._free.append(slot)

    def free_all(self) -> None:
        """End all requests."""
        self._free = list(reversed(self.slots))
        self._used: set[int] = set()

    def _check_slot(self, slot: int) -> None:
        if slot not in self._used:
            raise ValueError(f"request slot {slot} is not in use")

    def set_locs(self, slot: int, start: int, locs: np.ndarray) -> None:
        """Set the locations of tokens `start … start + len(locs) - 1` of the request to `locs` (integers [n])."""
        self._check_slot(slot)
        stop = start + len(locs)
        if start < 0 or stop > self.max_context:
            raise ValueError(f"tokens {start}…{stop - 1} do not fit rows of {self.max_context} tokens")
        self.host[slot, start:stop] = locs
        copy_async(self.host[slot, start:stop], self.table[slot, start:stop])

    def set_tokens(self, slot: int, start: int, tokens: np.ndarray | list[int]) -> None:
        """Token ids of the request from token `start` on."""
        self._check_slot(slot)
        stop = start + len(tokens)
        if start < 0 or stop > self.tokens.shape[1]:
            raise ValueError(f"tokens {start}…{stop - 1} do not fit rows of {self.tokens.shape[1]} tokens")
        copy_async(np.asarray(tokens, dtype=np.int64), self.tokens[slot, start:stop])


def copy_async(host: np.ndarray, out: torch.Tensor) -> None:
    """Copy `host` into `out` (same shape and dtype) in stream order without waiting, even if `host` changes afterwards.

    On CUDA the numbers go through a fresh block of pinned memory, which the caching allocator does not hand out again
    before the copy is done; one long-lived staging buffer would be overwritten while earlier copies still read it.
    """
    staged = torch.from_numpy(host)
    if out.is_cuda:
        staged = staged.pin_memory()
    out.copy_(staged, non_blocking=True)
