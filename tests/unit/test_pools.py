"""Page allocator and request pool: nothing is lost, shared or misplaced, and row 0 is padding."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcpbench.engine.request_pool import OutOfSlotsError, RequestPool
from dcpbench.errors import CapacityError
from dcpbench.points.layout import compute_local_length, get_owner, get_row, list_local_tokens
from dcpbench.serving.allocator import Allocation, DcpAllocator, OutOfKvError


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates, extends and frees requests at random, in a pool of any geometry; a dict of lengths is the
    model. Full pages become pages of a prefix cache: other requests begin with them, and the cache frees them when no
    request uses them.
    """

    @initialize(
        pages=st.integers(2, 24),
        stripes=st.integers(1, 4),
        dcp=st.integers(1, 5),
        interleave=st.sampled_from([1, 2, 3]),
    )
    def make(self, pages: int, stripes: int, dcp: int, interleave: int) -> None:
        """Make a pool with whole stripes per page."""
        self.pool = DcpAllocator(pages, stripes * interleave, dcp, interleave)
        self.live: dict[Allocation, int] = {}
        self.dead: list[Allocation] = []
        self.cached: list[int] = []
        """Pages of the prefix cache."""

    @rule(tokens=st.integers(1, 60), data=st.data())
    def alloc(self, tokens: int, data: st.DataObject) -> None:
        """Allocate a request with some cached pages and at least one token that is not cached."""
        max_shared = min(len(self.cached), (tokens - 1) // self.pool.virtual_page)
        shared = data.draw(st.permutations(self.cached))[: data.draw(st.integers(0, max_shared))]
        before = self.pool.free_pages
        try:
            request = self.pool.allocate(tokens, np.array(shared, dtype=np.int32))
        except OutOfKvError:
            assert self.pool.count_pages(tokens) - len(shared) > before == self.pool.free_pages
        else:
            self.live[request] = tokens
            assert request.pages[: request.shared].tolist() == shared
            assert self.pool.free_pages == before - self.pool.count_pages(tokens) + len(shared)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Share a request's full pages with the cache, or replace some of them by pages that the cache already has."""
        request = data.draw(st.sampled_from(list(self.live)))
        full = self.live[request] // self.pool.virtual_page
        count = data.draw(st.integers(request.shared, max(request.shared, full)))
        had, pages = request.pages[request.shared : count].tolist(), request.pages[:count].copy()
        others = [page for page in self.cached if page not in pages]
        for place in range(request.shared, count):
            if others and data.draw(st.booleans()):
                pages[place] = others.pop()
        free = self.pool.free_pages
        self.pool.share_pages(request, pages)
        replaced = [page for page in had if page not in pages]
        self.cached += [page for page in had if page in pages]
        assert request.pages[:count].tolist() == pages.tolist()
        assert (request.shared, self.pool.free_pages) == (count, free + len(replaced))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Free pages of the cache that no request begins with."""
        read = {int(page) for request in self.live for page in request.pages[: request.shared]}
        idle = [page for page in self.cached if page not in read]
        evicted = idle[: data.draw(st.integers(0, len(idle)))]
        self.pool.free_evicted(np.array(evicted, dtype=np.int32))
        self.cached = [page for page in self.cached if page not in evicted]
        if evicted:
            with pytest.raises(ValueError, match="freed that no request holds"):
                self.pool.free_evicted(np.array(evicted[:1], dtype=np.int32))

    @precondition(lambda self: self.live)
    @rule(tokens=st.integers(0, 30), data=st.data())
    def extend(self, tokens: int, data: st.DataObject) -> None:
        """Extend a request: its locations are unchanged, and a new page is taken only when the last one is full."""
        request = data.draw(st.sampled_from(list(self.live)))
        had = self.live[request]
        before, free = request.compute_locs(0, had), self.pool.free_pages
        spare = len(request.pages) * self.pool.virtual_page - had
        more = -(-max(tokens - spare, 0) // self.pool.virtual_page)
        try:
            self.pool.extend(request, tokens)
        except OutOfKvError:
            assert more > free == self.pool.free_pages
            assert request.tokens == had
        else:
            self.live[request] += tokens
            assert self.pool.free_pages == free - more
        assert np.array_equal(request.compute_locs(0, had), before)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.live)))
        del self.live[request]
        self.pool.free(request)
        self.dead.append(request)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def use_after_free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.dead))
        with pytest.raises(ValueError, match="not live"):
            self.pool.free(request)
        with pytest.raises(ValueError, match="not live"):
            self.pool.extend(request, 1)

    @invariant()
    def check_pages_have_one_owner(self) -> None:
        used = [*self.cached, *(int(page) for request in self.live for page in request.pages[request.shared :])]
        assert len(used) == len(set(used)) == self.pool.used_pages
        assert all(1 <= page < self.pool.pages for page in used)
        assert self.pool.used_pages + self.pool.free_pages == self.pool.pages - 1

    @invariant()
    def check_tokens_and_locations_have_the_same_owner(self) -> None:
        pool = self.pool
        for request, tokens in self.live.items():
            locs = request.compute_locs(0, tokens)
            assert len(locs) == len(set(locs.tolist())) == tokens
            for token, loc in enumerate(locs.tolist()):
                assert token % pool.dcp == loc % pool.dcp
                assert get_owner(token, pool.dcp, pool.interleave) == get_owner(loc, pool.dcp, pool.interleave)

    @invariant()
    def check_rows_of_ranks_follow_from_pages(self) -> None:
        """Check that local token j of any rank is in row pages[j // page_size] · page_size + j % page_size."""
        pool = self.pool
        for request, tokens in self.live.items():
            locs = request.compute_locs(0, tokens).tolist()
            for rank in range(pool.dcp):
                local = list_local_tokens(tokens, rank, pool.dcp, pool.interleave)
                assert len(local) == compute_local_length(tokens, rank, pool.dcp, pool.interleave)
                rows = [get_row(locs[token], pool.dcp, pool.interleave) for token in local]
                size = pool.page_size
                assert rows == [request.pages[j // size] * size + j % size for j in range(len(local))]

    @invariant()
    def check_fragmentation(self) -> None:
        page = self.pool.virtual_page
        own = [count - request.shared * page for request, count in self.live.items()]
        tokens = sum(own) + len(self.cached) * page
        pages = sum(-(-count // page) for count in own) + len(self.cached)
        assert self.pool.tokens == tokens
        expected = (pages * self.pool.virtual_page - tokens) / (pages * self.pool.virtual_page) if pages else 0.0
        assert self.pool.compute_fragmentation() == pytest.approx(expected, abs=1e-12)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestAllocator:
    def test_published_example_after_the_padding_page(self) -> None:
        """Pages have 1 row and N is 4: r1 has four tokens, then r2 three, then r1 two more. Without the padding page r1
        is at 0 1 2 3 8 9 and r2 at 4 5 6; with it, all are 4 higher.
        """
        pool = DcpAllocator(pages=8, page_size=1, dcp=4)
        r1 = pool.allocate(4)
        r2 = pool.allocate(3)
        pool.extend(r1, 2)
        assert (r1.compute_locs(0, 6) - 4).tolist() == [0, 1, 2, 3, 8, 9]
        assert (r2.compute_locs(0, 3) - 4).tolist() == [4, 5, 6]
        assert pool.compute_fragmentation() == 3 / 12, "one row after r2, two after r1"

    def test_locations_are_32_bit_integers(self) -> None:
        request = DcpAllocator(pages=200_000, page_size=1, dcp=8).allocate(128_000)
        assert request.compute_locs(0, 128_000).dtype == request.pages.dtype == np.int32
        assert request.compute_locs(127_999, 128_000).tolist() == [8 + 127_999], (
            "pages of a new pool are allocated in order"
        )

    def test_freed_pages_are_allocated_next(self) -> None:
        """The page used last is most likely still cached, and ranks agree without communication."""
        pool = DcpAllocator(pages=8, page_size=4, dcp=2)
        first = pool.allocate(20)
        pages = first.pages.tolist()
        pool.free(first)
        assert pool.allocate(20).pages.tolist() == pages == [1, 2, 3]

    def test_extending_by_single_tokens_equals_one_allocation(self) -> None:
        slow, fast = DcpAllocator(64, 4, 2), DcpAllocator(64, 4, 2)
        grown = slow.allocate(1)
        for _ in range(99):
            slow.extend(grown, 1)
        assert np.array_equal(grown.compute_locs(0, 100), fast.allocate(100).compute_locs(0, 100))

    @pytest.mark.parametrize(
        ("geometry", "message"),
        [
            ((1, 1, 1), "no page besides the padding page"),
            ((8, 0, 1), "must be positive"),
            ((8, 1, 0), "must be positive"),
            ((8, 4, 2, 3), "a stripe of 3 tokens does not divide a page of 4"),
            ((1 << 28, 4, 4), "do not fit 32-bit locations"),
        ],
        ids=str,
    )
    def test_impossible_geometries_raise_value_error(self, geometry: tuple[int, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DcpAllocator(*geometry)

    def test_out_of_kv_error_has_free_pages_and_changes_nothing(self) -> None:
        pool = DcpAllocator(pages=4, page_size=2, dcp=2)
        with pytest.raises(OutOfKvError, match="4 KV pages of 4 tokens are needed and 3 are free"):
            pool.allocate(13)
        assert (pool.free_pages, pool.tokens) == (3, 0)
        assert issubclass(OutOfKvError, CapacityError)

    @pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 7)], ids=str)
    def test_locations_of_missing_tokens_raise_value_error(self, span: tuple[int, int]) -> None:
        """Unused rows of a page belong to the request, but have no token."""
        with pytest.raises(ValueError, match="not in a request of 6 tokens"):
            DcpAllocator(8, 1, 4).allocate(6).compute_locs(*span)

    def test_allocation_of_another_pool_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="another pool"):
            DcpAllocator(8, 1, 4).free(DcpAllocator(8, 1, 4).allocate(3))

    def test_request_without_tokens_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="0 tokens"):
            DcpAllocator(8, 1, 4).allocate(0)

    def test_completely_cached_request_raises_value_error(self) -> None:
        """The last token has to be computed and needs its own row."""
        with pytest.raises(ValueError, match="a request of 8 tokens with 2 pages of them cached needs no memory"):
            DcpAllocator(8, 1, 4).allocate(8, np.array([3, 4], dtype=np.int32))

    def test_sharing_an_incomplete_page_raises_value_error(self) -> None:
        """Seven tokens fill one page of four."""
        pool = DcpAllocator(8, 1, 4)
        request = pool.allocate(7)
        with pytest.raises(ValueError, match="2 full pages cannot be shared by a request of 7 tokens"):
            pool.share_pages(request, request.pages.copy())

    @pytest.mark.parametrize("pages", [[0], [5], [1, 1]], ids=str)
    def test_evicting_padding_free_or_duplicate_pages_raises_value_error(self, pages: list[int]) -> None:
        """Pages 1 and 2 are in use."""
        pool = DcpAllocator(8, 1, 4)
        pool.allocate(8)
        with pytest.raises(ValueError, match="freed that no request holds"):
            pool.free_evicted(np.array(pages, dtype=np.int32))
        assert (pool.free_pages, pool.tokens) == (5, 8)


class SlotMachine(RuleBasedStateMachine):
    """Allocates, writes and frees slots of a request pool at random."""

    @initialize(size=st.integers(1, 12))
    def make(self, size: int) -> None:
        self.pool, self.size = RequestPool(size, 16, "cpu"), size
        self.live: dict[int, list[int]] = {}

    @rule()
    def alloc(self) -> None:
        if len(self.live) == self.size:
            with pytest.raises(OutOfSlotsError):
                self.pool.allocate_slot()
        else:
            slot = self.pool.allocate_slot()
            assert slot not in self.live
            self.live[slot] = []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), start=st.integers(0, 12), locs=st.lists(st.integers(1, 1 << 30), min_size=1, max_size=4))
    def write(self, data: st.DataObject, start: int, locs: list[int]) -> None:
        slot = data.draw(st.sampled_from(list(self.live)))
        self.pool.set_locs(slot, start, np.array(locs))
        assert self.pool.table[slot, start : start + len(locs)].tolist() == locs

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.live)))
        del self.live[slot]
        self.pool.free_slot(slot)
        with pytest.raises(ValueError, match=f"request slot {slot} is not in use"):
            self.pool.free_slot(slot)

    @rule()
    def clear(self) -> None:
        self.pool.free_all()
        self.live = {}

    @invariant()
    def check_all_slots_exist_and_padding_is_unused(self) -> None:
        assert self.pool.available == self.size - len(self.live)
        assert 0 not in self.live
        assert not self.pool.table[0].any()

    @invariant()
    def check_host_and_device_agree(self) -> None:
        assert self.pool.table.dtype == torch.int32
        assert np.array_equal(self.pool.host, self.pool.table.numpy())


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestRequestPools:
    def test_slots_start_at_one(self) -> None:
        pool = RequestPool(3, 4, "cpu")
        assert [pool.allocate_slot() for _ in range(3)] == [1, 2, 3]
        assert pool.table.shape == (4, 4)

    def test_too_long_row_is_refused_before_writing(self) -> None:
        pool = RequestPool(3, 4, "cpu")
        slot = pool.allocate_slot()
        with pytest.raises(ValueError, match="do not fit rows of 4 tokens"):
            pool.set_locs(slot, 2, np.array([1, 2, 3]))
        assert not pool.table.any()

    def test_writing_the_padding_row_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="slot 0 is not in use"):
            RequestPool(3, 4, "cpu").set_locs(0, 0, np.array([7]))

    def test_full_pool_raises_out_of_slots_error(self) -> None:
        pool = RequestPool(1, 4, "cpu")
        pool.allocate_slot()
        with pytest.raises(OutOfSlotsError, match="all 1 request slots are in use"):
            pool.allocate_slot()

    def test_empty_pool_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="a pool of 0 request slots"):
            RequestPool(0, 4, "cpu")
