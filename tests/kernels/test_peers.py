"""Test kernels that read peers' memory on one GPU: each rank has a stream and a buffer, and all kernels run at the
same time. Several processes are tested in tests/distributed/test_symm.py; here are a GPU's own instructions, and sizes
that would take an interpreter too long. More than 4 ranks would not fit on a GPU at the same time.
"""

import pytest
import torch

from dcpbench.kernels.head_order import to_head_order_reference
from dcpbench.kernels.symm_mem import BufferAllocator, Peers
from dcpbench.kernels.symm_mem.all_reduce import add_up_reference, reduce_one_shot, reduce_two_shot
from dcpbench.kernels.symm_mem.barrier import launch_fence
from dcpbench.kernels.symm_mem.gather import gather_queries
from dcpbench.kernels.symm_mem.pull_merge import merge_from_peers, merge_reference

BYTES = 1 << 22
pytestmark = pytest.mark.gpu


class Ranks:
    """Ranks of one process: `each` starts a function of every rank on its own stream, and waits for all."""

    def __init__(self, size, nbytes=BYTES):
        own = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(size)]
        self.peers = [
            Peers(rank, tuple(own[(rank + n) % size].data_ptr() for n in range(size)), own[rank])
            for rank in range(size)
        ]
        self.allocators = [BufferAllocator(buffer) for buffer in own]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        for stream in self.streams:  # an allocation from the driver could wait for kernels that wait for each other
            with torch.cuda.stream(stream):
                torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
                torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def take(self, *shape, dtype):
        """Return a tensor of each rank, at the same offset in all buffers."""
        return [allocator.allocate_tensor(*shape, dtype=dtype) for allocator in self.allocators]

    def counters(self):
        """Return the counters of each rank."""
        return [allocator.allocate_counters(len(self.peers)) for allocator in self.allocators]

    def each(self, function):
        """Return function(rank) for all ranks, run at the same time."""
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(function(rank))
        torch.cuda.synchronize()
        return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("heads", "width"), [(2, 40), (16, 576), (3, 7)], ids=str)
