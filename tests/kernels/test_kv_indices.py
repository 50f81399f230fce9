"""Compare page tables made on the device with the reference, with the allocator's pages, and with worked-out examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.engine.request_pool import RequestPool
from dcpbench.kernels.kv_indices import DcpShard, write_pages, write_pages_fused, write_pages_reference
from dcpbench.points import layout
from dcpbench.points.batches import PADDING_SLOT
from dcpbench.serving.allocator import DcpAllocator

CONTEXT = 96
UNTOUCHED = -7  # fills buffers before a call; no page number
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_batch(lengths: list[int], shard: DcpShard, index: torch.dtype, device: torch.device):
    """Return a request pool with requests that grew in turns, so that their pages are mixed, and slots with padding at
    the end.
    """
    pool = RequestPool(len(lengths) + 1, CONTEXT, device)
    allocator = DcpAllocator(512, shard.page_size, shard.dcp, shard.interleave)
    allocations = [allocator.allocate(1) if length else None for length in lengths]
    for _ in range(CONTEXT):
        for allocation, length in zip(allocations, lengths, strict=True):
            if allocation is not None and allocation.tokens < length:
                allocator.extend(allocation, 1)
    slots = [pool.allocate_slot() for _ in lengths]
    for slot, allocation in zip(slots, allocations, strict=True):
        pool.host[slot] = -1  # entries behind a request's tokens must not be read as locations
        pool.table[slot] = -1
        if allocation is not None:
            pool.set_locs(slot, 0, allocation.compute_locs(0, allocation.tokens))
    slots_B = torch.tensor([*slots, PADDING_SLOT], dtype=index, device=device)
    lengths_B = torch.tensor([*lengths, 1], dtype=index, device=device)
    return pool.table, slots_B, lengths_B, allocations


def make_buffers(batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return page tables, packed indices, indptr and local lengths, all filled with UNTOUCHED."""
    sizes = ((batch, CONTEXT), (batch * CONTEXT,), (batch + 1,), (batch,))
    return tuple(torch.full(size, UNTOUCHED, dtype=torch.int32, device=device) for size in sizes)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, CONTEXT), min_size=1, max_size=5),
    dcp=st.sampled_from([1, 2, 3, 8]),
    interleave=st.sampled_from([1, 2, 4]),
    stripes_of_page=st.sampled_from([1, 2]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_table_and_packed_indices_equal_the_reference(lengths, dcp, interleave, stripes_of_page, index):
    """Check every rank of every layout; unused parts of the buffers must not change."""
    for rank in range(dcp):
        shard = DcpShard(rank=rank, dcp=dcp, interleave=interleave, page_size=interleave * stripes_of_page)
        table, slots, lengths_B, _ = make_batch(lengths, shard, index, DEVICE)
        wanted, got = (make_buffers(len(slots), DEVICE) for _ in range(2))
        for (pages, indices, indptr, local), fill in ((wanted, write_pages_reference), (got, write_pages_fused)):
            fill(pages, None, local, table, slots, lengths_B, shard)
            assert local.tolist() == [layout.compute_local_length(n, rank, dcp, interleave) for n in [*lengths, 1]]
            local.fill_(UNTOUCHED)
            fill(indices, indptr, local, table, slots, lengths_B, shard)
        for one, other in zip(wanted, got, strict=True):
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize(("dcp", "interleave", "page_size"), [(1, 1, 1), (4, 1, 1), (4, 1, 8), (2, 4, 8), (8, 2, 2)])
def test_pages_are_those_of_the_allocator(dcp, interleave, page_size, device):
    """Expect each virtual page to be one page of the same number on each rank, as the host plans."""
    lengths = [37, 0, 96, 5]
    for rank in range(dcp):
        shard = DcpShard(rank=rank, dcp=dcp, interleave=interleave, page_size=page_size)
        table, slots, lengths_B, allocations = make_batch(lengths, shard, torch.int64, device)
        pages, indices, indptr, local = make_buffers(len(slots), device)
        write_pages(pages, None, local, table, slots, lengths_B, shard)
        write_pages(indices, indptr, local, table, slots, lengths_B, shard)
        for b, allocation in enumerate(allocations):
            rows = int(local[b])
            expected = allocation.pages[: -(-rows // page_size)].tolist() if allocation else []
            assert pages[b, : len(expected)].tolist() == expected
            assert indices[indptr[b] : indptr[b + 1]].tolist() == expected


def test_padding_row_reads_the_padding_page_on_the_owner_of_location_0(device):
    """Use slot 0 with one token: its only row is row 0 of rank 0; other ranks have none."""
    for rank, rows in ((0, 1), (1, 0)):
        shard = DcpShard(rank=rank, dcp=2)
        table, slots, lengths, _ = make_batch([3], shard, torch.int32, device)
        pages, _, _, local = make_buffers(len(slots), device)
        write_pages(pages, None, local, table, slots, lengths, shard)
        assert local.tolist() == [[2, 1], [1, 0]][rank]
        assert pages[1, :rows].tolist() == [0] * rows


def test_pages_of_one_request_on_two_ranks(device):
    """Use dcp 2 and page 2: a virtual page has 4 locations. A request of 7 tokens on pages 3 and 1 has locations
    12…15, 4 5 6. Rank 1 owns 13 15 5, in rows 6 7 2, on pages 3 3 1; rank 0 owns 12 14 4 6, in rows 6 7 2 3.
    """
    table = torch.zeros(2, 8, dtype=torch.int32, device=device)
    table[1, :7] = torch.tensor([12, 13, 14, 15, 4, 5, 6])
    for rank, rows in ((0, 4), (1, 3)):
        pages, _, _, local = make_buffers(1, device)
        slots, lengths = (torch.tensor([n], device=device) for n in (1, 7))
        write_pages(pages, None, local, table, slots, lengths, DcpShard(rank=rank, dcp=2, page_size=2))
        assert local.tolist() == [rows]
        assert pages[0, :3].tolist() == [3, 1, UNTOUCHED]


def test_request_longer_than_one_program_is_complete(device):
    """Use 2,500 pages, which are three programs of 1,024."""
    locs = np.random.default_rng(0).permutation(2600).astype(np.int32)
    table = torch.from_numpy(locs).to(device).view(1, -1)
    pages = torch.full((1, 2600), UNTOUCHED, dtype=torch.int32, device=device)
    slots, lengths = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 2500))
    write_pages_fused(pages, None, torch.zeros_like(lengths), table, slots, lengths, DcpShard(rank=0, dcp=1))
    assert pages[0, :2500].tolist() == locs[:2500].tolist()
    assert pages[0, 2500:].tolist() == [UNTOUCHED] * 100


@pytest.mark.gpu
def test_table_entries_beyond_two_to_the_31_elements_are_read_and_written():
    """Use slot 16,500 of rows of 131,072: element 2,162,688,000, past 2^31 = 2,147,483,648; also for request 16,500."""
    context, slot = 131_072, 16_500
    table = torch.zeros(slot + 1, context, dtype=torch.int32, device="cuda")
    table[slot] = torch.arange(context, dtype=torch.int32, device="cuda")
    slots = torch.full((slot + 1,), 0, device="cuda")
    lengths = torch.zeros(slot + 1, dtype=torch.int32, device="cuda")
    slots[slot], lengths[slot] = slot, context
    pages, local = torch.zeros_like(table), torch.zeros_like(lengths)
    write_pages_fused(pages, None, local, table, slots, lengths, DcpShard(rank=0, dcp=1))
    assert torch.equal(pages[slot], table[slot])
    assert int(pages[:slot].count_nonzero()) == 0


@pytest.mark.gpu
def test_captured_graph_uses_lengths_changed_in_place():
    """Change a length on the device before the replay, because a graph holds addresses, not lengths."""
    shard = DcpShard(rank=0, dcp=2)
    table, slots, lengths, _ = make_batch([9], shard, torch.int32, torch.device("cuda"))
    pages, indices, indptr, local = make_buffers(2, torch.device("cuda"))
    write_pages(indices, indptr, local, table, slots, lengths, shard)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_pages(pages, None, local, table, slots, lengths, shard)
        write_pages(indices, indptr, local, table, slots, lengths, shard)
    lengths[0] = 4
    graph.replay()
    assert local.tolist() == [2, 1]
    assert indptr.tolist() == [0, 2, 3]
    assert pages[0, 2:].tolist() == [UNTOUCHED] * (CONTEXT - 2)
