"""Test bench moe: right variants pass its check, wrong ones fail it, and the bytes of a call are counted."""

import dataclasses
import sys
import types

import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.cases import BenchOptions, list_moe_cases
from dcpbench.bench.operators import moe
from dcpbench.bench.operators.moe import Inputs, Moe, Sizes
from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels import block_scaled, int4
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.models.weight_formats import INT4_GROUPS

SIZES = {"experts": 16, "top_k": 4, "hidden": 48, "width": 24}
WIDE = {"experts": 4, "top_k": 2, "hidden": 256, "width": 128}


def make_case(variant: str, product: str, rows: str = "uniform", requests: int = 20, **sizes) -> Case:
    """Return a case of 16 experts, 4 of them for each of 20 tokens, with two sets of tensors."""
    sizes = {"product": product, **SIZES, "requests": requests, "rows": rows, **sizes}
    return Case(variant=variant, calls=2, sizes=sizes)


def make_fp8_case(variant: str, product: str) -> Case:
    """Return an fp8 case with two blocks of scales in each direction."""
    return make_case(variant, product, requests=5, weights="fp8", **WIDE)


@pytest.mark.parametrize("rows", ["uniform", "skewed", "few"])
@pytest.mark.parametrize("product", ["gate-up", "down"])
@pytest.mark.parametrize("variant", ["triton", "torch"])
@pytest.mark.sample(5)
def test_every_variant_agrees_with_fp64(variant, product, rows, device):
    calls = Moe(device, 0).build_calls(make_case(variant, product, rows))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2


@pytest.mark.parametrize("product", ["gate-up", "down"])
@pytest.mark.parametrize("variant", ["triton", "torch"])
@pytest.mark.sample(3)
def test_wrong_product_fails_the_check(variant, product, device, monkeypatch):
    """Scale by 2 %, reorder one expert's rows, or return zeros."""
    right = moe.VARIANTS[variant]
    for wrong in (lambda y: y * 1.02, lambda y: y.flip(0), torch.zeros_like):
        monkeypatch.setitem(
            moe.VARIANTS,
            variant,
            lambda inputs, wrong=wrong: dataclasses.replace(
                right(inputs), call=lambda: (wrong(*right(inputs).call()),)
            ),
        )
        calls = Moe(device, 0).build_calls(make_case(variant, product))
        assert "relative error" in calls.check(calls.run)


@pytest.mark.parametrize("product", ["gate-up", "down"])
def test_fp8_product_agrees_with_fp64_over_dequantised_weights(product, device, monkeypatch):
    """Check also that a product fails if it is 2 % too large or has another block's scale."""
    calls = Moe(device, 0).build_calls(make_fp8_case("triton", product))
    assert calls.check(calls.run) == ""
    right = moe.VARIANTS["triton"]
    for wrong in (lambda w: w.scale * 1.02, lambda w: w.scale.roll(1, -1) + w.scale / 9):

        def make_wrong(inputs, wrong=wrong):
            return right(dataclasses.replace(inputs, weight=Scaled(inputs.weight.data, wrong(inputs.weight))))

        monkeypatch.setitem(moe.VARIANTS, "triton", make_wrong)
        calls = Moe(device, 0).build_calls(make_fp8_case("triton", product))
        assert "relative error" in calls.check(calls.run)


def test_fp8_work_counts_one_byte_per_weight_and_the_scales():
    """Count gate-up of 2 experts of 256 × 256 with 4 scales each, tokens in bf16, and 6 results of 128 with a scale
    each.
    """
    sizes = Sizes(product="gate-up", **WIDE, requests=3, weights="fp8", rows="few")
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    weight = Scaled(torch.zeros(4, 256, 256, dtype=torch.float8_e4m3fn), torch.zeros(4, 2, 2))
    ids = torch.zeros(3, 2, dtype=torch.int32)
    gate_up = Inputs(sizes=sizes, x=x, weight=weight, ids=ids, counts=[3, 0, 3, 0]).compute_work()
    assert gate_up.memory_bytes == 2 * (256 * 256 + 4 * 4) + 3 * 256 * 2 + 6 * (128 + 4)
    down = Scaled(torch.zeros(4, 256, 128, dtype=torch.float8_e4m3fn), torch.zeros(4, 2, 1))
    sizes = dataclasses.replace(sizes, product="down")
    x = torch.zeros(6, 128, dtype=torch.bfloat16)
    work = Inputs(sizes=sizes, x=x, weight=down, ids=ids, counts=[3, 0, 3, 0]).compute_work()
    assert work.memory_bytes == 2 * (256 * 128 + 2 * 4) + 6 * (128 + 4) + 6 * 256 * 2


