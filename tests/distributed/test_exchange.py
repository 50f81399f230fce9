"""Compare the exchanges over groups of 2 and 4 gloo ranks with a merge in one process."""

import pytest
import torch

from dcpbench.errors import UsageError
from dcpbench.exchange import make_exchange
from dcpbench.exchange.torch_collectives import Group
from dcpbench.kernels.merge import merge_partials
from dcpbench.points.layout import Layout
from tests.distributed import exchange_ranks as ranks
from tests.distributed.forked import run_forked


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the q and merged output of each rank of each layout: [layout][rank][name, dtype, changes]."""
    folder = tmp_path_factory.mktemp("exchange")
    run_forked("tests.distributed.exchange_ranks", str(folder), log=folder / "log")
    return {
        layout: [torch.load(folder / f"{layout}-{rank}.pt") for rank in range(ranks.WORLD)] for layout in ranks.LAYOUTS
    }


def get_heads(layout: Layout, rank: int) -> slice:
    """Return the slice of its group's 8 heads that a rank keeps."""
    h = ranks.HEADS // layout.dcp
    return slice(layout.get_dcp_rank(rank) * h, (layout.get_dcp_rank(rank) + 1) * h)


def expected(layout, rank, dtype):
    """Return this rank's heads of the merged output, [h, B, R] in fp64 from partials in `dtype`."""
    o_NBHR, lse_NBH = ranks.draw_partials(layout.dcp, rank // layout.dcp, dtype)
    return merge_partials(o_NBHR.double(), lse_NBH.double())[:, get_heads(layout, rank)].transpose(0, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ranks.LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ranks.NAMES)
class TestExchange:
    @pytest.mark.parametrize("dtype", ranks.DTYPES, ids=str)
    def test_each_rank_receives_its_heads_of_the_merged_output_in_fp32(self, found, name, layout, dtype):
        """Merge partials of any dtype with the accuracy of fp32. NaN outputs of empty shards must not spread, as sums
        over ranks would.
        """
        for rank in range(ranks.WORLD):
            _, got_hBR = found[layout][rank][name, dtype, "plain"]
            assert got_hBR.dtype == torch.float32
            assert got_hBR.shape == (ranks.HEADS // layout.dcp, ranks.BATCH, ranks.LATENT)
            assert torch.allclose(got_hBR.double(), expected(layout, rank, dtype), atol=1e-6)

    @pytest.mark.parametrize("dtype", ranks.DTYPES, ids=str)
    def test_projected_values_are_rounded_at_most_once(self, found, name, layout, dtype):
        """Accept the model's dtype or fp32, and any strides but the last."""
        half_ulp = torch.finfo(dtype).eps / 2 + 1e-6
        for rank in range(ranks.WORLD):
            _, got_hBV = found[layout][rank][name, dtype, "projected"]
            assert got_hBV.dtype in (dtype, torch.float32)
            assert got_hBV.stride(-1) == 1
            assert torch.allclose(got_hBV.double(), expected(layout, rank, dtype), rtol=half_ulp, atol=1e-6)

    def test_request_with_rows_on_one_rank_has_that_ranks_output(self, found, name, layout):
        """Expect no rounding: the weight is exp(lse − lse) = 1, and all others are 0."""
        for rank in range(ranks.WORLD):
            o_NBHR, _ = ranks.draw_partials(layout.dcp, rank // layout.dcp, torch.float32)
            only_hR = o_NBHR[1, ranks.ONLY_ON_RANK_1, get_heads(layout, rank)]
            _, got_hBR = found[layout][rank][name, torch.float32, "plain"]
            assert torch.allclose(got_hBR[:, ranks.ONLY_ON_RANK_1], only_hR, atol=1e-6)

    def test_request_without_rows_on_any_rank_is_zero(self, found, name, layout):
        """Use a padding row that no rank stores."""
        for got in found[layout]:
            for changes in ranks.CHANGES:
                assert not got[name, torch.bfloat16, changes][1][:, ranks.EMPTY_EVERYWHERE].any()

    @pytest.mark.parametrize("changes", ranks.CHANGES)
    def test_q_is_gathered_in_rank_order_within_the_group(self, found, name, layout, changes):
        """Expect the heads of this group's ranks only, contiguous, and unchanged if all ranks had all heads."""
        for rank in range(ranks.WORLD):
            q_BHQ, _ = found[layout][rank][name, torch.float32, changes]
            assert q_BHQ.is_contiguous()
            assert torch.equal(q_BHQ, ranks.make_queries(rank // layout.dcp))


@pytest.mark.distributed
def test_reduction_in_bf16_has_the_error_of_bf16(found):
    """Expect an error above fp32's rounding and below 4 ulp of bf16, because ag_rs rounds partial outputs and their
    sums.
    """
    layout = ranks.LAYOUTS[0]
    _, got_hBR = found[layout][0]["ag_rs", torch.float32, "bf16 reduction"]
    error = (got_hBR.double() - expected(layout, 0, torch.float32)).abs().max()
    assert got_hBR.dtype == torch.bfloat16
    assert 1e-4 < error < 4 * torch.finfo(torch.bfloat16).eps * 3


@pytest.mark.parametrize("name", ["none", *ranks.NAMES])
def test_group_of_one_rank_returns_its_own_output(name):
    """Use the same code path with weight 1; the output has heads first."""
    exchange = make_exchange(name, Group(size=1, rank=0, handle=None), ranks.make_spec(torch.float32))
    o_BHR, lse_BH = exchange.get_partial_buffers(2)
    o_BHR.normal_(generator=torch.Generator().manual_seed(0))
    q_BHQ = exchange.get_query_buffer(2).fill_(1)
    assert o_BHR.shape == (2, ranks.HEADS, ranks.LATENT)
    assert q_BHQ.shape == (2, ranks.HEADS, ranks.WIDTH)
    assert torch.equal(exchange.merge_partials(o_BHR, lse_BH.zero_()), o_BHR.transpose(0, 1))
    assert torch.equal(exchange.gather_q(q_BHQ), q_BHQ)


def test_unknown_exchange_raises_an_error_with_the_known_ones():
    with pytest.raises(UsageError, match="--exchange nccl does not exist; choose one of ag_rs, a2a"):
        make_exchange("nccl", Group(size=1, rank=0, handle=None), ranks.make_spec(torch.float32))
