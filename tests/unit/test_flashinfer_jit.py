"""Compilation of FlashInfer's prefill kernels ahead of their first use, with a package that stands in for FlashInfer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dcpbench.kernels.prefill import flashinfer_jit

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16


class FlashInfer:
    """Replace the functions of FlashInfer that flashinfer_jit uses; one module, compiled or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, compiled: bool, backend: str = "fa3") -> None:
        self.module = SimpleNamespace(is_compiled=compiled, build=self.build)
        self.backend, self.builds, self.asked = backend, list[bool](), list[tuple[object, ...]]()
        attention, utils = ModuleType("flashinfer.jit.attention"), ModuleType("flashinfer.utils")
        attention.gen_batch_prefill_module = self.describe  # type: ignore[attr-defined]
        utils.determine_attention_backend = self.choose  # type: ignore[attr-defined]
        for name in ("flashinfer", "flashinfer.jit"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, attention.__name__, attention)
        monkeypatch.setitem(sys.modules, utils.__name__, utils)

    def choose(self, device: torch.device, *_: object, head_dim_qk: int, head_dim_vo: int) -> str:
        assert (device, head_dim_qk, head_dim_vo) == (GPU, 192, 128)
        return self.backend

    def describe(self, *options: object) -> SimpleNamespace:
        self.asked.append(options)
        return self.module

    def build(self, *, verbose: bool) -> None:
        self.builds.append(verbose)


def test_missing_module_is_compiled_with_concurrent_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is that of FlashInfer's own call: its backend, one dtype for all, int32 offsets, and no options."""
    fake, env = FlashInfer(monkeypatch, compiled=False), dict[str, str]()
    assert not flashinfer_jit.is_compiled(192, 128, BF16, GPU)
    flashinfer_jit.compile_module(192, 128, BF16, GPU, env)
    assert fake.builds == [False]
    assert fake.asked[-1] == ("fa3", BF16, BF16, BF16, torch.int32, 192, 128, 0, False, False, False)
    assert env == {"NVCC_APPEND_FLAGS": "--threads=4"}


def test_flags_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    FlashInfer(monkeypatch, compiled=False)
    env = {"NVCC_APPEND_FLAGS": "-lineinfo"}
    flashinfer_jit.compile_module(192, 128, BF16, GPU, env)
    assert env == {"NVCC_APPEND_FLAGS": "-lineinfo"}


def test_compiled_module_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, env = FlashInfer(monkeypatch, compiled=True), dict[str, str]()
    assert flashinfer_jit.is_compiled(192, 128, BF16, GPU)
    flashinfer_jit.compile_module(192, 128, BF16, GPU, env)
    assert not fake.builds
    assert env == {}


@pytest.mark.parametrize("without", ["gen_batch_prefill_module", "determine_attention_backend"])
def test_version_with_other_internals_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """Its kernels count as compiled, so that no phase is named after a wait that is not known."""
    FlashInfer(monkeypatch, compiled=False)
    for name in ("flashinfer.jit.attention", "flashinfer.utils"):
        monkeypatch.delattr(sys.modules[name], without, raising=False)
    assert flashinfer_jit.is_compiled(192, 128, BF16, GPU)
    with pytest.raises(ImportError):
        flashinfer_jit.compile_module(192, 128, BF16, GPU, {})


def test_version_with_other_arguments_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FlashInfer(monkeypatch, compiled=False)
    monkeypatch.setattr(sys.modules["flashinfer.utils"], "determine_attention_backend", lambda _device: fake.backend)
    assert flashinfer_jit.is_compiled(192, 128, BF16, GPU)
