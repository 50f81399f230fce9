"""Linear layers over e4m3 with scales, against fp64 over what these stand for."""

import json
import re
import statistics
from pathlib import Path

import pytest
import torch

from dcpbench.kernels import block_scaled
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.kernels.e4m3 import get_capability
from dcpbench.kernels.linear import Tiling, apply_linear, apply_linear_reference, choose_tiling, compute_product
from dcpbench.kernels.moe import apply_experts_reference, apply_scaled_experts_reference, scaled

MEASURED = Path(__file__).parents[2] / "results" / "linear-experts_H200/linear-fp8_H200_2026-11-26"
STEP = 32
"""Products of e4m3 that a tensor core of Hopper adds at once to a sum: each of these 33 numbers with 13 bits behind the
leading one of the largest, the rest cut off."""
LOST = (STEP + 1) * 2.0**-13  # of the largest of them, at most
BF16_STEP = 2.0**-8


def operands(rows, columns, depth, device, seed=0, block=(128, 128)):
    """Rows and weights whose blocks differ in size by factors of up to 10."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, depth, generator=random, device=device)
    weight = torch.randn(columns, depth, generator=random, device=device) / depth**0.5
    sizes = 10 ** torch.rand(-(-columns // block[0]), -(-depth // block[1]), generator=random, device=device)
    weight *= sizes.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:columns, :depth]
    return x, block_scaled.quantize_weight(weight, block)


def truth(x, weight):
    """The product of what both stand for, and by how much sums of it may be off, both fp64."""
    rows = block_scaled.dequantize_rows(block_scaled.quantize_rows_reference(x, weight.block[1])).double()
    wide = block_scaled.dequantize_weight(weight).double()
    lost = torch.zeros(len(rows), len(wide), dtype=torch.float64, device=rows.device)
    for group in range(0, rows.shape[1], weight.block[1]):
        total = torch.zeros_like(lost)
        end = min(group + weight.block[1], rows.shape[1])
        for first in range(group, end, STEP):
            here = slice(first, min(first + STEP, end))
            products = (rows[:, None, here] * wide[None, :, here]).abs().amax(2)
            lost += LOST * torch.maximum(products, total.abs())
            total += rows[:, here] @ wide[:, here].T
    return rows @ wide.T, lost


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("rows", "tile", "first"), [(1, 16, True), (17, 16, True), (33, 64, False)])
@pytest.mark.sample(4)
def test_a_product_differs_from_fp64_by_the_rounding_of_sums_alone(rows, tile, first, parts, device):
    """Edges in both directions: 200 columns are no multiple of a block, 5 groups none of the parts."""
    x, weight = operands(rows, 200, 640, device)
    how = Tiling(rows=tile, columns=128, stages=2, warps=4, parts=parts, weight_first=first)
    found = compute_product(block_scaled.quantize_rows(x), weight, torch.float32, how)
    wanted, lost = truth(x, weight)
    assert ((found.double() - wanted).abs() <= lost).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_narrow_programs_take_half_a_block_of_columns(rows, device):
    x, weight = operands(rows, 384, 256, device)
    how = Tiling(rows=16, columns=64, stages=2, warps=4)
    found = compute_product(block_scaled.quantize_rows(x), weight, torch.float32, how)
    wanted, lost = truth(x, weight)
    assert ((found.double() - wanted).abs() <= lost).all()


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize(("columns", "depth"), [(512, 7168), (2112, 7168), (7168, 256), (7168, 4096), (9216, 7168)])
def test_a_multiprocessor_has_room_for_its_share_of_programs_alone(rows, columns, depth):
    """Of 132, as a Hopper has, each with 228 KiB of shared memory, 1 KiB of which each program takes beside its stages.

    7168 × 4096 at 64 rows: 112 programs of 64 columns, one each. Four stages of (64 + 64) · 128 bytes would leave room for
    three, eight leave it for one. Multiprocessors with 100 KiB have room for one at least.
    """
    how = choose_tiling(rows, columns, depth, 132)
    share = -(-(-(-columns // how.columns) * how.parts) // 132)
    room = 228 // (how.stages * (how.rows + how.columns) / 8 + 1)
    assert min(share, 2) <= room <= share
    small = choose_tiling(rows, columns, depth, 132, shared=100 << 10)
    assert small.stages * (small.rows + small.columns) / 8 + 1 < 100


def test_a_product_is_cut_nearly_as_the_fastest_that_was_measured():
    """On an H200, layers whole and cut by 2, 4 and 8: the choice takes ½ % longer at most on average, nowhere a tenth longer.

    Before the last sweep tiles read the last row in place of those that were not there, and scales of a row lay side by side:
    at 16 and 32 rows neither decides how to cut. At 64 the choice takes 2 % longer there on average, 9 % at most.
    """
    few = (16, 32)
    sweeps = (("stages", "alone", few), ("cuts", "alone-next|new", few), ("before-and-now", "now", range(1, 129)))
    longer = {}
    for sweep, ours, counts in sweeps:
        for line in map(json.loads, (MEASURED / sweep / "sweep.jsonl").read_text(encoding="utf-8").splitlines()):
            us = {}
            for way, (columns, parts, *_) in line["how"].items():
                if re.fullmatch(rf"{ours}|c\d+p\d+", way):
                    us[columns, parts] = line["us"][way]
            if line["rows"] in counts:
                how = choose_tiling(line["rows"], line["columns"], line["depth"], 132)
                longer.setdefault(sweep, []).append(us[how.columns, how.parts] / min(us.values()))
    assert [len(found) for found in longer.values()] == [50, 50, 7 * 18]
    assert all(statistics.geometric_mean(found) < 1.005 for found in longer.values())
    assert max(max(found) for found in longer.values()) < 1.1


@pytest.mark.parametrize("rows", [17, 200])
def test_scales_of_rows_are_read_as_they_lie(rows, device):
    """Those of a row side by side, or those of a group; past 128 rows on Hopper by other kernels."""
    x, weight = operands(rows, 256, 640, device)
    found = block_scaled.quantize_rows(x)
    of_rows, of_groups = found.scale.contiguous(), found.scale.T.contiguous().T
    assert of_rows.stride() == (5, 1)
    assert of_groups.stride() == (1, rows)
    one, other = (
        compute_product(Scaled(found.data, scale, found.block), weight, torch.float32) for scale in (of_rows, of_groups)
    )
    assert torch.equal(one, other)


def test_scales_of_other_blocks_would_be_noticed(device):
    x, weight = operands(4, 256, 256, device)
    wanted, lost = truth(x, weight)
    for dim in (0, 1):
        other = Scaled(weight.data, weight.scale.roll(1, dim))
        found = compute_product(block_scaled.quantize_rows(x), other, torch.float32)
        assert ((found.double() - wanted).abs() > lost).float().mean() > 0.9


def test_a_layer_is_off_by_the_rounding_of_its_rows(device):
    """‖error‖ / ‖y‖ < 2⁻⁴ / √3, and not much less.

    A number of a row is rounded by at most 2⁻⁴ of itself, evenly below that: by (2⁻⁴)² / 3 of its square on average. Errors
    and numbers have random signs alike, so that both y² and its error² are sums of the products' squares. Numbers so small
    that steps are 2⁻⁹ of a scale are 2⁻⁶ / 448 of a group's largest, too few and too small to count. Mantissas above 1 make
    the relative error smaller, by up to a half.
    """
    x, weight = operands(64, 256, 512, device)
    wanted = x.double() @ block_scaled.dequantize_weight(weight).double().T
    error = (apply_linear(x, weight).double() - wanted).norm() / wanted.norm()
    assert 2.0**-5 / 3**0.5 < error < 2.0**-4 / 3**0.5


@pytest.mark.parametrize("rows", [200, 600])
def test_many_rows_on_hopper(rows, device):
    """Tiles beyond the last row and the last column, and more tiles than programs."""
    if get_capability(device) < (9, 0):
        pytest.skip("needs a Hopper GPU")
    from dcpbench.kernels import hopper_linear

    x, weight = operands(rows, 328, 640, device)
    found = torch.full((rows, 328), torch.nan, device=device)
    hopper_linear.compute_product(block_scaled.quantize_rows(x), weight, found, programs=5, stages=3)
    wanted, lost = truth(x, weight)
    assert ((found.double() - wanted).abs() <= lost).all()


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_has_the_dtype_of_its_rows(rows, dtype, device):
    x, weight = operands(rows, 256, 384, device)
    x = x.to(dtype)
    found = apply_linear(x, weight)
    wanted, lost = truth(x, weight)
    assert found.dtype == dtype
    rounded = BF16_STEP * wanted.abs() if dtype == torch.bfloat16 else 0
    assert ((found.double() - wanted).abs() <= lost + rounded).all()
    plain = torch.randn(256, 384, device=device).to(dtype)
    assert torch.equal(apply_linear(x, plain), torch.nn.functional.linear(x, plain))


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (3, 5)])
def test_the_reference_takes_blocks_and_depths_of_any_size(block):
    x, weight = operands(3, 70, 90, torch.device("cpu"), block=block)
    wanted, _ = truth(x, weight)
    size = block_scaled.dequantize_rows(block_scaled.quantize_rows_reference(x, block[1])).abs().double()
    size = size @ block_scaled.dequantize_weight(weight).abs().double().T
    assert ((apply_linear_reference(x, weight).double() - wanted).abs() <= 2.0**-20 * size).all()
    assert torch.equal(apply_linear(x, weight), apply_linear_reference(x, weight))


@pytest.mark.parametrize("block", [(128, 128), (64, 64)])
def test_experts_of_any_block_are_those_of_whole_numbers_but_for_their_rows(block):
    """x is what e4m3 holds exactly, so hidden rows alone are rounded: by 2⁻⁴/√3 of themselves on average at most."""
    random = torch.Generator().manual_seed(3)
    x = block_scaled.dequantize_rows(
        block_scaled.quantize_rows_reference(torch.randn(5, 96, generator=random), block[1])
    )
    gate_up = block_scaled.quantize_weight(torch.randn(4, 2 * 48, 96, generator=random) / 10, block)
    down = block_scaled.quantize_weight(torch.randn(4, 96, 48, generator=random) / 7, block)
    ids = torch.stack([torch.randperm(6, generator=random)[:2] for _ in range(5)]).int()
    weights, shared = torch.rand(5, 2, generator=random), torch.randn(5, 96, generator=random)
    found = apply_scaled_experts_reference(x, gate_up, down, weights, ids, 1, shared)
    wide = (block_scaled.dequantize_weight(w) for w in (gate_up, down))
    wanted = apply_experts_reference(x, *wide, weights, ids, 1, shared)
    error = (found - wanted).norm() / (wanted - shared).norm()
    assert 1e-3 < error < 2.0**-4 / 3**0.5


@pytest.mark.long
def test_experts_of_prompts_are_those_of_decode_batches(device, monkeypatch):
    """Sorted by torch into long tiles, or planned by a kernel into short ones."""
    random = torch.Generator(device).manual_seed(4)

    def normal(*size):
        return torch.randn(*size, generator=random, device=device)

    gate_up = block_scaled.quantize_weight(normal(3, 256, 256) / 16)
    down = block_scaled.quantize_weight(normal(3, 256, 128) / 11)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.stack([torch.randperm(5, generator=random, device=device)[:2] for _ in range(70)]).int()
    given = (
        normal(70, 256).to(dtype),
        gate_up,
        down,
        torch.rand(70, 2, device=device),
        ids,
        1,
        normal(70, 256).to(dtype),
    )
    few = scaled.apply_experts(*given)
    assert scaled.plan_products(ids, 1, 3).rows == 16
    monkeypatch.setattr(scaled, "MAX_ASSIGNMENTS", 100)
    assert scaled.plan_products(ids, 1, 3).rows == 64
    many = scaled.apply_experts(*given)
    assert (few - many).abs().max() <= BF16_STEP * few.abs().max()