def test_repeated_gathers_return_all_heads_in_order(size, heads, width):
    """Reuse the counters for batches of changing size; rows past the batch must stay NaN."""
    ranks = Ranks(size)
    counters, whole = ranks.counters(), ranks.take(9, heads * size, width, dtype=torch.bfloat16)
    for batch in (9, 1, 4):
        q = [torch.randn(batch, heads, width, device="cuda").bfloat16() for _ in range(size)]
        for mine in whole:
            mine.fill_(float("nan"))
        ranks.each(
            lambda rank, q=q: gather_queries(ranks.peers[rank], counters[rank], q[rank], whole[rank][: len(q[rank])])
        )
        want = to_head_order_reference(torch.stack(q))
        assert all(torch.equal(mine[:batch], want) for mine in whole)
        assert all(mine[batch:].isnan().all() for mine in whole)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("heads", "width"), [(2, 24), (16, 512), (3, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_merge_of_peers_memory_agrees_with_fp64(size, heads, width, dtype):
    """Use NaN in partial outputs without rows, on some ranks or on all; fp32 sums of 4 terms err by 1e-6 at most."""
    ranks = Ranks(size, 1 << 24)
    counters = ranks.counters()
    o, lse = ranks.take(5, heads * size, width, dtype=dtype), ranks.take(5, heads * size, dtype=torch.float32)
    for batch in (5, 1, 2):
        for mine, rank_lse in zip(o, lse, strict=True):
            mine.normal_()
            rank_lse.normal_(std=3)
            empty = torch.rand_like(rank_lse) < 0.3
            empty[0, 0] = True
            mine[empty], rank_lse[empty] = float("nan"), float("-inf")
        out = [torch.full((heads, batch, width), float("nan"), device="cuda") for _ in range(size)]
        ranks.each(
            lambda rank, batch=batch, out=out: merge_from_peers(
                ranks.peers[rank], counters[rank], o[rank][:batch], lse[rank][:batch], out[rank]
            )
        )
        partials = (
            torch.stack([mine[:batch] for mine in o]).double(),
            torch.stack([rank_lse[:batch] for rank_lse in lse]).double(),
        )
        for rank in range(size):
            assert torch.allclose(out[rank].double(), merge_reference(*partials, rank), atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_bitwise_equal_on_all_ranks(size):
    """Change the size from call to call, up to several rounds of all blocks, and use one that no vector divides."""
    ranks = Ranks(size)
    once, twice = ranks.counters(), ranks.counters()
    slots = ranks.take(2, 1 << 19, dtype=torch.uint8)
    addends, sums = ranks.take(1 << 20, dtype=torch.uint8), ranks.take(1 << 19, dtype=torch.uint8)
    for shape in ((1, 7168), (30, 7168), (3, 5), (30, 7168), (30, 7168), (1, 7168)):
        x = [torch.randn(shape, device="cuda").bfloat16() for _ in range(size)]
        want = add_up_reference(torch.stack(x))
        for got in ranks.each(lambda rank, x=x: reduce_one_shot(ranks.peers[rank], once[rank], slots[rank], x[rank])):
            assert torch.equal(got, want)
        for got in ranks.each(
            lambda rank, x=x: reduce_two_shot(ranks.peers[rank], twice[rank], addends[rank], sums[rank], x[rank])
        ):
            assert torch.equal(got, want)


def test_fence_delays_a_rank_until_the_other_arrives():
    """Let rank 1 write late and then fence; rank 0 must copy the written value after its own fence."""
    ranks = Ranks(2)
    counters, word = ranks.counters(), ranks.take(4, dtype=torch.int64)
    copies = torch.zeros(4, dtype=torch.int64, device="cuda")

    def step(rank):
        if rank == 1:
            torch.cuda._sleep(10_000_000)
            word[1].fill_(7)
        launch_fence(ranks.peers[rank], counters[rank])
        if rank == 0:
            copies.copy_(word[1])

    torch.cuda._sleep(1)  # CUDA loads a kernel at its first call, which may wait for kernels that wait for each other
    word[1].fill_(0)
    torch.cuda.synchronize()
    ranks.each(step)
    assert copies.tolist() == [7] * 4


def test_tensors_beyond_two_to_the_31_numbers_are_addressed():
    """Use 66,000 · 64 · 512 = 2.16e9 partial numbers and as many gathered, and compare the last requests."""
    batch, heads, width, value, last = 66_000, 64, 576, 512, slice(65_997, None)
    nbytes = 2 * batch * heads * (value + width) + 4 * batch * heads + (1 << 20)
    ranks = Ranks(2, nbytes)
    met_q, met_o = ranks.counters(), ranks.counters()
    q = [torch.empty(batch, heads // 2, width, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    whole = ranks.take(batch, heads, width, dtype=torch.bfloat16)
    o, lse = ranks.take(batch, heads, value, dtype=torch.bfloat16), ranks.take(batch, heads, dtype=torch.float32)
    for mine in (*q, *o, *lse):
        mine[last].normal_()
    ranks.each(lambda rank: gather_queries(ranks.peers[rank], met_q[rank], q[rank], whole[rank]))
    want = to_head_order_reference(torch.stack([mine[last] for mine in q]))
    assert all(torch.equal(mine[last], want) for mine in whole)
    out = [torch.empty(heads // 2, batch, value, dtype=torch.float32, device="cuda") for _ in range(2)]
    ranks.each(lambda rank: merge_from_peers(ranks.peers[rank], met_o[rank], o[rank], lse[rank], out[rank]))
    partials = torch.stack([mine[last] for mine in o]).double(), torch.stack([its[last] for its in lse]).double()
    for rank in range(2):
        assert torch.allclose(out[rank][:, last].double(), merge_reference(*partials, rank), atol=1e-6)
