"""Test the messages of an all-to-all: their content, and that merging them gives attention over all rows."""

import pytest
import torch

from dcpbench.kernels import head_order, pack
from dcpbench.kernels.merge import merge_partials
from dcpbench.kernels.pack import (
    Message,
    merge_messages_fused,
    merge_messages_reference,
    pack_messages_fused,
    pack_messages_reference,
)

NAN = float("nan")
PACKS = [pytest.param(pack_messages_reference, id="reference"), pytest.param(pack_messages_fused, id="fused")]
COMBINES = [pytest.param(merge_messages_reference, id="reference"), pytest.param(merge_messages_fused, id="fused")]
VERSIONS = [
    pytest.param(pack_messages_reference, merge_messages_reference, id="reference"),
    pytest.param(pack_messages_fused, merge_messages_fused, id="fused"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [
    pytest.param(1, 3, 1, 16, id="N1-B3-h1-R16"),
    pytest.param(2, 1, 3, 20, id="N2-B1-h3-R20"),
    pytest.param(4, 5, 2, 24, id="N4-B5-h2-R24"),
    pytest.param(8, 2, 1, 16, id="N8-B2-h1-R16"),
    pytest.param(3, 2, 5, 512, id="N3-B2-h5-R512"),  # packed in two blocks, of which the second is not full
    pytest.param(8, 3, 16, 512, id="N8-B3-h16-R512", marks=pytest.mark.gpu),  # as served; the interpreter takes seconds
]


def make_partials(ranks, batch, heads, columns, dtype, device):
    """Return o [N, B, H, R] and lse [N, B, H] of all ranks; some shards are empty, and request 0 is empty on all
    ranks.
    """
    generator = torch.Generator(device).manual_seed(ranks)
    o_NBHR = torch.randn(ranks, batch, heads, columns, generator=generator, device=device).to(dtype)
    lse_NBH = 3 * torch.randn(ranks, batch, heads, generator=generator, device=device)
    empty_NB = torch.rand(ranks, batch, generator=generator, device=device) < 0.3
    empty_NB[:, 0] = batch > 1
    o_NBHR[empty_NB], lse_NBH[empty_NB] = NAN, -torch.inf
    return o_NBHR, lse_NBH


def make_packed(ranks, message, device):
    """Return memory for messages, filled with NaN."""
    return torch.full((ranks, message.words), NAN, device=device)


def exchange_messages(pack_into, combine, o_NBHR, lse_NBH, message):
    """Return the merged output of each rank after all have packed: [h, B, R] in fp32."""
    ranks = len(o_NBHR)
    sent = []
    for o_BHR, lse_BH in zip(o_NBHR, lse_NBH, strict=True):
        sent.append(make_packed(ranks, message, o_BHR.device))
        pack_into(o_BHR, lse_BH, message, sent[-1])
    outs = []
    for rank in range(ranks):
        out_BhR = torch.full((message.batch, message.heads, message.columns), NAN, device=o_NBHR.device)
        outs.append(out_BhR.transpose(0, 1))
        combine(torch.stack([messages[rank] for messages in sent]), message, outs[-1])
    return outs


@pytest.mark.parametrize(("pack_into", "combine"), VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "batch", "h", "columns"), SIZES)
@pytest.mark.sample(5)
def test_merged_messages_agree_with_fp64(pack_into, combine, ranks, batch, h, columns, dtype, device):
    """Check each rank's heads; NaN of empty shards must not spread, and requests without rows on any rank are 0."""
    message = Message(batch, h, columns, dtype)
    o_NBHR, lse_NBH = make_partials(ranks, batch, ranks * h, columns, dtype, device)
    truth_HBR = merge_partials(o_NBHR.double(), lse_NBH.double()).transpose(0, 1)
    for rank, out_hBR in enumerate(exchange_messages(pack_into, combine, o_NBHR, lse_NBH, message)):
        assert torch.allclose(out_hBR.double(), truth_HBR[rank * h : (rank + 1) * h], atol=3e-6)


@pytest.mark.parametrize("pack_into", PACKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_message_holds_the_exact_lse_behind_o(pack_into, dtype, device):
    """Use 3 requests × 1 head × 5 columns: 15 numbers take 8 or 15 words and have 16, then 3 words of lse have 16."""
    message = Message(3, 1, 5, dtype)
    assert (message.o_words, message.words) == (16, 32)
    o_BHR = torch.arange(30.0, device=device).view(3, 2, 5).to(dtype)
    lse_BH = torch.tensor([[1 / 3, -torch.inf], [1e-30, 7.0], [-88.1, 3e38]], device=device)
    packed_NW = make_packed(2, message, device)
    pack_into(o_BHR, lse_BH, message, packed_NW)
    for n in range(2):
        assert torch.equal(packed_NW[n, 16:19], lse_BH[:, n])
        assert torch.equal(packed_NW[n, :16].view(dtype)[:15], o_BHR[:, n].flatten())


@pytest.mark.parametrize("combine", COMBINES)
def test_merged_result_may_have_the_models_dtype(combine, device):
    """Use weights 3:1 for lse ln 3 and 0: 4·¾ + 0·¼ = 3, exact in bf16."""
    message = Message(1, 1, 16, torch.bfloat16)
    packed_NW = make_packed(2, message, device)
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    o_NBhR[0], o_NBhR[1] = 4, 0
    lse_NBh.copy_(torch.tensor([3.0, 1.0]).log().view(2, 1, 1))
    out_hBR = torch.empty(1, 1, 16, dtype=torch.bfloat16, device=device)
    combine(packed_NW, message, out_hBR)
    assert torch.equal(out_hBR, torch.full_like(out_hBR, 3))


def test_message_of_a_single_rank_merges_to_its_own_output(device):
    """Use the public functions, which choose an implementation by device; the output has heads first."""
    o_BHR = torch.randn(2, 3, 16, generator=torch.Generator(device).manual_seed(0), device=device)
    packed_NW = pack.pack_messages(o_BHR, torch.zeros(2, 3, device=device), 1)
    out_hBR = torch.empty(3, 2, 16, device=device)
    pack.merge_messages(packed_NW, Message(2, 3, 16, torch.float32), out_hBR)
    assert torch.equal(out_hBR, o_BHR.transpose(0, 1))


@pytest.mark.parametrize(
    "version", [head_order.to_head_order_reference, head_order.to_head_order_fused], ids=["reference", "fused"]
)
@pytest.mark.parametrize(("ranks", "batch", "h", "width"), [(2, 3, 1, 5), (4, 2, 3, 24), (3, 5, 8, 576), (1, 1, 2, 8)])
def test_gathered_queries_are_reordered_by_head(version, ranks, batch, h, width, device):
    """Check that head n·h + i of request b is head i of rank n, also in the public function with its shortcuts."""
    q_NBhQ = torch.arange(ranks * batch * h * width, device=device).view(ranks, batch, h, width).float()
    q_BHQ = version(q_NBhQ)
    assert q_BHQ.is_contiguous()
    for b in range(batch):
        for n in range(ranks):
            assert torch.equal(q_BHQ[b, n * h : (n + 1) * h], q_NBhQ[n, b])
    assert torch.equal(head_order.to_head_order(q_NBhQ), q_BHQ)
    assert head_order.to_head_order(q_NBhQ).is_contiguous()


@pytest.mark.gpu
def test_messages_beyond_two_to_the_31_numbers_are_addressed():
    """Use 2,100 requests × 128 heads × 2 ranks × 4,096 columns, 2.2 · 10⁹ numbers, and check the last row."""
    message = Message(2100, 128, 4096, torch.bfloat16)
    packed_NW = torch.zeros(2, message.words, device="cuda")
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    o_NBhR[1, -1, -1] = 2
    lse_NBh[0, -1, -1] = -torch.inf
    out_hBR = torch.empty(128, 2100, 4096, dtype=torch.bfloat16, device="cuda")
    merge_messages_fused(packed_NW, message, out_hBR)
    assert torch.equal(out_hBR[-1, -1], torch.full_like(out_hBR[-1, -1], 2))
    o_BHR = o_NBhR.transpose(0, 1).flatten(1, 2).contiguous()
    again_NW = torch.empty_like(packed_NW)
    pack_messages_fused(o_BHR, lse_NBh.transpose(0, 1).flatten(1, 2).contiguous(), message, again_NW)
    assert torch.equal(message.split_views(again_NW)[0][1, -1, -1], o_NBhR[1, -1, -1])
