"""Bench gqa: its check passes right backends and notices wrong ones; its work is worked out by hand."""

import pytest

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators import gqa_attention as gqa
from dcpbench.bench.operators.gqa_attention import Gqa
from dcpbench.kernels.gqa.reference import ReferenceGqa
from tools import gqa_tilings


def case(variant="reference", **sizes) -> Case:
    """3 requests of 10 rows on pages of 4, two pools."""
    default = {"heads": 8, "kv_heads": 2, "head_dim": 16, "requests": 3, "context": 10, "page": 4}
    return Case(variant=variant, calls=2, sizes=default | {"lengths": "even", "kv": "bf16"} | sizes)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sizes", [{}, {"lengths": "uneven"}, {"kv": "fp8"}, {"kv_heads": 8}], ids=str)
def test_a_right_backend_passes(sizes, backend, device):
    calls = Gqa(device, 0).build_calls(case(backend, **sizes))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2


def test_the_work_is_every_row_q_and_o_once(device):
    """30 rows of 2 · 2 · 16 fp32 numbers, q and o of 3 · 8 · 16 each; 4 operations per row, head and column."""
    calls = Gqa(device, 0).build_calls(case())
    itemsize = 2 if device.type == "cuda" else 4
    assert calls.work.memory_bytes == (30 * 64 + 2 * 3 * 8 * 16) * itemsize
    assert calls.work.flops == 4 * 30 * 8 * 16


class Library(ReferenceGqa):
    """A library whose kernel gives a binary logarithm."""

    def run_kernel(self, q_BHX, kv, o_BHX, lse_BH):
        """See FlashInferGqa."""
        self.run(q_BHX, kv, o_BHX, lse_BH)
        lse_BH.mul_(1 / 0.69314718)


def test_the_librarys_kernel_is_timed_without_the_conversion_of_its_logarithm(device, monkeypatch):
    monkeypatch.setattr(gqa, "make_gqa_backend", lambda _, spec: Library(spec))
    calls = Gqa(device, 0).build_calls(case())
    assert calls.check(calls.run) == ""
    assert calls.calls[0].func.__name__ == "run_kernel"


@pytest.mark.parametrize("wrong", ["head", "row", "lse"])
def test_a_wrong_backend_is_noticed(wrong, device, monkeypatch):
    """Another group's KV head, other rows, a log-sum-exp that is off."""

    class Wrong(ReferenceGqa):
        def run(self, q_BHX, kv, o_BHX, lse_BH):
            super().run(q_BHX, kv.roll(1, dims=1) if wrong == "row" else kv, o_BHX, lse_BH)
            if wrong == "head":
                o_BHX.copy_(o_BHX.roll(4, dims=1))
            if wrong == "lse":
                lse_BH += 0.5

    monkeypatch.setattr(gqa, "make_gqa_backend", lambda _, spec: Wrong(spec))
    calls = Gqa(device, 0).build_calls(case())
    assert calls.check(calls.run) != ""


def test_tilings_are_checked_beside_a_backend(tmp_path, capsys):
    """One word is a tiling, one a backend; both are right."""
    words = ["reference", "16x4x2x1", "--cases", "2x40", "--heads", "8", "--kv-heads", "2", "--page", "16"]
    assert gqa_tilings.main([*words, "--head-dim", "16", "-o", str(tmp_path / "tilings.jsonl")]) == 0
    assert "16x4x2x1" in capsys.readouterr().out
