"""Test fp8 with scales: stored values, and experts over them."""

import pytest
import torch

from dcpbench.kernels import block_scaled
from dcpbench.kernels.block_scaled import Rows, Scaled
from dcpbench.kernels.moe import apply_experts_reference, scaled

HALF_STEP = 2.0**-4
"""Largest relative rounding error of a normal e4m3 number, which has three bits behind the leading one."""


def make_rows(count, depth, device, seed=0):
    """Return normal rows with groups of 128 columns that differ in size by factors of up to 1,000; one group is all
    zeros.
    """
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, depth, generator=random, device=device)
    x = x * 10 ** (3 * torch.rand(count, depth // 128, generator=random, device=device)).repeat_interleave(128, -1)
    x[0, :128] = 0
    return x


@pytest.mark.parametrize("count", [1, 3, 37, 6000])
def test_quantised_rows_equal_the_reference(count, device):
    x = make_rows(count, 384, device)
    found, wanted = block_scaled.quantize_rows(x), block_scaled.quantize_rows_reference(x)
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.data.float(), wanted.data.float())
    assert found.scale.shape == (count, 3)


def test_scales_of_a_group_are_contiguous_for_few_rows(device):
    """Store them so that a program reads the scales of all its rows at once; past 128 rows each row's scales are
    contiguous.
    """
    assert block_scaled.quantize_rows(make_rows(128, 384, device)).scale.T.is_contiguous()
    assert block_scaled.quantize_rows(make_rows(129, 384, device)).scale.is_contiguous()


def test_dequantised_rows_are_within_half_a_step(device):
    """Use relative steps for normal e4m3 numbers, and steps of 2⁻⁹ below 2⁻⁶ of the range."""
    x = make_rows(5, 256, device)
    scaled = block_scaled.quantize_rows(x)
    size = (x.abs() * HALF_STEP).clamp(min=2.0**-10 * scaled.scale.max())
    error = (block_scaled.dequantize_rows(scaled) - x).abs()
    small = x.abs() < scaled.scale.repeat_interleave(128, -1) * 2.0**-6
    assert (error[~small] <= size[~small]).all()
    assert (error[small] <= (scaled.scale.repeat_interleave(128, -1) * 2.0**-10)[small]).all()
    assert scaled.data.float().abs().max() == block_scaled.LARGEST


def test_weights_have_a_scale_for_each_block_of_128_by_128(device):
    """Use edges that are no multiple of 128, which have blocks of their own."""
    weight = torch.randn(2, 200, 300, generator=torch.Generator(device).manual_seed(1), device=device)
    weight[1, 130:, 260:] *= 1000
    scaled = block_scaled.quantize_weight(weight)
    assert scaled.data.shape == weight.shape
    assert scaled.scale.shape == (2, 2, 3)
    assert scaled.scale[1, 1, 2] == weight[1, 128:, 256:].abs().max() / torch.full((), 448.0, device=device)
    error = (block_scaled.dequantize_weight(scaled) - weight).abs()
    assert (error <= weight.abs() * HALF_STEP + scaled.scale.amax() * 2.0**-10).all()


@pytest.mark.parametrize("tokens", [1, 9])
def test_scaled_experts_agree_with_dequantised_weights(tokens, device):
    """Allow for activations rounded to e4m3 twice: before gate-up and before down."""
    experts, top_k, hidden, width, first = 4, 2, 256, 128, 1
    random = torch.Generator(device).manual_seed(2)

    def normal(*size):
        return torch.randn(*size, generator=random, device=device)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def weight(*size):
        """Return numbers near 1/√K in blocks that differ in size by factors of up to 10."""
        blocks = 10 ** torch.rand(*size[:1], size[1] // 128, size[2] // 128, generator=random, device=device)
        return block_scaled.quantize_weight(
            normal(*size) * blocks.repeat_interleave(128, 1).repeat_interleave(128, 2) / size[2] ** 0.5
        )

    gate_up, down = weight(experts, 2 * width, hidden), weight(experts, hidden, width)
    x = block_scaled.dequantize_rows(block_scaled.quantize_rows_reference(normal(tokens, hidden))).to(dtype)
    ids = torch.stack([torch.randperm(experts + 2, generator=random, device=device)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=random, device=device)
    shared = normal(tokens, hidden).to(dtype)
    found = scaled.apply_experts(x, gate_up, down, weights, ids.int(), first, shared)
    wide = [block_scaled.dequantize_weight(w) for w in (gate_up, down)]
    wanted = apply_experts_reference(x.float(), *wide, weights, ids.int(), first, shared.float())
    error = (found.float() - wanted).norm() / wanted.norm()
    # Rounding to e4m3 is off by at most 2⁻⁴ and uniform below it, 2⁻⁴/√3 of it on average, once here: x is exact.
    assert error < HALF_STEP / 3**0.5
    for wrong in (
        (Scaled(gate_up.data, gate_up.scale.roll(1, -1)), down),
        (Scaled(gate_up.data, gate_up.scale.roll(1, -2)), down),
        (gate_up, Scaled(down.data, down.scale.roll(1, -2))),
        (gate_up, Scaled(down.data, down.scale.roll(1, 0))),
    ):
        other = scaled.apply_experts(x, *wrong, weights, ids.int(), first, shared).float()
        assert (other - wanted).norm() > 4 * error * wanted.norm(), "scales of other blocks go unnoticed"
    quantised = block_scaled.quantize_rows(x)
    for scale in (quantised.scale.contiguous(), quantised.scale.T.contiguous().T):
        given = Rows(Scaled(quantised.data, scale, quantised.block), x.dtype)
        again = scaled.apply_experts(given, gate_up, down, weights, ids.int(), first, shared)
        assert torch.equal(again, found), "scales are not read as they lie"
