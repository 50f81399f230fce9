"""Allocate pages of the KV cache to requests, in virtual locations that are the same on all DCP ranks.

With N = dcp, a virtual page is `page_size · N` consecutive locations: one physical page of the same number on each of
the N ranks. Token t of a request lies in its page number `t // (page_size · N)` at offset `t % (page_size · N)`, so
every request starts at a multiple of `page_size · N` and

    token_idx % N == loc % N        and, with stripes,        owner(token_idx) == owner(loc)

Therefore a rank's page table is the list of virtual pages itself, and its j-th local token lies in physical row
`pages[j // page_size] · page_size + j % page_size`. No filter or mask is needed to find a rank's share.

Page 0 is padding: unused rows of a decode graph write to its locations (request_pool.py). It is never allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import CapacityError
from dcpbench.points.memory import LOCATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

PADDING_PAGE = 0
NO_PAGES = np.empty(0, dtype=np.int32)


class OutOfKvError(CapacityError):
    """Error for an allocation without enough free pages. Nothing has changed; the caller may free pages and retry."""


class Allocation:
    """The pages of one request; made and changed by DcpAllocator only."""

    def __init__(self, pages: np.ndarray, tokens: int, virtual_page: int, shared: int) -> None:
        self.shared = shared  # leading pages that the prefix cache owns: read by this request, and not freed with it
        self._buffer = pages
        self._count = len(pages)
        self._virtual_page = virtual_page
        self.tokens = tokens  # tokens stored; the last page may hold more

    @property
    def pages(self) -> np.ndarray:
        """Return virtual page numbers in token order, int32 [pages]; a view, valid until the next `extend`."""
        return self._buffer[: self._count]

    @property
    def token_capacity(self) -> int:
        """Return the token capacity of its pages."""
        return self._count * self._virtual_page

    def compute_locs(self, start: int, stop: int) -> np.ndarray:
        """Return virtual locations of tokens `start … stop - 1`, int32 [stop - start]."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"tokens {start}…{stop - 1} are not in a request of {self.tokens} tokens")
        tokens = np.arange(start, stop, dtype=np.int32)
        locs: np.ndarray = self._buffer[tokens // self._virtual_page] * self._virtual_page + tokens % self._virtual_page
        return locs

    def add_pages(self, pages: np.ndarray) -> None:
        """Append pages, doubling the buffer so that token-by-token growth stays linear. Called by DcpAllocator."""
        count = self._count + len(pages)
        if count > len(self._buffer):
            grown = np.empty(max(count, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._count] = self.pages
            self._buffer = grown
        self._buffer[self._count : count] = pages
        self._count = count

    def share_pages(self, pages: np.ndarray) -> np.ndarray:
        """Replace the first pages by the prefix cache's `pages`; return the own pages that they replace. Called by
        DcpAllocator.
        """
        kept = self._buffer[self.shared : len(pages)]
        duplicates: np.ndarray = kept[kept != pages[self.shared :]].copy()
        self._buffer[: len(pages)] = pages
        self.shared = len(pages)
        return duplicates

    def clear(self) -> None:
        """Drop all pages and tokens. Called by DcpAllocator."""
        self._count = self.tokens = self.shared = 0


class DcpAllocator:
    """Hands out virtual pages 1 … pages-1. Exhaustion raises OutOfKvError, misuse ValueError.

    Deterministic: ranks that make the same calls get the same pages without talking to each other.
    """

    def __init__(self, pages: int, page_size: int, dcp: int, interleave: int = 1) -> None:
        if pages < 2:  # noqa: PLR2004 - the padding page and one to use
            raise ValueError(f"a KV pool of {pages} pages has no page besides the padding page")
        if page_size < 1 or dcp < 1 or interleave < 1:
            raise ValueError(f"page size {page_size}, dcp {dcp} and interleave {interleave} must be positive")
        if page_size % interleave:
            raise ValueError(f"a stripe of {interleave} tokens does not divide a page of {page_size}")
        if pages * page_size * dcp > LOCATIONS:
            raise ValueError(f"{pages} pages of {page_size} rows on {dcp} ranks do not fit 32-bit locations")
        self.pages = pages
        self.page_size = page_size
        self.dcp = dcp
        self.interleave = interleave
        self.virtual_page = page_size * dcp  # tokens that one virtual page holds
        self.tokens = 0  # stored by requests and the prefix cache; those that they share count once
        self.free_pages = pages - 1  # pages that can still be allocated
        self._live: set[Allocation] = set()
        self._free = np.arange(pages - 1, PADDING_PAGE, -1, dtype=np.int32)  # stack below `free_pages`; may be millions
        self._is_free = np.ones(pages, dtype=bool)  # by page; True for the padding page, so that freeing it fails

    @property
    def used_pages(self) -> int:
        """Return the number of pages held by requests or the prefix cache; the padding page is neither free nor used."""
        return self.pages - 1 - self.free_pages

    def count_pages(self, tokens: int) -> int:
        """Return the number of pages of a request of `tokens` tokens."""
        return -(-tokens // self.virtual_page)

    def compute_fragmentation(self) -> float:
        """Return the share of the allocated rows of all ranks that holds no token; 0 if no row is allocated."""
        rows = self.used_pages * self.virtual_page
        return 1 - self.tokens / rows if rows else 0.0

    def allocate(self, tokens: int, shared: np.ndarray = NO_PAGES) -> Allocation:
        """Allocate pages for a new request of `tokens` tokens; `shared` are its first pages, locked in the prefix
        cache.
        """
        if tokens <= len(shared) * self.virtual_page:
            raise ValueError(f"a request of {tokens} tokens with {len(shared)} pages of them cached needs no memory")
        own = self._allocate_pages(self.count_pages(tokens) - len(shared))
        allocation = Allocation(np.concatenate((shared, own)), tokens, self.virtual_page, len(shared))
        self._live.add(allocation)
        self.tokens += self._count_own_tokens(allocation)
        return allocation

    def share_pages(self, allocation: Allocation, pages: np.ndarray) -> None:
        """Replace the request's first pages by the prefix cache's `pages`.

        Own pages that are replaced by others with the same tokens are freed; all others change their owner.
        """
        self._check_live(allocation)
        if not allocation.shared <= len(pages) <= allocation.tokens // self.virtual_page:
            raise ValueError(f"{len(pages)} full pages cannot be shared by a request of {allocation.tokens} tokens")
        duplicates = allocation.share_pages(pages)
        self._add_free_pages(duplicates)
        self.tokens -= len(duplicates) * self.virtual_page

    def free_evicted(self, pages: np.ndarray) -> None:
        """Take back pages that the prefix cache evicted."""
        self._add_free_pages(pages)
        self.tokens -= len(pages) * self.virtual_page

    def extend(self, allocation: Allocation, tokens: int) -> None:
        """Add `tokens` tokens to a request: fill its last page first, then allocate new pages."""
        self._check_live(allocation)
        if tokens < 0:
            raise ValueError(f"a request cannot grow by {tokens} tokens")
        if allocation.tokens + tokens > allocation.token_capacity:
            allocation.add_pages(
                self._allocate_pages(self.count_pages(allocation.tokens + tokens) - len(allocation.pages))
            )
        allocation.tokens += tokens
        self.tokens += tokens

    def fill(self, allocations: Iterable[Allocation]) -> None:
        """Add a token to the last page of each request. Raise ValueError if that page is full."""
        count = 0
        for allocation in allocations:
            if allocation.tokens % self.virtual_page == 0:
                raise ValueError(f"the last page of a request of {allocation.tokens} tokens has no row left")
            allocation.tokens += 1
            count += 1
        self.tokens += count

    def free(self, allocation: Allocation) -> None:
        """Take a request's pages back. Raises ValueError for one that is not live: freed twice or unknown."""
        self._check_live(allocation)
        self._live.remove(allocation)
        self._add_free_pages(allocation.pages[allocation.shared :][::-1])
        self.tokens -= self._count_own_tokens(allocation)
        allocation.clear()

    def _allocate_pages(self, count: int) -> np.ndarray:
        if count > self.free_pages:
            raise OutOfKvError(
                f"{count} KV pages of {self.virtual_page} tokens are needed and {self.free_pages} are free; "
                "lower --concurrency or --context, or give more with --kv-memory"
            )
        self.free_pages -= count
        taken = self._free[self.free_pages : self.free_pages + count][::-1].copy()
        self._is_free[taken] = False
        return taken

    def _add_free_pages(self, pages: np.ndarray) -> None:
        if self._is_free[pages].any() or (len(pages) > 1 and len(np.unique(pages)) < len(pages)):
            raise ValueError("pages are freed that no request holds")
        self._is_free[pages] = True
        self._free[self.free_pages : self.free_pages + len(pages)] = pages
        self.free_pages += len(pages)

    def _count_own_tokens(self, allocation: Allocation) -> int:
        return allocation.tokens - allocation.shared * self.virtual_page

    def _check_live(self, allocation: Allocation) -> None:
        if allocation not in self._live:
            raise ValueError("this allocation is not live here; it was freed, or comes from another pool")
