"""Test synthetic KV: a request holds the same rows in every layout."""

import pytest
import torch

from dcpbench.kernels.kv_indices import DcpShard
from dcpbench.kernels.synthetic_kv import fill_counter_based, fill_reference
from dcpbench.points import layout

FILLS = [pytest.param(fill_reference, id="reference"), pytest.param(fill_counter_based, id="counter")]


def fill_and_gather(fill, tokens, dcp, interleave, first_loc, device, **options):
    """Fill the pools of all ranks, and return a request's rows in token order, [layers, tokens, 48]."""
    locs = torch.arange(first_loc, first_loc + tokens, dtype=torch.int32, device=device)
    out = torch.full((2, tokens, 48), float("nan"), device=device)
    for rank in range(dcp):
        pool = torch.full((2, 64, 48), float("nan"), device=device)
        fill(pool, locs, DcpShard(rank=rank, dcp=dcp, interleave=interleave), **options)
        for token, loc in enumerate(locs.tolist()):
            if layout.get_owner(loc, dcp, interleave) == rank:
                out[:, token] = pool[:, layout.get_row(loc, dcp, interleave)]
        held = int((~pool[0].isnan()).all(dim=1).sum())
        assert held == sum(layout.get_owner(loc, dcp, interleave) == rank for loc in locs.tolist())
    return out


@pytest.mark.parametrize("fill", FILLS)
def test_all_layouts_store_the_same_rows(fill, device):
    """Use dcp 1, 2 and 4, with and without stripes, at different places of the pool."""
    plain = fill_and_gather(fill, 21, 1, 1, 0, device, request=3, seed=0)
    assert not bool(plain.isnan().any())
    for dcp, interleave, first in ((2, 1, 8), (4, 1, 16), (4, 2, 24)):
        assert torch.equal(fill_and_gather(fill, 21, dcp, interleave, first, device, request=3, seed=0), plain)


@pytest.mark.parametrize("fill", FILLS)
def test_requests_layers_and_seeds_differ(fill, device):
    """Check differences, because equal rows would route all requests to the same experts."""
    one = fill_and_gather(fill, 8, 1, 1, 0, device, request=0, seed=0)
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, fill_and_gather(fill, 8, 1, 1, 0, device, request=1, seed=0))
    assert not torch.equal(one, fill_and_gather(fill, 8, 1, 1, 0, device, request=0, seed=1))


@pytest.mark.parametrize("fill", FILLS)
def test_rows_are_standard_normal(fill, device):
    """Draw 64 rows of 48 in 2 layers: 6,144 numbers, so the mean is within 4/sqrt(6144) = 0.051 of 0."""
    drawn = fill_and_gather(fill, 64, 1, 1, 0, device, request=0, seed=0)
    assert abs(float(drawn.mean())) < 0.051
    assert 0.95 < float(drawn.std()) < 1.05


@pytest.mark.parametrize("fill", FILLS)
def test_fp8_pool_holds_the_same_rows_rounded(fill, device):
    """Compare a rank's rows in e4m3 with those in fp32, rounded by torch."""
    locs = torch.arange(8, 29, dtype=torch.int32, device=device)
    wide = torch.zeros(2, 64, 48, device=device)
    small = wide.to(torch.float8_e4m3fn)
    for pool in (wide, small):
        fill(pool, locs, DcpShard(rank=1, dcp=2), request=3, seed=0)
    assert torch.equal(small.float(), wide.to(torch.float8_e4m3fn).float())
