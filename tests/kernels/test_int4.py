"""Test int4 weights: their layout, and experts over them against the dequantised product."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
RESULTS = Path(__file__).parents[2] / "results"
MEASURED = RESULTS / "linear-experts_H200/int4-experts_H200_2026-11-30/later/tilings.jsonl"
HIDDEN = 7168  # of DeepSeek-V3
TILINGS = {  # columns, stages, warps, True if weights are the first operand, and blocks of columns of a program
    "gate-up": [(64, 3, 2, True), (64, 4, 4, False), (128, 3, 8, True), (32, 5, 2, True), (32, 4, 1, True)],
    "down": [(64, 3, 2, True, 14), (128, 3, 2, True, 7), (128, 4, 4, True), (128, 3, 4, False), (64, 4, 1, True, 3)],
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
    source = plan.sorted_token_ids.long()
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
    for columns, stages, warps, weight_first, *blocks in tilings:
        more = {"blocks": blocks[0]} if blocks else {}
        tiling = Tiling(columns=columns, stages=stages, warps=warps, weight_first=weight_first, **more)
        found = int4_experts.compute_grouped_gemm(x, weight, plan, 2, gated=gated, tiling=tiling)
        assert compute_error(found, truth) < 1, tiling


@pytest.mark.parametrize("product", ["gate-up", "down"])
def test_each_order_of_operands_agrees_with_the_dequantised_product(product, device):
    tilings = [(32, 2, 4, True), (32, 2, 4, False)]
    check_tilings(product, 32, 9, 3, (128, 48), tilings, device)


@pytest.mark.parametrize(("group", "depth"), [(32, 96), (32, 256), (128, 128)])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_programs_of_several_blocks_of_columns_agree_with_the_dequantised_product(blocks, group, depth, device):
    """Divide 80 columns into three blocks of 32, which one, two or three programs multiply, the last with 16 columns."""
    assert depth <= int4_experts.SHORT_DEPTH
    check_tilings("down", group, 9, 3, (depth, 80), [(32, 2, 4, True, blocks), (32, 2, 4, False, blocks)], device)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (128, 8), (129, 16), (256, 16), (257, 32)])
def test_tiles_have_more_rows_for_more_tokens(tokens, rows):
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    assert int4_experts.plan_products(ids, 0, 4).rows == rows


def execute(text, *inputs, outputs):
    """Execute PTX of and, shr, mov and fma.rn.bf16x2 on int32 tensors: $0, $1 … are `outputs` results, then the inputs."""
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def read(operand):
        return torch.tensor(int(operand, 0)) if operand[0].isdigit() else registers[operand].long() & 0xFFFFFFFF

    def to_halves(words):
        halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)
        return halves.to(torch.uint16).view(torch.bfloat16).double()

    for line in text.strip("{} \n").split(";"):
        name, _, operands = line.strip().partition(" ")
        to, *given = (operand.strip() for operand in operands.split(","))
        if name in ("mov.b32", "and.b32", "shr.u32"):
            values = [read(operand) for operand in given]
            registers[to] = (
                values[0]
                if len(values) == 1
                else values[0] & values[1]
                if name == "and.b32"
                else values[0] >> values[1]
            )
        elif name == "fma.rn.bf16x2":
            a, b, c = (to_halves(read(operand)) for operand in given)
            halves = (a * b + c).to(torch.bfloat16).view(torch.uint16).long()
            registers[to] = halves[..., 0] | halves[..., 1] << 16
        else:
            assert name in (".reg", ""), name
    return [registers[f"${i}"] for i in range(outputs)]


@given(exponent=st.integers(-64, 20), seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_native_instructions_round_each_product_with_its_scale_once(exponent, seed):
    """Compare with numbers times scales, rounded to bf16, times 2^−SHRINK: exact products in fp64 have 12 bits."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 2**32, (200,), generator=random)
    scales = ((1 + torch.rand(200, 4, generator=random)) * 2.0**exponent).to(torch.bfloat16)
    bits = scales.view(torch.uint16).long()
    split = [execute(int4.SCALE.value, bits[:, i] | bits[:, i + 1] << 16, outputs=3) for i in (0, 2)]
    low, high = [[x & 0xFFFF for x in one] for one in split], [[x >> 16 for x in one] for one in split]
    even_odd = [low[0][0], high[0][1], low[1][0], high[1][1]]
    zeros = [low[0][2], high[0][2], low[1][2], high[1][2]]
    found = execute(int4.UNPACK.value, words, *(x | x << 16 for x in even_odd + zeros), outputs=4)
    for part, two in enumerate(found):
        for half in range(2):
            q = (words >> 16 * half + 4 * part & 15) - 8
            wanted = (q.double() * scales[:, part].double()).to(torch.bfloat16).double() * 2.0**-int4.SHRINK
            bf16 = (two >> 16 * half & 0xFFFF).to(torch.uint16).view(torch.bfloat16).double()
            assert torch.equal(bf16, wanted)


