"""The KV pool, what its padding page is for, and that filling tables never waits for a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.request_pool import RequestPool, copy_async
from dcpbench.errors import CapacityError


def graph_step(requests: RequestPool, kv: KvPool, slots: list[int], position: int, rows: int) -> None:
    """What a captured decode step does: each row writes the KV of its request's token, padded rows (slot 0) as well."""
    padded = torch.tensor(slots + [0] * (rows - len(slots)))
    locs = requests.table[padded, position].long()
    values = torch.arange(1.0, rows + 1)[:, None].expand(-1, kv.data.shape[-1])
    for at, value in zip(locs, values, strict=True):
        kv.get_rows(0)[at] = value


class TestPaddingRow:
    """A step of three graph rows, of which one is a request and two are padding."""

    @pytest.fixture
    def kv(self) -> KvPool:
        """Eight pages of one row."""
        return KvPool(layers=1, pages=8, page_size=1, width=2, dtype=torch.float32, device="cpu")

    def start(self, requests: RequestPool, locs: list[int]) -> int:
        """A request whose tokens lie at `locs`."""
        slot = requests.allocate_slot()
        requests.set_locs(slot, 0, np.array(locs))
        return slot

    def test_with_it_padded_rows_write_where_nobody_reads(self, kv: KvPool) -> None:
        requests = RequestPool(2, 4, "cpu")
        first, second = self.start(requests, [1, 2]), self.start(requests, [3, 4])
        kv.get_rows(0)[1:] = 9
        graph_step(requests, kv, [second], position=1, rows=3)
        assert (first, second) == (1, 2)
        assert kv.get_rows(0)[2].tolist() == [9, 9], "the waiting request's token is intact"
        assert kv.get_rows(0)[4].tolist() == [1, 1], "the running request's is written"
        assert kv.get_rows(0)[0].any(), "padding rows wrote to the padding page"

    def test_without_it_padded_rows_overwrite_a_live_request(self, kv: KvPool) -> None:
        """Slot 0 belongs to the first request, and padded rows write its token 1."""
        requests = RequestPool(2, 4, "cpu", padding=False)
        first, second = self.start(requests, [1, 2]), self.start(requests, [3, 4])
        kv.get_rows(0)[1:] = 9
        graph_step(requests, kv, [second], position=1, rows=3)
        assert (first, second) == (0, 1)
        assert kv.get_rows(0)[2].tolist() == [3, 3], "the corruption: the third graph row's value in the first request"


class TestKvPool:
    def test_a_layer_is_a_contiguous_view(self) -> None:
        pool = KvPool(layers=3, pages=4, page_size=2, width=5, dtype=torch.bfloat16, device="cpu")
        assert pool.data.nbytes == 3 * 4 * 2 * 5 * 2
        assert pool.data[1].shape == (4, 2, 5)
        assert pool.data[1].is_contiguous()
        pool.get_rows(1)[3] = 1
        assert pool.data[1][1, 1].tolist() == [1] * 5
        assert pool.data.sum() == 5, "and nothing else was touched"

    @given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 4))
    def test_rows_are_pages_laid_end_to_end(self, layers: int, pages: int, page_size: int) -> None:
        pool = KvPool(layers, pages, page_size, 3, torch.float32, "cpu")
        pool.data.normal_()
        assert torch.equal(pool.get_rows(layers - 1), pool.data[layers - 1].flatten(0, 1))
        assert torch.equal(pool.get_all_rows()[layers - 1], pool.get_rows(layers - 1))

    def test_sizes_beyond_32_bits_are_addressed(self) -> None:
        """61 layers of 100,000 rows of 576 are 3.5e9 numbers; `meta` tensors have strides but no memory."""
        pool = KvPool(61, 100_000, 1, 576, torch.bfloat16, "meta")
        assert pool.data.nbytes == 7_027_200_000
        assert pool.data[60].storage_offset() == 60 * 100_000 * 576 > 1 << 31


@pytest.mark.gpu
class TestOnGpu:
    """Host-side tables reach the device in stream order, and nothing waits."""

    def test_no_pool_waits_for_the_device(self) -> None:
        """torch raises on every call that synchronises while the debug mode is `error`."""
        pool = RequestPool(4, 128_000, "cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            slot = pool.allocate_slot()
            pool.set_locs(slot, 0, np.arange(128_000))
            pool.free_slot(slot)
            pool.free_all()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pool.table[slot].tolist() == list(range(128_000))

    def test_a_copy_in_flight_keeps_its_numbers_when_the_host_writes_new_ones(self) -> None:
        """The device is kept busy, so that all copies are still to come when the host array changes."""
        busy = torch.randn(8192, 8192, device="cuda")
        host = np.zeros(100_000, dtype=np.int32)
        out = torch.empty(20, 100_000, dtype=torch.int32, device="cuda")
        for _ in range(5):
            busy = busy @ busy
        for value in range(20):
            host[:] = value
            copy_async(host, out[value])
        host[:] = -1
        assert torch.equal(out.cpu(), torch.arange(20, dtype=torch.int32)[:, None].expand(-1, 100_000))

    def test_a_pool_larger_than_the_device_is_our_error(self) -> None:
        pages = torch.cuda.get_device_properties(0).total_memory // (61 * 576 * 2) + 1
        with pytest.raises(CapacityError, match=r"KV pool of .* does not fit on cuda"):
            KvPool(61, pages, 1, 576, torch.bfloat16, "cuda")
