"""Compare the masked KV write with the reference: only owners write."""

import pytest
import torch

from dcpbench.kernels.kv_indices import DcpShard
from dcpbench.kernels.kv_write import write_kv_fused, write_kv_reference
from dcpbench.points import layout

NAN = float("nan")


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("dcp", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [48, 576])
@pytest.mark.sample(5)
def test_each_rank_writes_only_its_own_rows(width, dcp, interleave, device):
    """Write all locations of 5 stripes, and -1, on every rank into a pool of NaN."""
    locs = torch.arange(-1, 5 * dcp * interleave, dtype=torch.int32, device=device)
    locs = locs[torch.randperm(len(locs), generator=torch.Generator().manual_seed(dcp)).to(device)]
    new = torch.randn(len(locs), width, device=device)
    for rank in range(dcp):
        pools = [torch.full((8 * interleave, width), NAN, device=device) for _ in range(2)]
        write_kv_reference(pools[0], new, locs, DcpShard(rank=rank, dcp=dcp, interleave=interleave))
        write_kv_fused(pools[1], new, locs, DcpShard(rank=rank, dcp=dcp, interleave=interleave))
        assert torch.equal(pools[0].isnan(), pools[1].isnan())
        assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())
        assert int((~pools[1].isnan()).all(dim=1).sum()) == 5 * interleave


@pytest.mark.parametrize("interleave", [1, 4])
def test_rows_are_quantised_for_a_float8_pool(interleave, device):
    """Store new × (1 / scale) as bytes on the owner; rows of other ranks are NaN and must not be written."""
    dcp, tokens, generator = 4, 48, torch.Generator().manual_seed(0)
    locs = torch.randperm(tokens, generator=generator).to(torch.int32)
    for rank in range(dcp):
        new = torch.randn(tokens, 576, generator=generator).to(torch.bfloat16)
        new[layout.get_owner(locs, dcp, interleave) != rank] = NAN
        pools = [torch.full((tokens, 576), 0xA5, dtype=torch.uint8, device=device) for _ in range(2)]
        shard = DcpShard(rank=rank, dcp=dcp, interleave=interleave)
        write_kv_reference(pools[0], new.to(device), locs.to(device), shard, 0.37)
        write_kv_fused(pools[1], new.to(device), locs.to(device), shard, 0.37)
        assert torch.equal(pools[0], pools[1])
        assert int((pools[1] != 0xA5).any(dim=1).sum()) == tokens // dcp


def test_step_without_valid_locations_leaves_the_pool_unchanged(device):
    pool = torch.full((4, 48), NAN, device=device)
    locs = torch.full((6,), -1, dtype=torch.int32, device=device)
    write_kv_fused(pool, torch.ones(6, 48, device=device), locs, DcpShard(rank=0, dcp=2))
    assert bool(pool.isnan().all())


@pytest.mark.gpu
def test_row_beyond_two_to_the_31_elements_is_written():
    """Use 4,000,000 rows of 576: row 3,999,999 starts at element 2,303,999,424, past 2^31 = 2,147,483,648."""
    pool = torch.zeros(4_000_000, 576, dtype=torch.bfloat16, device="cuda")
    locs = torch.tensor([3_999_999], dtype=torch.int32, device="cuda")
    write_kv_fused(pool, torch.ones(1, 576, dtype=torch.bfloat16, device="cuda"), locs, DcpShard(rank=0, dcp=1))
    assert int(pool[3_999_999].sum()) == 576
    assert int(pool[:3_999_999].count_nonzero()) == 0
