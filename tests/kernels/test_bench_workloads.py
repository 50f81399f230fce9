"""The variants of the benches: right wherever they must be, and checks that notice every way of being wrong."""

import pytest
import torch

from dcpbench.bench.operators import dp_slice, kv_write
from dcpbench.bench.operators.dp_slice import DpSlice
from dcpbench.bench.operators.kv_write import FOREIGN, KvWrite, write_poison
from dcpbench.bench.record import Case
from dcpbench.kernels.kv_write import convert_to_stored


def kv_case(variant: str, tokens: int, dcp: int, owned: int, dtype: str = "bf16", scale: float = 1.0) -> Case:
    """A case of two layers."""
    sizes = {"tokens": tokens, "dcp": dcp, "owned": owned, "dtype": dtype, "scale": scale}
    return Case(variant=variant, sizes=sizes, calls=2)


@pytest.mark.parametrize("variant", kv_write.VARIANTS)
@pytest.mark.parametrize(("dtype", "scale"), [("bf16", 1.0), ("fp8", 1.0), ("fp8", 0.37)])
@pytest.mark.parametrize(("dcp", "owned"), [(1, 17), (2, 9), (4, 5), (8, 3), (8, 0)])
def test_every_variant_of_kv_write_stores_the_own_rows_and_no_other(dcp, owned, dtype, scale, variant, device):
    """Of 17 tokens rank 0 of N owns ceil(17 / N); the rest is NaN, and so is the pool, of other bits."""
    calls = KvWrite(device, 0).build_calls(kv_case(variant, 17, dcp, owned, dtype, scale))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2
    row_bytes = 576 * 2 + 576 * (2 if dtype == "bf16" else 1)
    assert calls.written_bytes == 2 * owned * row_bytes, "read and written, by two layers"
    assert calls.work.memory_bytes == owned * row_bytes + 17 * 8, "of one layer, and where 17 tokens go"


def test_each_layer_reads_rows_of_its_own(device):
    """So that a pass reads device memory, and not 61 times what lies in the L2 cache."""
    workload = KvWrite(device, 0)
    workload.build_calls(kv_case("filter", 16, 4, 4))
    first, second = workload._inputs.new
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


def forgets_one(kv, new, loc, scale):
    """Stores all rows but the first."""
    kv_write.masked_kernel(kv, new[1:], loc[1:], scale)


def wraps_around(kv, new, loc, scale):
    """Takes -1 for the last row, as plain indexing does."""
    del scale
    kv[loc] = new


def stores_zeros(kv, new, loc, scale):
    """The right rows, the wrong numbers."""
    kv_write.masked_kernel(kv, torch.zeros_like(new), loc, scale)


@pytest.mark.parametrize("wrong", [forgets_one, wraps_around, stores_zeros])
def test_a_wrong_write_is_noticed(wrong, device, monkeypatch):
    """A check that lets one of these pass would let every variant pass."""
    monkeypatch.setitem(kv_write.VARIANTS, "filter", wrong)
    calls = KvWrite(device, 0).build_calls(kv_case("filter", 16, 4, 4))
    assert "of 80 rows differ" in calls.check(calls.run)


def test_a_pass_that_leaves_out_a_layer_is_noticed(device):
    calls = KvWrite(device, 0).build_calls(kv_case("filter", 16, 4, 4))
    assert (
        calls.check(calls.calls[0])
        == "layer 1: 4 of 80 rows differ, the first is row " + calls.check(calls.calls[0]).rpartition(" ")[2]
    )


def test_a_write_beyond_the_own_rows_is_noticed_though_both_are_nan(device, monkeypatch):
    """The rows of other ranks' tokens are NaN, and so is what lies in the pool: their bits differ."""

    def writes_nan(kv, new, loc, scale):
        kv_write.masked_kernel(kv, new, loc, scale)
        kv[-1] = float("nan")

    monkeypatch.setitem(kv_write.VARIANTS, "filter", writes_nan)
    calls = KvWrite(device, 0).build_calls(kv_case("filter", 16, 4, 0))
    assert "1 of 80 rows differ" in calls.check(calls.run)


@pytest.mark.parametrize(("dtype", "holds"), [(torch.bfloat16, torch.bfloat16), (torch.uint8, torch.float8_e4m3fn)])
def test_a_poisoned_pool_is_nan_of_bits_that_no_cast_makes(dtype, holds):
    """Casts make NaN of different bits on different processors; the poison is none of them."""
    pool = torch.zeros(2, 8, dtype=dtype)
    write_poison(pool)
    assert pool.view(holds).float().isnan().all()
    foreign = torch.tensor([FOREIGN], dtype=torch.int16).view(torch.bfloat16)
    stored = convert_to_stored(foreign, dtype)
    assert stored.view(holds).float().isnan().all()
    assert not torch.equal(stored.view(torch.uint8), pool[0, :1].view(torch.uint8))


def test_variants_of_a_size_share_their_tensors_and_other_sizes_do_not(device):
    """4.6 GB of pool are not filled anew for each variant."""
    workload = KvWrite(device, 0)
    workload.build_calls(kv_case("filter", 16, 4, 4))
    first = workload._inputs
    workload.build_calls(kv_case("check-all", 16, 4, 4))
    assert workload._inputs is first
    workload.build_calls(kv_case("check-all", 16, 4, 0))
    assert workload._inputs is not first


@pytest.mark.parametrize("variant", dp_slice.VARIANTS)
@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 6])
def test_every_rank_gets_its_own_rows_in_both_layouts(tokens, dp, variant, device):
    """The check takes every rank, of uneven counts, no tokens at all, and tokens on one rank only."""
    calls = DpSlice(device, 0).build_calls(Case(variant=variant, sizes={"tokens": tokens, "dp": dp}, calls=3))
    assert calls.check(calls.run) == ""
    assert calls.check_graph(calls.run_captured) == ""
    assert len(calls.calls) == len(calls.to_capture) == 3


def test_uneven_counts_have_empty_ranks_and_a_full_last_one():
    """Quarters 1, 0, 3, 2 of 8 tokens in turn, and all 8 on the last rank."""
    assert dp_slice.make_uneven_counts(8, 7) == [2, 0, 6, 4, 2, 0, 8]
    assert dp_slice.make_uneven_counts(8, 1) == [8]


def one_late(batch, rank, graph_batch):
    """Begins one row too late."""
    start, end = dp_slice.host_slice(batch, rank, graph_batch)
    return start + 1, end + 1


def too_many(batch, rank, graph_batch):
    """Takes a row of the next rank, too, where there is room."""
    start, end = dp_slice.host_slice(batch, rank, graph_batch)
    return start, min(end + 1, start + 6)


def packed_always(batch, rank, graph_batch):
    """Forgets that ranks lie `graph_batch` apart under CUDA graphs."""
    del graph_batch
    return dp_slice.host_slice(batch, rank, None)


@pytest.mark.parametrize("wrong", [one_late, too_many, packed_always])
def test_a_wrong_slice_is_noticed(wrong, device, monkeypatch):
    monkeypatch.setitem(dp_slice.VARIANTS, "host-slice", wrong)
    calls = DpSlice(device, 0).build_calls(Case(variant="host-slice", sizes={"tokens": 6, "dp": 3}, calls=1))
    assert calls.check(calls.run) != ""
