"""The ag_rs exchange over groups of 2 and 4 gloo ranks against the merge computed in one place."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpbench.errors import UsageError
from dcpbench.exchange import make_exchange
from dcpbench.exchange.collectives import Group
from dcpbench.kernels.merge import merge
from dcpbench.layout import Layout
from tests.distributed import exchange_ranks as ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank of each layout got: [layout][rank] -> {"torch.float32", "q torch.float32", …}."""
    folder = tmp_path_factory.mktemp("exchange")
    command = [sys.executable, "-m", "tests.distributed.exchange_ranks"]
    started = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks.WORLD)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [p.returncode for p in started] == [0] * ranks.WORLD, errors
    return {
        layout: [torch.load(folder / f"{layout}-{rank}.pt") for rank in range(ranks.WORLD)] for layout in ranks.LAYOUTS
    }


def heads_of(layout: Layout, rank: int) -> slice:
    """The heads of its group's 8 that a rank keeps."""
    h = ranks.HEADS // layout.dcp
    return slice(layout.dcp_rank(rank) * h, (layout.dcp_rank(rank) + 1) * h)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ranks.LAYOUTS, ids=str)
class TestAgRs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_every_rank_gets_its_heads_of_the_merged_output(self, found, layout, dtype):
        """Partials travel in fp32 whatever they were computed in, so bf16 ones are merged as exactly as others.

        NaN outputs of empty shards must have gone nowhere: sums over ranks would spread them.
        """
        for rank in range(ranks.WORLD):
            o_NBHR, lse_NBH = ranks.partials(layout.dcp, rank // layout.dcp, dtype)
            expected_hBR = merge(o_NBHR.float(), lse_NBH)[:, heads_of(layout, rank)].transpose(0, 1)
            got_hBR = found[layout][rank][str(dtype)]
            assert got_hBR.dtype == torch.float32
            assert got_hBR.shape == (ranks.HEADS // layout.dcp, ranks.BATCH, ranks.LATENT)
            assert torch.allclose(got_hBR, expected_hBR, atol=1e-6)

    def test_a_request_with_rows_on_one_rank_has_that_ranks_output(self, found, layout):
        """Its weight is exp(lse − lse) = 1 and all others' 0: nothing is rounded."""
        for rank in range(ranks.WORLD):
            o_NBHR, _ = ranks.partials(layout.dcp, rank // layout.dcp, torch.float32)
            only_hR = o_NBHR[1, ranks.ONLY_ON_RANK_1, heads_of(layout, rank)]
            assert torch.allclose(found[layout][rank]["torch.float32"][:, ranks.ONLY_ON_RANK_1], only_hR, atol=1e-6)

    def test_a_request_without_rows_anywhere_is_zero(self, found, layout):
        """A padding row that no rank stores anything for."""
        for got in found[layout]:
            assert not got["torch.float32"][:, ranks.EMPTY_EVERYWHERE].any()

    def test_q_is_gathered_in_rank_order_within_the_group(self, found, layout):
        """The ranks' heads side by side, contiguous, and of this group only."""
        for rank in range(ranks.WORLD):
            q_BHQ = found[layout][rank]["q torch.float32"]
            assert q_BHQ.is_contiguous()
            assert torch.equal(q_BHQ, ranks.queries(rank // layout.dcp))


def test_a_group_of_one_rank_merges_with_nobody():
    """The same code path with weight 1, heads first."""
    exchange = make_exchange("ag_rs", Group(size=1, rank=0, handle=None), ranks.spec(torch.float32))
    o_BHR, lse_BH = exchange.partial(2)
    o_BHR.normal_(generator=torch.Generator().manual_seed(0))
    q_BHQ = exchange.query(2).fill_(1)
    assert o_BHR.shape == (2, ranks.HEADS, ranks.LATENT)
    assert q_BHQ.shape == (2, ranks.HEADS, ranks.WIDTH)
    assert torch.equal(exchange.merge(o_BHR, lse_BH.zero_()), o_BHR.transpose(0, 1))
    assert torch.equal(exchange.gather_q(q_BHQ), q_BHQ)


def test_an_unknown_exchange_is_an_error_that_lists_the_known_ones():
    """Exchanges of later issues do not exist yet."""
    with pytest.raises(UsageError, match="--exchange a2a does not exist; choose one of ag_rs"):
        make_exchange("a2a", Group(size=1, rank=0, handle=None), ranks.spec(torch.float32))