def test_tilings_tool_checks_each_product_and_reports_a_wrong_one(tmp_path, capsys, monkeypatch):
    """Run one tiling of each product; then make gate-up's result wrong."""
    words = ["--model", "tiny", "--tp", "1", "--requests", "2", "--gate-up", "32x2x4xw", "--down", "64x2x4xr"]
    words += ["-o", str(tmp_path / "tilings.jsonl")]
    assert int4_tilings.main(words) == 0
    gate_up, down = capsys.readouterr().out.splitlines()
    assert "32x2x4xw is right" in gate_up
    assert "64x2x4xr is right" in down
    right = int4_experts.compute_grouped_gemm

    def compute_wrong(*given, gated, **more):
        assert int4_experts.choose_tiling(8, 256, 256, 16, gated=gated).weight_first == gated
        return right(*given, gated=gated, **more) * (1.1 if gated else 1)

    monkeypatch.setattr(int4_experts, "compute_grouped_gemm", compute_wrong)
    assert int4_tilings.main(words) == 1
    gate_up, down = capsys.readouterr().out.splitlines()
    assert "32x2x4xw WRONG" in gate_up
    assert "64x2x4xr is right" in down
    for wrong, reason in (("64x2x4", "64x2x4 is no tiling"), ("before:64x2x4xw", "needs --before CHECKOUT")):
        with pytest.raises(SystemExit):
            int4_tilings.main([*words, "--down", wrong])
        assert reason in capsys.readouterr().err


def test_tilings_tool_runs_kernels_of_another_checkout_in_turns(tmp_path, capsys):
    """Let the other checkout's down be wrong by a tenth, and use tiles of 16 rows for both."""
    there = tmp_path / "checkout" / "dcpbench" / "kernels"
    (there / "moe").mkdir(parents=True)
    for name, module in (("int4.py", int4), ("moe/int4_experts.py", int4_experts)):
        text = Path(module.__file__).read_text(encoding="utf-8")
        (there / name).write_text(
            text.replace("y.to(out.dtype.element_ty)", "(y * 1.1).to(out.dtype.element_ty)"), encoding="utf-8"
        )
    words = ["--model", "tiny", "--tp", "1", "--requests", "2", "--gate-up", "32x2x4xw16"]
    words += ["--down", "64x2x4xw16x2,before:64x2x4xw16x2", "-o", str(tmp_path / "tilings.jsonl")]
    assert int4_tilings.main([*words, "--before", str(tmp_path / "checkout")]) == 1
    down = capsys.readouterr().out.splitlines()[1]
    assert "64x2x4xw16x2 is right" in down
    assert "before:64x2x4xw16x2 WRONG" in down
    with pytest.raises(SystemExit):
        int4_tilings.main([*words, "--before", str(tmp_path)])
    assert "is no checkout of this project" in capsys.readouterr().err


COMPILE = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dcpbench.kernels.moe import int4_experts

