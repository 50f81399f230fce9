"""Test bench linear: right variants pass its check, wrong ones fail it, and the bytes of a call are counted."""

import sys
import types

import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.cases import BenchOptions, list_linear_cases
from dcpbench.bench.operators import linear
from dcpbench.bench.operators.linear import Linear
from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels.block_scaled import Scaled, dequantize_rows, dequantize_weight, quantize_rows_reference
from dcpbench.models.weight_formats import FORMATS, FP8, UNQUANTISED
from dcpbench.points.memory import LinearShape
from dcpbench.points.roofline import compute_linear_work


def make_case(variant: str, weights: str = "fp8", rows: int = 3) -> Case:
    """Return a case with 256 inputs and 200 outputs: a block and a part of one."""
    return Case(
        variant=variant,
        calls=2,
        sizes={"layer": "o", "inputs": 256, "outputs": 200, "rows": rows, "weights": weights},
    )


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize(("variant", "weights"), [("triton", "fp8"), ("torch", "bf16")])
def test_every_variant_agrees_with_fp64(variant, weights, rows, device):
    calls = Linear(device, 0).build_calls(make_case(variant, weights, rows))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2


@pytest.mark.parametrize(("variant", "weights"), [("triton", "fp8"), ("torch", "bf16")])
def test_wrong_product_fails_the_check(variant, weights, device, monkeypatch):
    """Scale by 1 %, reorder rows, or return zeros."""
    right = linear.VARIANTS[variant]
    for wrong in (lambda y: y * 1.01, lambda y: y.flip(0), torch.zeros_like):
        monkeypatch.setitem(
            linear.VARIANTS, variant, lambda x, w, wrong=wrong: lambda: tuple(map(wrong, right(x, w)()))
        )
        calls = Linear(device, 0).build_calls(make_case(variant, weights))
        assert "relative error" in calls.check(calls.run)


def test_libraries_receive_arguments_of_their_signatures(device, monkeypatch):
    """Use fakes: DeepGEMM takes quantised rows, FlashInfer quantises them itself."""

    def fp8_gemm_nt(x, weight, out):
        out.copy_(dequantize_rows(Scaled(*x, (1, 128))) @ dequantize_weight(Scaled(*weight)).T)

    def fp8_blockscale_gemm_sm90(x, weight, input_scale, weight_scale):
        assert input_scale is None
        rows = dequantize_rows(quantize_rows_reference(x))
        return (rows @ dequantize_weight(Scaled(weight, weight_scale)).T).to(x.dtype)

    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    fake = types.SimpleNamespace(fp8_blockscale_gemm_sm90=fp8_blockscale_gemm_sm90)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", fake)
    for name in ("deepgemm", "flashinfer"):
        calls = Linear(device, 0).build_calls(make_case(name))
        assert calls.check(calls.run) == ""


@pytest.mark.parametrize(("variant", "module"), [("deepgemm", "deep_gemm"), ("flashinfer", "flashinfer.gemm")])
def test_missing_library_raises_an_error_with_another_variant(variant, module, device, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match="--variant triton"):
        Linear(device, 0).build_calls(make_case(variant))


def test_variant_without_support_for_the_weights_is_rejected(device):
    for name in ("triton", "deepgemm", "flashinfer"):
        with pytest.raises(UsageError, match="--variant torch with --weights bf16"):
            Linear(device, 0).build_calls(make_case(name, "bf16"))
    with pytest.raises(UsageError, match="--variant triton,deepgemm with --weights fp8"):
        Linear(device, 0).build_calls(make_case("torch"))


def test_work_counts_weights_scales_and_rows():
    """Count 200 × 256 weights in 2 × 2 blocks, 3 rows of 256 in and of 200 out in bf16; bf16 weights are twice as
    large.
    """
    work = compute_linear_work(LinearShape(256, 200), 3, itemsize=2, weights=FORMATS[FP8])
    assert work.memory_bytes == 200 * 256 + 4 * 4 + 3 * (256 + 200) * 2
    assert (work.flops, work.flops_limit) == (2 * 3 * 200 * 256, "matmul_fp8")
    work = compute_linear_work(LinearShape(256, 200), 3, itemsize=2, weights=UNQUANTISED)
    assert work.memory_bytes == 2 * 200 * 256 + 3 * (256 + 200) * 2
    assert work.flops_limit == "matmul"


class TestCases:
    def cases(self, cpu=False, **typed):
        options = dict.fromkeys(("model", "tp", "rows", "matrix", "weights", "variant", "layers"))
        return list_linear_cases(BenchOptions(cpu=cpu, typed={**options, **typed}))

    def sizes(self, **typed):
        return {c.sizes["layer"]: (c.sizes["outputs"], c.sizes["inputs"]) for c in self.cases(rows="16", **typed)}

    def test_default_layers_have_the_sizes_of_deepseek_v3(self):
        """Expect 128 heads of 192 in q and 128 in o; experts 2048 wide, dense layers 18432. qkv_a is the same on all
        ranks.
        """
        assert self.sizes(tp="1") == {
            "qkv_a": (2112, 7168),
            "q_b": (24576, 1536),
            "o": (7168, 16384),
            "shared-gate-up": (4096, 7168),
            "shared-down": (7168, 2048),
            "dense-gate-up": (36864, 7168),
            "dense-down": (7168, 18432),
        }
        assert self.sizes(tp="8")["o"] == (7168, 2048)
        assert self.sizes(tp="8")["qkv_a"] == (2112, 7168)
        assert self.sizes(tp="1", model="kimi-k2")["o"] == (7168, 8192)

    def test_cases_pair_each_variant_with_the_weights_it_supports(self):
        both = self.cases(tp="1", rows="16", weights="bf16,fp8", cpu=True)
        assert {(c.variant, c.sizes["weights"]) for c in both} == {("torch", "bf16"), ("triton", "fp8")}

    def test_indivisible_tp_and_absent_matrix_are_rejected(self):
        with pytest.raises(UsageError, match="--tp 3 does not divide deepseek-v3's heads and widths; try --tp 1"):
            self.cases(tp="3")
        with pytest.raises(UsageError, match="deepseek-v2-lite has no q_b; try --matrix o"):
            self.cases(model="deepseek-v2-lite", tp="1", matrix="q_b")