@pytest.mark.parametrize("group", INT4_GROUPS)
@pytest.mark.parametrize("product", ["gate-up", "down"])
def test_int4_product_agrees_with_fp64_over_dequantised_weights(product, group, device, monkeypatch):
    """Check also that a product fails if it is 2 % too large or has another group's scale."""
    build = Moe(device, 0).build_calls
    one = make_case("triton", product, requests=5, weights="int4", group_size=group, **WIDE)
    calls = build(one)
    assert calls.check(calls.run) == ""
    right = moe.VARIANTS["triton"]
    for wrong in (lambda q, s: (q, s * 1.02), lambda q, s: (q, s.roll(1, 1))):

        def make_wrong(inputs, wrong=wrong):
            return right(dataclasses.replace(inputs, weight=int4.pack(*wrong(*int4.unpack(inputs.weight)))))

        monkeypatch.setitem(moe.VARIANTS, "triton", make_wrong)
        calls = build(one)
        assert "relative error" in calls.check(calls.run)


def test_int4_work_counts_half_a_byte_per_weight_and_the_scales():
    """Count gate-up of 2 experts of 256 × 256 with 8 or 2 scales of 2 bytes a row, tokens and 6 results of 128 in
    bf16.
    """
    for group, scales in ((32, 8), (128, 2)):
        sizes = Sizes(product="gate-up", **WIDE, requests=3, weights="int4", group_size=group, rows="few")
        x = torch.zeros(3, 256, dtype=torch.bfloat16)
        ids = torch.zeros(3, 2, dtype=torch.int32)
        weight = int4.quantize(torch.zeros(4, 256, 256), group)
        work = Inputs(sizes=sizes, x=x, weight=weight, ids=ids, counts=[3, 0, 3, 0]).compute_work()
        assert work.memory_bytes == 2 * 256 * (128 + 2 * scales) + 2 * (3 * 256 + 6 * 128)
        assert (work.flops, work.flops_limit) == (2 * 6 * 256 * 256, "matmul")


def test_random_int4_weights_keep_the_norm_of_their_input():
    """Expect a standard deviation of 1/√K, as in the other formats."""
    weight = int4.dequantize(int4.draw_random((2, 64, 384), 128, 384**-0.5, torch.Generator().manual_seed(0)))
    assert float(weight.square().mean()) == pytest.approx(1 / 384, rel=0.1)


def test_torch_variant_is_rejected_for_fp8(device):
    with pytest.raises(UsageError, match="--variant triton,deepgemm"):
        Moe(device, 0).build_calls(make_fp8_case("torch", "down"))


@pytest.mark.parametrize("variant", ["torch", "deepgemm"])
def test_variants_other_than_triton_are_rejected_for_int4(variant, device):
    with pytest.raises(UsageError, match="use --variant triton with --weights int4"):
        Moe(device, 0).build_calls(make_case(variant, "down", weights="int4", group_size=32, **WIDE))


def make_inputs(product: str, counts: list[int]) -> Inputs:
    """Return inputs of 3 tokens with 2 experts each, 8 columns and experts of width 4, in bf16."""
    sizes = Sizes(product=product, experts=4, top_k=2, hidden=8, width=4, requests=3, rows="few")
    rows, width = (3, 8) if product == "gate-up" else (6, 4)
    return Inputs(
        sizes=sizes,
        x=torch.zeros(rows, width, dtype=torch.bfloat16),
        weight=torch.zeros(sizes.weight, dtype=torch.bfloat16),
        ids=torch.zeros(3, 2, dtype=torch.int32),
        counts=counts,
    )


def test_work_counts_only_experts_with_rows():
    """Count gate-up: 2 experts of 8 × 8, 3 tokens of 8, 6 results of 4; down: 2 of 8 × 4, 6 rows of 4, 6 results of 8."""
    work = make_inputs("gate-up", [3, 0, 3, 0]).compute_work()
    assert work.memory_bytes == 2 * (2 * 8 * 8 + 3 * 8 + 6 * 4)
    assert work.flops == 2 * 6 * 8 * 8
    assert work.memory_limit == "read"
    work = make_inputs("down", [3, 0, 3, 0]).compute_work()
    assert work.memory_bytes == 2 * (2 * 8 * 4 + 6 * 4 + 6 * 8)
    assert work.flops == 2 * 6 * 8 * 4


def test_rows_option_controls_the_distribution_over_experts(device):
    """Expect for `few` experts 0, 4, 8 and 12 alone, so that every token has all four; for `skewed`, expert 0 has more
    rows than expert 15.
    """
    build = Moe(device, 0)
    random = torch.Generator(device).manual_seed(0)
    found = {
        rows: build._make_inputs(Sizes(product="down", **SIZES, requests=64, rows=rows), random).counts
        for rows in ("uniform", "skewed", "few")
    }
    assert found["few"] == [64 * (e % 4 == 0) for e in range(16)]
    assert found["skewed"][0] > 2 * found["skewed"][15]
    assert all(0 < count < 32 for count in found["uniform"])
    assert [sum(counts) for counts in found.values()] == [256, 256, 256]


