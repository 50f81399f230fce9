"""Synthetic KV: the same request holds the same rows however it is stored."""

import pytest
import torch

from dcpbench.kernels.kv_indices import Share
from dcpbench.kernels.synthetic_kv import fill_counter_based, fill_reference
from dcpbench.points import layout

FILLS = [pytest.param(fill_reference, id="reference"), pytest.param(fill_counter_based, id="counter")]


def gathered(fill, tokens, dcp, interleave, first_loc, device, **what):
    """A request's rows of all ranks in token order, [layers, tokens, 48]."""
    locs = torch.arange(first_loc, first_loc + tokens, dtype=torch.int32, device=device)
    out = torch.full((2, tokens, 48), float("nan"), device=device)
    for rank in range(dcp):
        pool = torch.full((2, 64, 48), float("nan"), device=device)
        fill(pool, locs, Share(rank=rank, dcp=dcp, interleave=interleave), **what)
        for token, loc in enumerate(locs.tolist()):
            if layout.get_owner(loc, dcp, interleave) == rank:
                out[:, token] = pool[:, layout.get_row(loc, dcp, interleave)]
        held = int((~pool[0].isnan()).all(dim=1).sum())
        assert held == sum(layout.get_owner(loc, dcp, interleave) == rank for loc in locs.tolist())
    return out


@pytest.mark.parametrize("fill", FILLS)
def test_all_layouts_store_the_same_numbers(fill, device):
    """dcp 1, 2 and 4, with and without stripes, at different places of the pool."""
    plain = gathered(fill, 21, 1, 1, 0, device, request=3, seed=0)
    assert not bool(plain.isnan().any())
    for dcp, interleave, first in ((2, 1, 8), (4, 1, 16), (4, 2, 24)):
        assert torch.equal(gathered(fill, 21, dcp, interleave, first, device, request=3, seed=0), plain)


@pytest.mark.parametrize("fill", FILLS)
def test_requests_layers_and_seeds_differ(fill, device):
    """Equal rows would route all requests to the same experts."""
    one = gathered(fill, 8, 1, 1, 0, device, request=0, seed=0)
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, gathered(fill, 8, 1, 1, 0, device, request=1, seed=0))
    assert not torch.equal(one, gathered(fill, 8, 1, 1, 0, device, request=0, seed=1))


@pytest.mark.parametrize("fill", FILLS)
def test_rows_are_standard_normal(fill, device):
    """64 rows of 48 in 2 layers: 6,144 numbers, so the mean is within 4/sqrt(6144) = 0.051 of 0."""
    drawn = gathered(fill, 64, 1, 1, 0, device, request=0, seed=0)
    assert abs(float(drawn.mean())) < 0.051
    assert 0.95 < float(drawn.std()) < 1.05


@pytest.mark.parametrize("fill", FILLS)
def test_a_pool_of_fp8_holds_the_same_numbers_rounded(fill, device):
    """A rank's rows in e4m3 are those in fp32, as torch rounds them."""
    locs = torch.arange(8, 29, dtype=torch.int32, device=device)
    wide = torch.zeros(2, 64, 48, device=device)
    small = wide.to(torch.float8_e4m3fn)
    for pool in (wide, small):
        fill(pool, locs, Share(rank=1, dcp=2), request=3, seed=0)
    assert torch.equal(small.float(), wide.to(torch.float8_e4m3fn).float())
