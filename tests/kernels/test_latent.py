"""Compare fused kernels with the sequence of kernels that they replace."""

import pytest
import torch

from dcpbench.kernels.block_scaled import dequantize_rows, quantize_rows
from dcpbench.kernels.moe import prefill_experts
from dcpbench.kernels.norm import Mark, normalize_fused, normalize_rows
from dcpbench.kernels.qkv_norm_rope import split_latent_fused, split_latent_reference
from dcpbench.kernels.rope import apply_rope_fused, make_rope_table
from dcpbench.models import SHAPES


def make_rows(count, width, device, seed=0):
    """Return rows with values that differ by factors of up to 1,000, with a group of zeros."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, width, generator=random, device=device)
    x = x * 10 ** (3 * torch.rand(count, width, generator=random, device=device))
    x[0, :128] = 0
    return x.to(get_half_dtype(device))


def get_half_dtype(device):
    """Return bf16, or fp16 in Triton's interpreter, which has no bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def assert_same(found, wanted):
    """Check that bytes and scales are equal."""
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)


def assert_near(found, wanted):
    """Check that values are equal or neighbours, because sums of squares may be added in another order."""
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(found.dtype).eps, atol=0)


@pytest.mark.parametrize("width", [128, 384, 1536, 7168])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.sample(3)
def test_norm_quantises_its_output(width, adds, device):
    """Use a residual, a mark, and rows that are part of wider ones."""
    x, weight = make_rows(3, width + 64, device)[:, :width], torch.rand(width, device=device).to(get_half_dtype(device))
    residuals = [make_rows(3, width, device, 1) if adds else None for _ in range(2)]
    marks = torch.zeros(1, dtype=torch.int32, pin_memory=device.type != "cpu")
    wanted = normalize_fused(x, residuals[0], weight, 1e-6)
    found = normalize_rows(x, residuals[1], weight, 1e-6, Mark(marks, 5))
    assert_near(found.plain, wanted)
    assert_same(found.scaled, quantize_rows(found.plain))
    if adds:
        assert torch.equal(*residuals)
    if device.type != "cpu":
        torch.cuda.synchronize()
    assert marks.tolist() == [5]
    alone = normalize_rows(x, make_rows(3, width, device, 1) if adds else None, weight, 1e-6, keep=False)
    assert_near(alone.scaled.scale.to(get_half_dtype(device)), found.scaled.scale.to(get_half_dtype(device)))
    torch.testing.assert_close(
        dequantize_rows(alone.scaled),
        dequantize_rows(found.scaled),
        rtol=2.0**-3,
        atol=2.0**-9 * float(found.scaled.scale.max()),
    )
    assert alone.plain is None


@pytest.mark.parametrize("width", [128, 256, 1408, 2048])
def test_silu_quantises_its_output(width, device):
    """Include blocks of columns that end inside a program's block."""
    both = make_rows(5, 2 * width, device) / 100
    found = prefill_experts.silu_mul_rows(both)
    assert_same(found.scaled, quantize_rows(prefill_experts.silu_mul(both)))
    assert found.plain is None


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("q_width", "norms"), [(1536, True), (384, True), (768, False)], ids=str)
@pytest.mark.sample(3)
def test_fused_latents_equal_separate_norms_and_rope(q_width, norms, interleaved, device):
    """Write KV rows into part of wider rows; other columns, and the query's columns without a norm, must not change."""
    latent, rope = 512, 64
    table = make_rope_table(SHAPES["deepseek-v3"], 128, device)
    positions = torch.tensor([0, 127, 1, 64], device=device)
    qkv = make_rows(4, q_width + latent + rope, device)
    kept = qkv.clone()
    q_norm, kv_norm = (torch.rand(n, device=device).to(get_half_dtype(device)) for n in (q_width, latent))
    buffer = torch.full((4, latent + rope + 8), 7.0, device=device, dtype=get_half_dtype(device))
    row = buffer[:, : latent + rope]
    given = (qkv, q_norm if norms else None, kv_norm, positions, table, row, 1e-6)

    wanted = torch.empty(4, latent + rope, device=device, dtype=get_half_dtype(device))
    wanted[:, :latent] = normalize_fused(qkv[:, q_width : q_width + latent], None, kv_norm, 1e-6)
    apply_rope_fused(qkv[:, None, q_width + latent :], positions, table, wanted[:, None, latent:], interleaved)
    found = split_latent_fused(*given, interleaved=interleaved)
    assert_near(row, wanted)
    assert (buffer[:, latent + rope :] == 7).all()
    assert torch.equal(qkv, kept)
    if not norms:
        assert found is None
        return
    q = normalize_fused(qkv[:, :q_width], None, q_norm, 1e-6)
    assert_near(found, q)
    row.zero_()
    assert_same(split_latent_fused(*given, interleaved=interleaved, quantise=True).scaled, quantize_rows(found))
    assert_near(row, wanted)


def test_fused_latents_agree_with_the_reference(device):
    """Use fp32 and sizes that are not powers of two."""
    table = make_rope_table(SHAPES["tiny"], 10, device)
    rope = table.shape[1]
    x, positions = torch.randn(3, 40 + 24 + rope, device=device), torch.tensor([0, 9, 4], device=device)
    q_norm, kv_norm = torch.rand(40, device=device), torch.rand(24, device=device)
    found, wanted = (torch.empty(3, 24 + rope, device=device) for _ in range(2))
    q = split_latent_fused(x, q_norm, kv_norm, positions, table, found, 1e-6, interleaved=True)
    expected = split_latent_reference(x, q_norm, kv_norm, positions, table, wanted, 1e-6, interleaved=True)
    assert torch.allclose(q, expected, atol=2e-6)
    assert torch.allclose(found, wanted, atol=2e-6)