@pytest.mark.long
def test_deepgemm_receives_a_slab_of_rows_for_each_expert(device, monkeypatch):
    """Use a fake with the same signature, which multiplies the given number of rows in slabs of 64; 4 slabs have rows."""

    def masked(x, weight, out, counts, expected):
        assert x.shape[:2] == (16, 64)
        assert expected == 5
        assert counts.tolist() == [20 * (e % 4 == 0) for e in range(16)]
        for e, count in enumerate(counts.tolist()):
            out[e, :count] = x[e, :count] @ weight[e].T

    module = types.SimpleNamespace(m_grouped_bf16_gemm_nt_masked=masked)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    for product in ("gate-up", "down"):
        calls = Moe(device, 0).build_calls(make_case("deepgemm", product, "few"))
        assert calls.check(calls.run) == ""

    def masked_fp8(x, weight, out, counts, expected):
        assert expected == 3
        x, weight = (Scaled(*each) for each in (x, weight))
        for e, count in enumerate(counts.tolist()):
            rows = block_scaled.dequantize_rows(Scaled(x.data[e, :count], x.scale[e, :count]))
            out[e, :count] = rows @ block_scaled.dequantize_weight(Scaled(weight.data[e], weight.scale[e])).T

    module.fp8_m_grouped_gemm_nt_masked = masked_fp8
    for product in ("gate-up", "down"):
        calls = Moe(device, 0).build_calls(make_fp8_case("deepgemm", product))
        assert calls.check(calls.run) == ""


def test_missing_deepgemm_raises_an_error_with_other_variants(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(MissingPackageError, match="--variant triton,torch"):
        Moe(device, 0).build_calls(make_case("deepgemm", "down"))


class TestCases:
    def cases(self, cpu=False, **options_given):
        options = {
            "model": None,
            "tp": None,
            "requests": None,
            "rows": "uniform",
            "weights": "bf16",
            "group_size": None,
        }
        options |= {"variant": None, "layers": None}
        return list_moe_cases(BenchOptions(cpu=cpu, typed={**options, **options_given}))

    def test_experts_are_split_over_ranks_by_width(self):
        """Expect fractions of DeepSeek-V3's expert width, 2048."""
        assert {(c.sizes["experts"], c.sizes["width"]) for c in self.cases()} == {(256, 2048), (256, 512), (256, 256)}
        assert {c.sizes["experts"] for c in self.cases(model="kimi-k2")} == {384}

    def test_fp8_cases_use_only_variants_that_support_it(self):
        assert "torch" not in {c.variant for c in self.cases(weights="fp8")}
        with pytest.raises(UsageError, match=r"multiples of 128, and tiny's experts are .* try --weights bf16"):
            self.cases(weights="fp8", model="tiny")

    def test_int4_cases_have_one_case_for_each_group_size(self):
        cases = self.cases(weights="bf16,int4", group_size="32,128", tp="1", requests="8", variant="triton")
        found = [(c.sizes["weights"], c.sizes.get("group_size")) for c in cases if c.sizes["product"] == "down"]
        assert found == [("bf16", None), ("int4", 32), ("int4", 128)]
        assert {c.sizes["group_size"] for c in self.cases(weights="int4")} == {32}
        assert {c.variant for c in self.cases(weights="int4")} == {"triton"}
        with pytest.raises(UsageError, match="--group-size 64 is none of 32, 128; write --group-size 32"):
            self.cases(weights="int4", group_size="64")

    def test_int4_requires_expert_widths_of_whole_groups(self):
        """Use Qwen3-30B's experts of width 768: 96 over tp8, three groups of 32."""
        assert self.cases(weights="int4", model="qwen3-30b-a3b", tp="8")
        with pytest.raises(UsageError, match=r"multiples of 128, and qwen3-30b-a3b's experts are .* try --tp 1"):
            self.cases(weights="int4", model="qwen3-30b-a3b", tp="8", group_size="128")
        cases = self.cases(weights="int4", cpu=True)
        assert {c.sizes["width"] for c in cases} == {32}  # the tiny model's; over tp2 they have half a group

    def test_fp8_of_the_default_cpu_model_is_rejected_when_built(self, device):
        """Reject it late, because options are validated as for the CPU before a GPU is detected."""
        (first, *_) = self.cases(weights="fp8", cpu=True)
        with pytest.raises(UsageError, match="--weights fp8 takes --model deepseek-v3"):
            Moe(device, 0).build_calls(first)

    def test_indivisible_expert_width_and_unknown_rows_are_rejected(self):
        with pytest.raises(UsageError, match="--tp 3 does not divide deepseek-v3's experts, 2048 wide; try --tp 1"):
            self.cases(tp="3")
        with pytest.raises(UsageError, match="--rows 'skew' is unknown; did you mean skewed"):
            self.cases(rows="skew")

    def test_named_variant_is_listed_even_if_it_is_not_installed(self):
        assert {c.variant for c in self.cases(variant="deepgemm")} == {"deepgemm"}
        assert {c.variant for c in self.cases(cpu=True)} == {"triton", "torch"}
