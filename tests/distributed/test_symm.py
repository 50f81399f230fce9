"""Test the exchange and the all-reduce over symmetric memory between 2, 4 and 8 processes that share memory without a
GPU. The kernels run in Triton's interpreter and read the buffers that other processes write: places, slots, counters,
fences and the order of calls are those on GPUs. A GPU's memory order is not simulated: a missing ordering is not found
here.
"""

import functools

import pytest
import torch

from dcpbench.errors import CapacityError, UsageError
from dcpbench.exchange import make_exchange, symmetric_memory
from dcpbench.exchange.symmetric_all_reduce import ReduceSpec, make_all_reduce
from dcpbench.exchange.symmetric_memory import Place, check_places
from dcpbench.exchange.torch_collectives import Group
from dcpbench.kernels.head_order import to_head_order_reference
from dcpbench.kernels.symm_mem import MAX_BLOCKS, BufferAllocator, Peers
from dcpbench.kernels.symm_mem.all_reduce import add_up_reference
from dcpbench.kernels.symm_mem.pull_merge import merge_reference
from tests.distributed import symm_ranks as ranks
from tests.distributed.forked import run_forked

CASES = [
    pytest.param(world, layout, marks=[pytest.mark.long] if world > 2 else [])
    for world in ranks.WORLDS
    for layout in ranks.list_layouts(world)
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function that returns the results of each rank of a layout; all layouts of a world run together."""

    @functools.cache
    def run(world):
        folder = tmp_path_factory.mktemp(f"symm{world}")
        run_forked("tests.distributed.symm_ranks", str(world), str(folder), log=folder / "log")
        return {
            layout: [torch.load(folder / f"{layout}-{rank}.pt") for rank in range(world)]
            for layout in ranks.list_layouts(world)
        }

    return lambda world, layout: run(world)[layout]


def assert_merged(got_hBR, layout, rank, layer, batch):
    """Compare with the fp64 merge of the drawn data, with the accuracy of fp32 sums of 8 terms."""
    _, o_NBHR, lse_NBH = ranks.draw_layer(layout.dcp, rank // layout.dcp, layer, batch)
    want_hBR = merge_reference(o_NBHR.double(), lse_NBH.double(), layout.get_dcp_rank(rank))
    assert got_hBR.shape == want_hBR.shape
    assert torch.allclose(got_hBR.double(), want_hBR, atol=2e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "layout"), CASES, ids=str)
class TestSymm:
    def test_two_exchanges_of_a_group_keep_their_buffers_apart(self, found, world, layout):
        """Alternate their calls with shrinking and growing batches, while rank 0 reads late. Partial outputs without
        rows are NaN; the first request's first head has rows nowhere and must become 0.
        """
        for rank, got in enumerate(found(world, layout)):
            for index, (q_BHQ, o_hBR) in enumerate(got["layers"]):
                layer, exchange = divmod(index, 2)
                q_NBhQ, _, _ = ranks.draw_layer(
                    layout.dcp, rank // layout.dcp, layer + 50 * exchange, ranks.BATCHES[layer]
                )
                assert q_BHQ.is_contiguous()
                assert torch.equal(q_BHQ, to_head_order_reference(q_NBhQ))
                assert_merged(o_hBR, layout, rank, layer + 50 * exchange, ranks.BATCHES[layer])

    @pytest.mark.parametrize("count", ranks.LAYERS)
    def test_graph_of_any_number_of_layers_can_be_replayed_repeatedly(self, found, world, layout, count):
        """Use replicated queries, with one barrier a layer, so that the last layer of a replay may share its slot with
        the first of the next: a fast rank could overwrite data that rank 0 reads late.
        """
        for rank, got in enumerate(found(world, layout)):
            assert len(got["replays"][count]) == ranks.REPLAYS * count
            for index, o_hBR in enumerate(got["replays"][count]):
                replay, layer = divmod(index, count)
                assert_merged(o_hBR, layout, rank, 10 * replay + layer, 2)

    def test_consecutive_calls_outside_graphs_are_correct(self, found, world, layout):
        for rank, got in enumerate(found(world, layout)):
            for layer, o_hBR in enumerate(got["eager"]):
                assert_merged(o_hBR, layout, rank, layer, 2)

    def test_sums_are_bitwise_equal_on_all_ranks(self, found, world, layout):
        """Expect one rounding at the end, after sums in fp32, for any size."""
        for rank, got in enumerate(found(world, layout)):
            group = rank // layout.dcp
            members = range(group * layout.dcp, (group + 1) * layout.dcp)
            for number, total in enumerate(got["sums"]):
                addends = torch.stack([ranks.draw_addend(member, number) for member in members])
                assert torch.equal(total, add_up_reference(addends))


def test_group_of_one_rank_returns_its_own_output():
    exchange = make_exchange("symm", Group(size=1, rank=0, handle=None), ranks.make_spec())
    q_NBhQ, o_NBHR, lse_NBH = ranks.draw_layer(1, 0, 0, 2)
    q_BhQ = exchange.get_query_buffer(2)
    q_BhQ.copy_(q_NBhQ[0])
    assert torch.equal(exchange.gather_q(q_BhQ), q_NBhQ[0])
    o_BHR, lse_BH = exchange.get_partial_buffers(2)
    o_BHR.copy_(o_NBHR[0])
    lse_BH.copy_(lse_NBH[0])
    assert torch.equal(exchange.merge_partials(o_BHR, lse_BH), merge_reference(o_NBHR.float(), lse_NBH, 0))


class TestRefusals:
    def test_several_hosts_are_rejected_with_an_alternative(self):
        places = [Place("a", "GPU-1"), Place("b", "GPU-1")]
        with pytest.raises(CapacityError, match=r"--exchange symm .* spans 2; use --exchange a2a instead"):
            check_places(places, "--exchange symm", "use --exchange a2a instead.")

    def test_two_ranks_on_one_gpu_are_rejected(self):
        places = [Place("a", "GPU-1"), Place("a", "GPU-2"), Place("a", "GPU-1")]
        with pytest.raises(CapacityError, match="one GPU for each of 3 ranks, not 2; use a2a"):
            check_places(places, "--exchange symm", "use a2a")

    def test_ranks_of_one_host_with_a_gpu_each_or_none_are_accepted(self):
        check_places([Place("a", "GPU-1"), Place("a", "GPU-2")], "", "")
        check_places([Place("a", ""), Place("a", "")], "", "")

    def test_machine_without_shared_memory_is_rejected(self, monkeypatch, tmp_path):
        """Use a machine without the folder of shared memory, as systems other than Linux."""
        monkeypatch.setattr(symmetric_memory, "SHARED_FOLDER", tmp_path / "none")
        monkeypatch.setattr(symmetric_memory, "gather_values", lambda _group, value: [value])
        group = Group(size=2, rank=0, handle=object())
        with pytest.raises(CapacityError, match=r"--exchange symm: this machine has no .*none.*; use --exchange a2a"):
            make_exchange("symm", group, ranks.make_spec())

    def test_failed_allocation_of_one_rank_is_raised_on_all_ranks(self, monkeypatch):
        """Raise everywhere, because a rank with memory would wait for the others forever."""
        group = Group(size=2, rank=0, handle=object())
        monkeypatch.setattr(symmetric_memory, "gather_values", lambda _group, reason: [reason, "out of memory"])
        with pytest.raises(CapacityError, match=r"symm: memory .* was refused \(out of memory\); use a2a"):
            symmetric_memory.run_on_all(group, lambda: "mine", "symm: {}; use a2a")

        def fail_to_allocate():
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(symmetric_memory, "gather_values", lambda _group, reason: [reason, ""])
        with pytest.raises(CapacityError, match="No space left on device"):
            symmetric_memory.run_on_all(group, fail_to_allocate, "{}")

    def test_unknown_all_reduce_raises_an_error_with_the_known_ones(self):
        sizes = ReduceSpec(rows=1, columns=8, dtype=torch.float32, device=torch.device("cpu"))
        with pytest.raises(UsageError, match="--collectives all-reduce=ring does not exist; choose one of nccl, symm"):
            make_all_reduce("ring", Group(size=1, rank=0, handle=None), sizes)


class TestBuffers:
    def test_parts_do_not_overlap_and_are_aligned(self):
        """Expect 256-byte steps: 3 numbers of 2 bytes take one, 129 of them two."""
        own = torch.zeros(2048, dtype=torch.uint8)
        allocator = BufferAllocator(own)
        parts = [
            allocator.allocate_tensor(3, dtype=torch.bfloat16),
            allocator.allocate_tensor(3, 43, dtype=torch.bfloat16),
            allocator.allocate_tensor(1, dtype=torch.int64),
        ]
        starts = [part.data_ptr() - own.data_ptr() for part in parts]
        assert starts == [0, 256, 768]
        assert allocator.used == 1024

    def test_sizes_are_computed_without_a_buffer(self):
        allocator = BufferAllocator()
        assert allocator.allocate_counters(4).shape == (MAX_BLOCKS + 1, 4)
        assert allocator.used == MAX_BLOCKS * 4 * 4 + 256

    def test_tensor_outside_the_buffer_has_no_offset(self):
        """Reject the tensor, because peers have no counterpart at its address."""
        own = torch.zeros(512, dtype=torch.uint8)
        peers = Peers(rank=0, addresses=(own.data_ptr(),), own=own)
        assert peers.compute_offset(own[256:]) == 256
        with pytest.raises(AssertionError, match="not in this buffer"):
            peers.compute_offset(torch.zeros(16, dtype=torch.uint8))
