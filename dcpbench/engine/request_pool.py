"""Request slots: which requests are in flight and where their tokens lie in the KV cache.

Slot 0 is padding. A decode graph captured for a larger batch fills its unused rows with slot 0, and whatever those
rows read or write must touch nobody: row 0 of the table stays zero, so they land on location 0, in the padding page
that `DcpAllocator` never hands out. The convention holds for every table that a request slot indexes.

Slots are integers of the host; only the table lies on the device. No function here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from dcpbench.errors import CapacityError
from dcpbench.points.batches import PADDING_SLOT


class OutOfSlotsError(CapacityError):
    """Every slot is taken. Raised before anything changes, so the caller may wait and try again."""


class Slots:
    """Free list over `first … first + count - 1`: lowest first when fresh, last freed first afterwards."""

    def __init__(self, count: int, first: int, what: str) -> None:
        if count < 1:
            raise ValueError(f"a pool of {count} {what}s holds nothing")
        self._range = range(first, first + count)
        self._what = what
        self.clear()

    @property
    def available(self) -> int:
        """Slots that `take` can still hand out."""
        return len(self._free)

    def take(self) -> int:
        """A free slot. Raises OutOfSlotsError when there is none."""
        if not self._free:
            raise OutOfSlotsError(f"all {len(self._range)} {self._what}s are in use; free one or make the pool larger")
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Return a slot. Raises ValueError for one that is not in use, be it freed twice or never handed out."""
        self.check(slot)
        self._used.remove(slot)
        self._free.append(slot)

    def check(self, slot: int) -> None:
        """Raise ValueError unless `slot` is in use."""
        if slot not in self._used:
            raise ValueError(f"{self._what} {slot} is not in use")

    def clear(self) -> None:
        """Take every slot back."""
        self._free = list(reversed(self._range))
        self._used: set[int] = set()


class RequestPool:
    """Slots 1…size, each with a row of virtual KV locations: `table[slot, token_idx] = loc`.

    Exhaustion raises OutOfSlotsError, misuse (double free, unknown slot, row too long) ValueError.
    """

    def __init__(self, size: int, max_context: int, device: torch.device | str, padding: bool = True) -> None:
        """`padding=False` hands out slots 0…size-1 as pools did before the convention.

        It exists only so that a test can show the corruption that the padding row prevents.
        """
        first = 1 if padding else 0
        self.size = size
        self.max_context = max_context
        self.slots = Slots(size, first, "request slot")
        self.host = np.zeros((size + first, max_context), dtype=np.int32)
        """The same table on the host, to plan from without asking the device."""
        self.table = torch.zeros((size + first, max_context), dtype=torch.int32, device=device)
        """int32 [size + 1, max_context] on the device; one tensor for life, as captured graphs hold its address."""
        self.tokens = torch.zeros((size + first, max_context + 1), dtype=torch.int64, device=device)
        """int64 [size + 1, max_context + 1] on the device: token ids. A step reads its tokens here and writes the next
        ones behind them, so that the host need not know what was sampled to launch the step after it."""

    @property
    def available(self) -> int:
        """Requests that can still come in."""
        return self.slots.available

    def alloc(self) -> int:
        """A slot for a new request. Its row holds what the last owner left until `set_locs`."""
        return self.slots.take()

    def free(self, slot: int) -> None:
        """End a request. Raises ValueError for a slot that is not in use."""
        self.slots.give_back(slot)

    def clear(self) -> None:
        """End all requests."""
        self.slots.clear()

    def set_locs(self, slot: int, start: int, locs: np.ndarray) -> None:
        """Tokens `start … start + len(locs) - 1` of the request lie at `locs` (integers [n])."""
        self.slots.check(slot)
        stop = start + len(locs)
        if start < 0 or stop > self.max_context:
            raise ValueError(f"tokens {start}…{stop - 1} do not fit rows of {self.max_context} tokens")
        self.host[slot, start:stop] = locs
        copy_async(self.host[slot, start:stop], self.table[slot, start:stop])

    def set_tokens(self, slot: int, start: int, tokens: np.ndarray | list[int]) -> None:
        """Token ids of the request from token `start` on."""
        self.slots.check(slot)
        stop = start + len(tokens)
        if start < 0 or stop > self.tokens.shape[1]:
            raise ValueError(f"tokens {start}…{stop - 1} do not fit rows of {self.tokens.shape[1]} tokens")
        copy_async(np.asarray(tokens, dtype=np.int64), self.tokens[slot, start:stop])


class DecodeRequestPool(RequestPool):
    """RequestPool of a decode server that receives prefilled requests from elsewhere.

    `pre_alloc` requests may hold a slot while their KV is still in transfer, beyond the `size` that decode at once.
    """

    def __init__(self, size: int, pre_alloc: int, max_context: int, device: torch.device | str) -> None:
        super().__init__(size + pre_alloc, max_context, device)
        self.pre_alloc = pre_alloc


class HybridRequestPool(RequestPool):
    """RequestPool of a model with Mamba layers: each request holds a Mamba state slot, too.

    State slots are 1…mamba_size, 0 being padding there as well. `mamba_map` is indexed by *request* slot, and thus has
    as many rows as the request pool plus one, however few states there are.
    """

    def __init__(self, size: int, mamba_size: int, max_context: int, device: torch.device | str) -> None:
        super().__init__(size, max_context, device)
        self.mamba_slots = Slots(mamba_size, 1, "mamba state slot")
        self.mamba_host = np.zeros(size + 1, dtype=np.int32)
        self.mamba_map = torch.zeros(size + 1, dtype=torch.int32, device=device)
        """int32 [size + 1] on the device: request slot -> state slot; 0 where there is no request."""

    @property
    def available(self) -> int:
        """Requests that can still come in, by whichever kind of slot runs out first."""
        return min(self.slots.available, self.mamba_slots.available)

    def alloc(self) -> int:
        """A request slot and, with it, a state slot; neither is taken when one of them is exhausted."""
        state = self.mamba_slots.take()
        try:
            slot = self.slots.take()
        except OutOfSlotsError:
            self.mamba_slots.give_back(state)
            raise
        self._map(slot, state)
        return slot

    def free(self, slot: int) -> None:
        """End a request and free its state."""
        super().free(slot)
        self.mamba_slots.give_back(int(self.mamba_host[slot]))
        self._map(slot, PADDING_SLOT)

    def clear(self) -> None:
        """End all requests and free all states."""
        super().clear()
        self.mamba_slots.clear()
        self.mamba_host[:] = PADDING_SLOT
        self.mamba_map.zero_()

    def _map(self, slot: int, state: int) -> None:
        self.mamba_host[slot] = state
        copy_async(self.mamba_host[slot : slot + 1], self.mamba_map[slot : slot + 1])


def copy_async(host: np.ndarray, out: torch.Tensor) -> None:
    """Copy `host` into `out` (same shape and dtype) in stream order without waiting, even if `host` changes afterwards.

    On CUDA the numbers go through a fresh block of pinned memory, which the caching allocator does not hand out again
    before the copy is done; one long-lived staging buffer would be overwritten while earlier copies still read it.
    """
    staged = torch.from_numpy(host)
    if out.is_cuda:
        staged = staged.pin_memory()
    out.copy_(staged, non_blocking=True)
