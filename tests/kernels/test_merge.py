"""Test the LSE merge: partial outputs of all ranks add up to attention over all rows, despite empty shards."""

import pytest
import torch

from dcpbench.kernels.attention.reference import compute_mla_decode
from dcpbench.kernels.merge import correct_attn_out_fused, correct_attn_out_reference, merge_partials

VERSIONS = [pytest.param(correct_attn_out_reference, id="reference"), pytest.param(correct_attn_out_fused, id="fused")]


@pytest.mark.parametrize("correct", VERSIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_partial_outputs_add_up_to_attention_over_all_rows(correct, ranks, device):
    """Distribute 13 rows over the ranks: with 8 ranks some hold one row, some two."""
    generator = torch.Generator(device).manual_seed(ranks)
    q = torch.randn(4, 40, generator=generator, device=device)
    rows = torch.randn(13, 40, generator=generator, device=device)
    parts = [compute_mla_decode(q, rows[n::ranks], 32, 0.3) for n in range(ranks)]
    o_NBHR = torch.stack([o for o, _ in parts]).unsqueeze(1)
    lse_NBH = torch.stack([lse for _, lse in parts]).unsqueeze(1)
    whole_HR, _ = compute_mla_decode(q.double(), rows.double(), 32, 0.3)
    summed_HBR = sum(correct(o_NBHR[n], lse_NBH, n, torch.float32) for n in range(ranks))
    assert torch.allclose(summed_HBR[:, 0].double(), whole_HR, atol=1e-5)
    assert torch.allclose(merge_partials(o_NBHR, lse_NBH)[0].double(), whole_HR, atol=1e-5)


@pytest.mark.parametrize("correct", VERSIONS)
def test_empty_shard_has_no_weight_even_if_its_output_is_nan(correct, device):
    """Use lse = -inf with an o that was never computed; 0·NaN must not happen."""
    o = torch.ones(2, 1, 3, 16, device=device)
    o[1] = float("nan")
    lse = torch.tensor([[[0.5, 0.5, 0.5]], [[float("-inf")] * 3]], device=device)
    assert torch.equal(correct(o[0], lse, 0, torch.float32), torch.ones(3, 1, 16, device=device))
    assert torch.equal(correct(o[1], lse, 1, torch.float32), torch.zeros(3, 1, 16, device=device))


@pytest.mark.parametrize("correct", VERSIONS)
def test_request_without_rows_on_any_rank_gives_zero(correct, device):
    """Use lse = -inf on all ranks: exp(-inf - -inf) must not happen."""
    o = torch.full((1, 2, 16), float("nan"), device=device)
    lse = torch.full((4, 1, 2), float("-inf"), device=device)
    assert torch.equal(correct(o, lse, 2, torch.float32), torch.zeros(2, 1, 16, device=device))


def test_lse_is_a_natural_logarithm(device):
    """Expect weights 3:1 for lse ln 3 and 0; as log2 they would be 2.14:1."""
    o = torch.tensor([4.0, 0.0], device=device).view(2, 1, 1, 1).expand(2, 1, 1, 16).contiguous()
    lse = torch.tensor([3.0, 1.0], device=device).log().view(2, 1, 1)
    assert torch.allclose(
        correct_attn_out_fused(o[0], lse, 0, torch.float32), torch.full((1, 1, 16), 3.0, device=device)
    )
