"""The KV pool, the purpose of its padding page, and copies of tables that never wait for a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.request_pool import RequestPool, copy_async
from dcpbench.errors import CapacityError


def run_graph_step(request_pool: RequestPool, kv: KvPool, slots: list[int], position: int, rows: int) -> None:
    """Write KV like a captured decode step: each row at the location of its request's token, also padded rows (slot 0)."""
    padded = torch.tensor(slots + [0] * (rows - len(slots)))
    locs = request_pool.table[padded, position].long()
    values = torch.arange(1.0, rows + 1)[:, None].expand(-1, kv.data.shape[-1])
    for loc, value in zip(locs, values, strict=True):
        kv.get_rows(0)[loc] = value


class TestPaddingRow:
    """A step has three graph rows, of which one is a request and two are padding."""

    @pytest.fixture
    def kv(self) -> KvPool:
        """Return a pool of eight pages of one row."""
        return KvPool(layers=1, pages=8, page_size=1, width=2, dtype=torch.float32, device="cpu")

    def add_request(self, request_pool: RequestPool, locs: list[int]) -> int:
        """Return the slot of a request with tokens at `locs`."""
        slot = request_pool.allocate_slot()
        request_pool.set_locs(slot, 0, np.array(locs))
        return slot

    def test_padded_rows_write_only_to_the_padding_page(self, kv: KvPool) -> None:
        request_pool = RequestPool(2, 4, "cpu")
        first, second = self.add_request(request_pool, [1, 2]), self.add_request(request_pool, [3, 4])
        kv.get_rows(0)[1:] = 9
        run_graph_step(request_pool, kv, [second], position=1, rows=3)
        assert (first, second) == (1, 2)
        assert kv.get_rows(0)[2].tolist() == [9, 9], "the waiting request's token is intact"
        assert kv.get_rows(0)[4].tolist() == [1, 1], "the running request's is written"
        assert kv.get_rows(0)[0].any(), "padding rows wrote to the padding page"


class TestKvPool:
    def test_layer_is_a_contiguous_view(self) -> None:
        pool = KvPool(layers=3, pages=4, page_size=2, width=5, dtype=torch.bfloat16, device="cpu")
        assert pool.data.nbytes == 3 * 4 * 2 * 5 * 2
        assert pool.data[1].shape == (4, 2, 5)
        assert pool.data[1].is_contiguous()
        pool.get_rows(1)[3] = 1
        assert pool.data[1][1, 1].tolist() == [1] * 5
        assert pool.data.sum() == 5, "no other row changed"

    @given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 4))
    def test_rows_are_consecutive_pages(self, layers: int, pages: int, page_size: int) -> None:
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
    """Host tables are copied to the device in stream order, without waiting."""

    def test_request_pool_never_synchronises(self) -> None:
        """torch raises on every synchronising call while the debug mode is `error`."""
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

    def test_pending_copy_keeps_its_numbers_when_the_host_array_changes(self) -> None:
        """The device is kept busy, so all copies are still pending when the host array changes."""
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

    def test_pool_larger_than_the_device_raises_capacity_error(self) -> None:
        pages = torch.cuda.get_device_properties(0).total_memory // (61 * 576 * 2) + 1
        with pytest.raises(CapacityError, match=r"KV pool of .* does not fit on cuda"):
            KvPool(61, pages, 1, 576, torch.bfloat16, "cuda")
