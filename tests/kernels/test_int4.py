"""Test int4 weights: their layout, and experts over them against the dequantised product."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.kernels import int4
from dcpbench.kernels.moe import int4_experts
from dcpbench.kernels.moe.int4_experts import Tiling
from dcpbench.kernels.moe.routing import NO_EXPERT
from dcpbench.models.weight_formats import FORMATS, INT4, INT4_GROUPS
from tools import int4_tilings

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""Relative errors caused by rounding, by the dtype of rows: in bf16 the rounding of weights, hidden rows and results."""
TILINGS = {  # columns, stages, warps, and True if weights are the first operand
    "gate-up": [(64, 5, 4, True), (64, 4, 4, False), (64, 4, 4, True), (32, 5, 2, True), (32, 5, 2, False)],
    "down": [(128, 2, 4, True), (128, 3, 4, False), (128, 4, 4, True), (256, 2, 8, True), (256, 2, 8, False)],
}


def make_weight(random, *size, group):
    """Quantise normal numbers near 1/√K, of which the groups differ in size."""
    device = random.device
    sizes = 10 ** torch.rand(*size[:2], size[2] // group, generator=random, device=device)
    normal = torch.randn(*size, generator=random, device=device) * sizes.repeat_interleave(group, -1)
    return int4.quantize(normal / size[2] ** 0.5, group)


def surround_with_nan(x):
    """Return the same rows between rows of NaN."""
    wide = torch.full((len(x) + 2, x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    wide[1:-1] = x
    return wide[1:-1]


def fill_with_nan(empty):
    """Return `torch.empty` with NaN in place of undefined numbers."""

    def make(*size, **options):
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return make


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Arguments of `apply_experts`: four local experts [first, first + 4) of 12, three for each token."""

    x: torch.Tensor
    gate_up: int4.Int4
    down: int4.Int4
    weights: torch.Tensor
    ids: torch.Tensor
    first: int
    shared: torch.Tensor

    @classmethod
    def make(cls, device, *, tokens, hidden, width, group, first=4):
        random = torch.Generator(device).manual_seed(first + tokens + group)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        x, shared = torch.randn(2, tokens, hidden, generator=random, device=device).to(dtype)
        chance = torch.ones(12, device=device)
        chance[5], chance[6] = 40.0, 0.0  # one expert has most rows, one has none
        ids = torch.multinomial(chance.expand(tokens, -1), 3, generator=random).int()
        return cls(
            x=surround_with_nan(x),
            gate_up=make_weight(random, 4, 2 * width, hidden, group=group),
            down=make_weight(random, 4, hidden, width, group=group),
            weights=torch.rand(tokens, 3, generator=random, device=device),
            ids=ids,
            first=first,
            shared=shared,
        )

    def run(self, by):
        return by(self.x, self.gate_up, self.down, self.weights, self.ids, self.first, self.shared)


def compute_error(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm()) / LIMITS[found.dtype]


@given(
    experts=st.integers(1, 3),
    height=st.integers(1, 5),
    group=st.sampled_from(INT4_GROUPS),
    groups=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_packed_numbers_and_scales_round_trip(experts, height, group, groups, seed):
    random = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (experts, height, group * groups), generator=random, dtype=torch.int8)
    scale = torch.randn(experts, height, groups, generator=random).to(torch.bfloat16)
    weight = int4.pack(q, scale)
    found, scales = int4.unpack(weight)
    assert torch.equal(found, q)
    assert torch.equal(scales, scale)
    assert weight.shape == q.shape
    wanted = q.view(experts, height, groups, group).float() * scale.float()[..., None]
    assert torch.equal(int4.dequantize(weight), wanted.flatten(2))


@given(group=st.sampled_from(INT4_GROUPS), seed=st.integers(0, 2**31), size=st.floats(1e-20, 1e20))
@settings(max_examples=60)
def test_quantised_numbers_are_within_half_a_step(group, seed, size):
    """Allow for 7.5 steps as the largest number of a group, of which 7 are stored if it is positive; a scale is
    rounded by at most 2⁻⁸.
    """
    x = torch.randn(2, 3, 2 * group, generator=torch.Generator().manual_seed(seed)) * size
    x[0, 0, :group] = 0
    weight = int4.quantize(x, group)
    steps = int4.unpack(weight)[1].float().repeat_interleave(group, -1)
    assert ((int4.dequantize(weight) - x).abs() <= (0.5 + 7.5 * 2.0**-8) * steps).all()
    assert not int4.dequantize(weight)[0, 0, :group].any()


def test_packed_word_has_a_number_of_each_part_of_a_block():
    """Check word 5 of row 2 in the second block: columns 128 + 5, 37, 69 and 101, each 4 bits of q + 8, from the
    lowest on.
    """
    q = torch.zeros(1, 3, 256, dtype=torch.int8)
    q[0, 2, [133, 165, 197, 229]] = torch.tensor([-8, 7, 1, -1], dtype=torch.int8)
    weight = int4.pack(q, torch.ones(1, 3, 8, dtype=torch.bfloat16))
    assert weight.data.shape == (1, 2, 3, 32)
    assert int(weight.data[0, 1, 2, 5]) & 0xFFFF == 0 | 15 << 4 | 9 << 8 | 7 << 12


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_packed_size_equals_the_size_of_the_format(group):
    """Count half a byte for each number and two bytes for each group."""
    weight = int4.quantize(torch.ones(3, 10, 512), group)
    one = dataclasses.replace(FORMATS[INT4], columns=group)
    assert weight.nbytes == 3 * one.compute_bytes(512, 10) == 3 * 10 * (256 + 512 // group * 2)


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("first", [0, 4, 8])
@pytest.mark.parametrize(("group", "hidden", "width"), [(32, 96, 32), (32, 256, 64), (128, 128, 256), (128, 384, 128)])
@pytest.mark.sample(6)
def test_experts_agree_with_the_dequantised_product(tokens, first, group, hidden, width, device, monkeypatch):
    """Use columns of 96, 160 and 384, which fill no word of scales; memory around tokens, and undefined rows, hold
    NaN.
    """
    layer = Layer.make(device, tokens=tokens, hidden=hidden, width=width, group=group, first=first)
    truth = layer.run(int4_experts.apply_experts_reference)
    monkeypatch.setattr(torch, "empty", fill_with_nan(torch.empty))
    assert compute_error(layer.run(int4_experts.apply_experts), truth) < 1


def test_prompts_use_larger_tiles_with_the_same_result(device, monkeypatch):
    layer = Layer.make(device, tokens=70, hidden=128, width=32, group=32)
    truth = layer.run(int4_experts.apply_experts_reference)
    monkeypatch.setattr(int4_experts, "MAX_ASSIGNMENTS", 0)
    assert int4_experts.plan_products(layer.ids, 4, 4).rows == int4_experts.PROMPT_ROWS
    assert compute_error(layer.run(int4_experts.apply_experts), truth) < 1


def test_tokens_without_an_expert_get_only_the_shared_experts_row(device):
    layer = Layer.make(device, tokens=5, hidden=128, width=32, group=32)
    layer.ids[::2], layer.weights[::2] = NO_EXPERT, 0.0
    found = layer.run(int4_experts.apply_experts)
    assert torch.equal(found[::2], layer.shared[::2])
    assert compute_error(found, layer.run(int4_experts.apply_experts_reference)) < 1


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_wrong_scale_or_swapped_number_exceeds_the_error_limit(group, device):
    """Use another group's scale, and exchange the numbers of two parts."""
    layer = Layer.make(device, tokens=5, hidden=256, width=128, group=group)
    truth = layer.run(int4_experts.apply_experts_reference)
    q, scale = int4.unpack(layer.gate_up)
    for wrong in (int4.pack(q, scale.roll(1, -1)), int4.pack(q.view(4, -1, 4, 64).flip(2).flatten(2), scale)):
        other = dataclasses.replace(layer, gate_up=wrong)
        assert compute_error(other.run(int4_experts.apply_experts), truth) > 1


def compute_sorted_truth(x, weight, plan, ids, *, gated):
    """Return the sorted rows of a product with dequantised experts, in fp32."""
    source = plan.source.long()
    rows = (x[source // ids.shape[1]] if gated else x).float()
    expert = ids.flatten()[source]
    truth = torch.cat(
        [rows[expert == e] @ int4.dequantize(weight.select_expert(e))[0].T for e in range(weight.shape[0])]
    )
    if not gated:
        return truth
    gate, up = truth.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def check_tilings(product, group, requests, experts, sizes, tilings, device):
    """Compare each tiling with the dequantised product. `sizes` are those of rows and of results."""
    random = torch.Generator(device).manual_seed(requests + group)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    (depth, width), gated = sizes, product == "gate-up"
    weight = make_weight(random, experts, 2 * width if gated else width, depth, group=group)
    ids = torch.multinomial(torch.ones(requests, experts, device=device), 2, generator=random).int()
    x = torch.randn(requests if gated else ids.numel(), depth, generator=random, device=device).to(dtype)
    plan = int4_experts.plan_products(ids, 0, experts)
    truth = compute_sorted_truth(x, weight, plan, ids, gated=gated)
    for columns, stages, warps, weight_first in tilings:
        tiling = Tiling(columns=columns, stages=stages, warps=warps, weight_first=weight_first)
        found = int4_experts.compute_product(x, weight, plan, 2, gated=gated, tiling=tiling)
        assert compute_error(found, truth) < 1, tiling


@pytest.mark.parametrize("product", ["gate-up", "down"])
def test_each_order_of_operands_agrees_with_the_dequantised_product(product, device):
    tilings = [(32, 2, 4, True), (32, 2, 4, False)]
    check_tilings(product, 32, 9, 3, (128, 48), tilings, device)


def test_tilings_tool_checks_each_product_and_reports_a_wrong_one(tmp_path, capsys, monkeypatch):
    """Run one tiling of each product; then make gate-up's result wrong."""
    words = ["--model", "tiny", "--tp", "1", "--requests", "2", "--gate-up", "32x2x4xw", "--down", "64x2x4xr"]
    words += ["-o", str(tmp_path / "tilings.jsonl")]
    assert int4_tilings.main(words) == 0
    gate_up, down = capsys.readouterr().out.splitlines()
    assert "32x2x4xw is right" in gate_up
    assert "64x2x4xr is right" in down
    right = int4_experts.compute_product

    def compute_wrong(*given, gated, **more):
        assert int4_experts.choose_tiling(16, gated=gated).weight_first == gated
        return right(*given, gated=gated, **more) * (1.1 if gated else 1)

    monkeypatch.setattr(int4_experts, "compute_product", compute_wrong)
    assert int4_tilings.main(words) == 1
    gate_up, down = capsys.readouterr().out.splitlines()
    assert "32x2x4xw WRONG" in gate_up
    assert "64x2x4xr is right" in down
    with pytest.raises(SystemExit):
        int4_tilings.main([*words, "--down", "64x2x4"])
    assert "a tiling is COLUMNSxSTAGESxWARPSxFIRST" in capsys.readouterr().err


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dcpbench.kernels.moe.int4_experts import _product_kernel as kernel

asked = json.load(sys.stdin)
names = kernel.arg_names
types = {name: asked["types"].get(name, "constexpr" if name.isupper() else "i32") for name in names}
constants = {(names.index(name),): value for name, value in asked["constants"].items()}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*asked["types"], "columns", "depth")}
source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
found = triton.compile(source, target=GPUTarget("cuda", asked["target"], 32), options={"num_warps": asked["warps"]})
json.dump({"shared": found.metadata.shared, "text": found.asm["ttgir"]}, sys.stdout)
"""


@pytest.mark.parametrize(
    ("target", "shared_kib", "rows", "group"),
    [(90, 227, 16, 32), (90, 227, 32, 32), (90, 227, 64, 32), (90, 227, 16, 128), (80, 163, 16, 32)],
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.long
def test_product_kernel_compiles_for_gpus_and_unpacks_in_registers(group, gated, rows, target, shared_kib, tmp_path):
    """Compile with Triton, without a GPU. Shared memory holds only loaded data: registers are never stored there."""
    tiling = int4_experts.choose_tiling(rows, gated=gated)
    types = {"x": "*bf16", "weight": "*i16", "scale": "*i64" if group == 32 else "*i32", "out": "*bf16"}
    constants = {
        "GATED": gated, "TOP_K": 8, "ROWS": rows, "WEIGHT_FIRST": tiling.weight_first, "BLOCK_N": tiling.columns, "GROUP": group,
        "TOGETHER": int4.SPANS[group] // int4.BLOCK, "STAGES": tiling.stages, "EVEN": True, "NATIVE": True,
    }  # fmt: skip
    requested = {"types": types | {"source": "*i32", "tiles": "*i32"}, "constants": constants, "target": target}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(requested | {"warps": tiling.warps}),
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shared"] <= shared_kib * 1024
    assert "local_alloc %" not in found["text"]


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [8, 32, 300])
@pytest.mark.parametrize("group", INT4_GROUPS)
@pytest.mark.parametrize("product", ["gate-up", "down"])
def test_every_tiling_agrees_with_the_dequantised_product_on_a_gpu(product, group, requests, device):
    """Use experts of DeepSeek-V3's width, divided by 8: rows in bf16, and tiles of 16 and 32 rows."""
    sizes = (7168, 256) if product == "gate-up" else (256, 7168)
    check_tilings(product, group, requests, 16, sizes, TILINGS[product], device)
