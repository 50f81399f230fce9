"""Test the decompression of latents into keys and values for stored and new rows, with the number of rows on the
device.
"""

import pytest
import torch

from dcpbench.kernels.e4m3 import LARGEST
from dcpbench.kernels.kv_up_proj import (
    decompress_latents,
    decompress_latents_fused,
    decompress_latents_reference,
    gather_rows,
    gather_rows_fused,
    gather_rows_reference,
)

NAN = float("nan")
SIZES = {
    "published": {"heads": 1, "nope": 128, "rope": 64, "value": 128, "latent": 512},
    "tiny": {"heads": 3, "nope": 32, "rope": 16, "value": 24, "latent": 32},
    "odd": {"heads": 3, "nope": 6, "rope": 4, "value": 12, "latent": 20},
    "wide": {"heads": 2, "nope": 160, "rope": 8, "value": 192, "latent": 96},
}
"""Sizes of models: `odd` fills no block, and is followed by columns of another head; `wide` has two blocks, the second not full."""


def make_int32(values, device):
    """Return an int32 tensor on a device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("run", [gather_rows, gather_rows_fused, gather_rows_reference])
@pytest.mark.parametrize("width", [20, 48, 576])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_rows_are_gathered_from_stored_and_new_rows_in_order(run, count, width, device):
    """Alternate stored and new rows. Rows that no place names hold NaN, and rows behind the count must not change."""
    generator = torch.Generator().manual_seed(0)
    stored_rows, new_rows = (torch.randperm(64, generator=generator)[:count] for _ in range(2))
    even = torch.arange(count) % 2 == 0
    stored, new = (torch.full((64, width), NAN, device=device) for _ in range(2))
    stored[stored_rows[even]] = torch.randn(int(even.sum()), width, generator=generator).to(device)
    new[new_rows[~even]] = torch.randn(int((~even).sum()), width, generator=generator).to(device)
    expected = torch.where(even[:, None].to(device), stored[stored_rows], new[new_rows])
    places = torch.where(even, stored_rows, -1 - new_rows).to(torch.int32)
    out = torch.full((70, width), NAN, device=device)
    run(out, stored, new, make_int32([count], device), make_int32([*places.tolist(), 1 << 30], device))
    assert torch.equal(out[:count], expected)
    assert bool(out[count:].isnan().all())


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("run", [gather_rows, gather_rows_fused, gather_rows_reference])
def test_e4m3_bytes_are_decoded_as_by_torch_and_scaled(run, scale, device):
    """Decode all 256 bytes, with subnormals and NaN; new rows must not be scaled."""
    stored = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256).view(torch.float8_e4m3fn)
    new = torch.full((1, 256), 2 * LARGEST, device=device)
    out = torch.empty(2, 256, device=device)
    run(out, stored, new, make_int32([2], device), make_int32([0, -1], device), scale)
    expected = stored[0].cpu().float() * scale
    assert torch.equal(out[0].cpu().isnan(), expected.isnan())
    assert torch.equal(out[0].cpu().nan_to_num(), expected.nan_to_num())
    assert torch.equal(out[1], new[0])


def make_inputs(sizes, count, dtype, device, spare=3):
    """Return random rows followed by NaN, weights, and keys and values filled with NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    heads, nope, rope, value, latent = (sizes[n] for n in ("heads", "nope", "rope", "value", "latent"))
    rows = random(count + spare, latent + rope)
    rows[count:] = NAN
    weights = random(heads, nope, latent) * latent**-0.5, random(heads, latent, value) * latent**-0.5
    outs = [torch.full((count + spare, heads, n), NAN, dtype=dtype, device=device) for n in (nope + rope, value + 8)]
    return rows, weights, outs


@pytest.mark.parametrize("run", [decompress_latents, decompress_latents_fused, decompress_latents_reference])
@pytest.mark.parametrize("count", [0, 1, 130])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.sample(5)
def test_keys_and_values_agree_with_fp64_and_nothing_else_is_written(run, sizes, count, device):
    """Use 130 rows, which end two rows into a tile. Rows behind the count, and columns behind the values, must stay
    NaN.
    """
    sizes = SIZES[sizes]
    rows, (w_uk, w_uv), (keys, values) = make_inputs(sizes, count, torch.float32, device)
    run(rows, make_int32([count], device), w_uk, w_uv, keys, values)
    latent, nope, value = (sizes[n] for n in ("latent", "nope", "value"))
    known = rows[:count].double()
    expected = torch.einsum("sr,hnr->shn", known[:, :latent], w_uk.double())
    assert torch.allclose(keys[:count, :, :nope].double(), expected, atol=1e-5)
    assert torch.equal(keys[:count, :, nope:], rows[:count, None, latent:].expand(-1, sizes["heads"], -1))
    expected = torch.einsum("sr,hrv->shv", known[:, :latent], w_uv.double())
    assert torch.allclose(values[:count, :, :value].double(), expected, atol=1e-5)
    assert bool(keys[count:].isnan().all())
    assert bool(values[count:].isnan().all())
    assert bool(values[..., value:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 130, 5000])
def test_bf16_keys_and_values_are_rounded_once(count):
    """Allow half a unit in the last place of bf16, at most 2^-8 of a number. One graph serves any count."""
    rows, (w_uk, w_uv), (keys, values) = make_inputs(SIZES["published"], 5000, torch.bfloat16, torch.device("cuda"))
    there = make_int32([0], "cuda")
    decompress_latents(rows, there, w_uk, w_uv, keys, values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decompress_latents(rows, there, w_uk, w_uv, keys, values)
    there.fill_(count)
    graph.replay()
    known = rows[:count, :512].double()
    for found, expected in (
        (keys[:count, :, :128], torch.einsum("sr,hnr->shn", known, w_uk.double())),
        (values[:count, :, :128], torch.einsum("sr,hrv->shv", known, w_uv.double())),
    ):
        assert float(((found - expected).abs() / expected.abs().clamp(min=1)).max()) <= 1.01 * 2**-8
    assert bool(keys[count:].isnan().all())
    assert bool(values[count:].isnan().all())


def test_widths_unsupported_by_descriptors_are_rejected(device):
    """Use values of 6 numbers in fp32, which are 24 bytes."""
    rows, weights, outs = make_inputs(SIZES["odd"] | {"value": 6}, 3, torch.float32, device)
    with pytest.raises(ValueError, match="24, 20 and 6 wide"):
        decompress_latents_fused(rows, make_int32([3], device), *weights, *outs)
