"""Test the split of jointly projected q, k and v into heads, with norms, rope, and KV rows."""

import dataclasses

import pytest
import torch

from dcpbench.kernels.qk_norm_rope import split_heads_fused, split_heads_reference
from dcpbench.kernels.rope import make_rope_table
from dcpbench.models import SHAPES
from dcpbench.models.shapes import Llama3Rope

NAN = float("nan")


def test_reference_normalises_and_rotates_q_and_k():
    """Use one head of each with 2 columns at position 1, where rope is a quarter turn: (a, b) becomes (-b, a). q = (3,
    4) has a root mean square of sqrt(12.5); with a weight of (1, 2) it is (3, 8) / sqrt(12.5), and so is k. v is
    unchanged.
    """
    qkv = torch.tensor([[3.0, 4.0, 6.0, 8.0, 5.0, 7.0]])
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    q, row = torch.zeros(1, 1, 2), torch.zeros(1, 4)
    weight = torch.tensor([1.0, 2.0])
    split_heads_reference(qkv, weight, weight, torch.tensor([1]), table, q, row, 0.0)
    size = 12.5**-0.5
    assert q.flatten().tolist() == pytest.approx([-8 * size, 3 * size])
    assert row.flatten().tolist() == pytest.approx([-8 * size, 3 * size, 5, 7])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (8, 8), (12, 4), (3, 3)])
@pytest.mark.sample(6)
def test_kernel_agrees_with_the_reference(heads, kv_heads, width, norm, device):
    """Use rows that are part of wider ones; other columns must not change."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator(device).manual_seed(0)
    shape = dataclasses.replace(SHAPES["qwen3-8b"], qk_rope_head_dim=width, v_head_dim=width)
    table = make_rope_table(shape, 50, device)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * width + 8, generator=generator, device=device).to(dtype)
    norms = [
        torch.rand(width, generator=generator, device=device).add(0.5).to(dtype) if norm else None for _ in range(2)
    ]
    positions = torch.tensor([0, 49, 7, 7, 1], device=device)
    found = []
    for split in (split_heads_reference, split_heads_fused):
        q = torch.full((5, heads, width), NAN, dtype=dtype, device=device)
        row = torch.full((5, 2 * kv_heads * width + 8), NAN, dtype=dtype, device=device)
        split(qkv[:, :-8], *norms, positions, table, q, row[:, :-8], 1e-6)
        assert row[:, -8:].isnan().all()
        found.append((q, row[:, :-8]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    values = slice(kv_heads * width, 2 * kv_heads * width)
    assert torch.equal(found[1][1][:, values], qkv[:, -8 - kv_heads * width : -8]), "v is copied"


def test_slow_frequencies_of_llama_3_are_divided_and_fast_ones_kept(device):
    """Use factor 8 over 8192 positions: wavelengths above 8192 are eight times as long, those below 2048 are kept.
    Frequency i is theta^(-2i/128): the first has a wavelength of 2 pi, the last of about 2.6 million.
    """
    plain = dataclasses.replace(SHAPES["llama-3.1-8b"], llama3_rope=None)
    scaled = dataclasses.replace(
        plain,
        llama3_rope=Llama3Rope(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position=8192),
    )
    angles = [torch.atan2(t[1, 64:], t[1, :64]) for t in (make_rope_table(s, 2, device) for s in (plain, scaled))]
    wavelengths = 2 * torch.pi / angles[0]
    ratio = angles[0] / angles[1]
    assert torch.allclose(ratio[wavelengths < 2048], torch.ones(1, device=device))
    assert torch.allclose(ratio[wavelengths > 8192], 8 * torch.ones(1, device=device), rtol=1e-3)
    between = ratio[(wavelengths > 2048) & (wavelengths < 8192)]
    assert len(between) > 0
    assert ((between > 1) & (between < 8)).all()
