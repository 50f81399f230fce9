"""Test bench gqa: right backends pass its check, wrong ones fail it, and its work is counted."""

import pytest

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators import gqa_attention as gqa
from dcpbench.bench.operators.gqa_attention import Gqa
from dcpbench.kernels.gqa.reference import ReferenceGqa
from tools import gqa_tilings


def make_case(variant="reference", **sizes) -> Case:
    """Return a case of 3 requests of 10 rows on pages of 4, with two pools."""
    default = {"heads": 8, "kv_heads": 2, "head_dim": 16, "requests": 3, "context": 10, "page": 4}
    return Case(variant=variant, calls=2, sizes=default | {"lengths": "even", "kv": "bf16"} | sizes)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sizes", [{}, {"lengths": "uneven"}, {"kv": "fp8"}, {"kv_heads": 8}], ids=str)
def test_correct_backend_passes_the_check(sizes, backend, device):
    calls = Gqa(device, 0).build_calls(make_case(backend, **sizes))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2


def test_work_counts_each_row_q_and_o_once(device):
    """Count 30 rows of 2 · 2 · 16 fp32 numbers, q and o of 3 · 8 · 16 each; 4 operations per row, head and column."""
    calls = Gqa(device, 0).build_calls(make_case())
    itemsize = 2 if device.type == "cuda" else 4
    assert calls.work.memory_bytes == (30 * 64 + 2 * 3 * 8 * 16) * itemsize
    assert calls.work.flops == 4 * 30 * 8 * 16


class BinaryLogLibrary(ReferenceGqa):
    """A library with a kernel that returns a binary logarithm."""

    def run_kernel(self, q_BHX, kv, o_BHX, lse_BH):
        """See FlashInferGqa."""
        self.run(q_BHX, kv, o_BHX, lse_BH)
        lse_BH.mul_(1 / 0.69314718)


def test_library_kernel_is_timed_without_converting_its_logarithm(device, monkeypatch):
    monkeypatch.setattr(gqa, "make_gqa_backend", lambda _, spec: BinaryLogLibrary(spec))
    calls = Gqa(device, 0).build_calls(make_case())
    assert calls.check(calls.run) == ""
    assert calls.calls[0].func.__name__ == "run_kernel"


@pytest.mark.parametrize("wrong", ["head", "row", "lse"])
def test_wrong_backend_fails_the_check(wrong, device, monkeypatch):
    """Use another group's KV head, other rows, or a shifted log-sum-exp."""

    class Wrong(ReferenceGqa):
        def run(self, q_BHX, kv, o_BHX, lse_BH):
            super().run(q_BHX, kv.roll(1, dims=1) if wrong == "row" else kv, o_BHX, lse_BH)
            if wrong == "head":
                o_BHX.copy_(o_BHX.roll(4, dims=1))
            if wrong == "lse":
                lse_BH += 0.5

    monkeypatch.setattr(gqa, "make_gqa_backend", lambda _, spec: Wrong(spec))
    calls = Gqa(device, 0).build_calls(make_case())
    assert calls.check(calls.run) != ""


def test_tilings_are_compared_with_a_backend(tmp_path, capsys):
    """Pass one backend and one tiling, both correct."""
    words = ["reference", "16x4x2x1", "--cases", "2x40", "--heads", "8", "--kv-heads", "2", "--page", "16"]
    assert gqa_tilings.main([*words, "--head-dim", "16", "-o", str(tmp_path / "tilings.jsonl")]) == 0
    assert "16x4x2x1" in capsys.readouterr().out