requested = json.load(sys.stdin)
kernel = getattr(int4_experts, requested["kernel"])
names = kernel.arg_names
types = {name: requested["types"].get(name, "constexpr" if name.isupper() else "i32") for name in names}
constants = {(names.index(name),): value for name, value in requested["constants"].items()}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*requested["types"], "columns", "depth") if name in names}
source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
found = triton.compile(source, target=GPUTarget("cuda", requested["target"], 32), options={"num_warps": requested["warps"]})
cubin = Path(requested["folder"], "kernel.cubin")
cubin.write_bytes(found.asm["cubin"])
cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
sass = subprocess.run([cuobjdump, "-sass", cubin], text=True, capture_output=True, check=True).stdout
json.dump({"shared": found.metadata.shared, "text": found.asm["ttgir"], "sass": sass}, sys.stdout)
"""


def compile_product(rows, depth, group, folder, tiling, target=90):
    """Compile a tiling without a GPU; return its shared memory, Triton's intermediate text and the instructions."""
    gated = depth == HIDDEN
    short = depth <= int4_experts.SHORT_DEPTH and rows <= int4_experts.SHORT_ROWS
    types = {
        "x": "*bf16",
        "weight": "*i16",
        "scale": "*i64" if group == 32 else "*i32",
        "out": "*bf16",
        "tiles": "*i32",
    }
    constants = {
        "ROWS": rows, "WEIGHT_FIRST": tiling.weight_first, "BLOCK_N": tiling.columns, "GROUP": group, "STAGES": tiling.stages,
        "TOGETHER": int4.SPANS[group] // int4.BLOCK, "EVEN": True, "NATIVE": True, "SHRINK": int4.SHRINK,
    }  # fmt: skip
    if short:
        constants |= {"SPANS": depth // int4.SPANS[group]}
    else:
        types |= {"source": "*i32"}
        constants |= {"GATED": gated, "TOP_K": 8}
    requested = {
        "kernel": "_short_product_kernel" if short else "_product_kernel",
        "types": types,
        "constants": constants,
        "target": target,
        "warps": tiling.warps,
        "folder": str(folder),
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(requested),
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("target", "shared_kib", "rows", "group"),
    [(90, 227, 8, 32), (90, 227, 16, 32), (90, 227, 32, 32), (90, 227, 64, 32), (90, 227, 8, 128), (80, 163, 8, 32)],
)
@pytest.mark.parametrize("assignments", [256, 1024])
@pytest.mark.parametrize(("depth", "columns"), [(HIDDEN, 256), (HIDDEN, 2048), (2048, HIDDEN), (256, HIDDEN)])
@pytest.mark.long
def test_product_kernels_compile_for_gpus_and_unpack_in_registers(
    group, depth, columns, assignments, rows, target, shared_kib, tmp_path
):
    """Shared memory holds loaded data and rows alone: unpacked weights are never stored there."""
    tiling = int4_experts.choose_tiling(rows, depth, columns, assignments, gated=depth == HIDDEN)
    found = compile_product(rows, depth, group, tmp_path, tiling, target=target)
    assert found["shared"] <= shared_kib * 1024
    stored = [line for line in found["text"].splitlines() if "local_alloc %" in line]
    assert all(f"x{rows}x" in line or f"<{rows}x" in line for line in stored), stored


@pytest.mark.parametrize("assignments", [256, 1024])
@pytest.mark.parametrize(("depth", "columns"), [(HIDDEN, 256), (HIDDEN, 2048), (2048, HIDDEN), (256, HIDDEN)])
@pytest.mark.long
def test_decode_kernels_take_less_than_two_instructions_per_weight(depth, columns, assignments, tmp_path):
    """Count the longest loop of the code for Hopper. A pass of it multiplies a block of weights of each matrix, or all blocks of few
    inputs; 1.125 instructions unpack and scale a weight, and 0.125 are matrix instructions.
    """
    gated = depth == HIDDEN
    tiling = int4_experts.choose_tiling(8, depth, columns, assignments, gated=gated)
    sass = compile_product(8, depth, 32, tmp_path, tiling)["sass"]
    code = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4})\*/ +(.*?);", sass)}
    jumps = [(int(to, 16), at) for at, text in code.items() for to in re.findall(r"BRA .*?0x([0-9a-f]+)", text)]
    instructions = max(sum(to <= at <= end for at in code) for to, end in jumps if to < end)
    blocks = depth // int4.BLOCK if depth <= int4_experts.SHORT_DEPTH else 1 + gated
    weights = tiling.columns * int4.BLOCK * blocks / (32 * tiling.warps)
    assert 1.25 < instructions / weights < 2


def test_chosen_tiling_is_within_1_percent_of_the_fastest_measured_one():
    """On an H200, six tilings of each product ran with DeepSeek-V3's experts, whole and divided by 8."""
    lines = list(map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines()))
    assert len(lines) == 8
    for line in lines:
        sizes, gated = line["sizes"], line["sizes"]["product"] == "gate-up"
        depth, columns = (HIDDEN, sizes["width"]) if gated else (sizes["width"], HIDDEN)
        assignments = sizes["requests"] * sizes["top_k"]
        how = int4_experts.choose_tiling(int4_experts.FEW_ROWS, depth, columns, assignments, gated=gated)
        name = f"{how.columns}x{how.stages}x{how.warps}x{'w' if how.weight_first else 'r'}"
        if how.programs != Tiling.programs:
            name += f"x{how.count_blocks(columns, sizes['experts'] + assignments // int4_experts.FEW_ROWS)}"
        us = {tiling: found["median_us"] for tiling, found in line["versions"].items()}
        assert us[name] < 1.01 * min(us.values()), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [8, 32, 200, 300])
@pytest.mark.parametrize("group", INT4_GROUPS)
@pytest.mark.parametrize("product", ["gate-up", "down"])
def test_every_tiling_agrees_with_the_dequantised_product_on_a_gpu(product, group, requests, device):
    """Use experts of DeepSeek-V3's width, divided by 8: rows in bf16, and tiles of 8, 16 and 32 rows."""
    sizes = (7168, 256) if product == "gate-up" else (256, 7168)
    check_tilings(product, group, requests, 16, sizes, TILINGS[product], device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", INT4_GROUPS)
def test_small_and_large_scales_agree_with_the_dequantised_product_on_a_gpu(group, device):
    """Weights of 2^−40 and 2^20: unpacked, they are between subnormal numbers and infinity."""
    layer = Layer.make(device, tokens=5, hidden=256, width=256, group=group)
    for size in (2.0**-40, 2.0**20):
        q, scale = int4.unpack(layer.down)
        other = dataclasses.replace(layer, down=int4.pack(q, scale * size), shared=torch.zeros_like(layer.shared))
        truth = other.run(int4_experts.apply_experts_reference)
        assert compute_error(other.run(int4_experts.apply_experts), truth) < 1
