"""Test bench merge: right kernels pass its check, wrong ones fail it, and the bytes of each are counted."""

import dataclasses

import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators import merge
from dcpbench.bench.operators.merge import Merge, Sizes


def make_case(variant: str) -> Case:
    """Return a case of 3 requests, 8 heads and 2 ranks, with two sets of tensors."""
    return Case(variant=variant, calls=2, sizes={"heads": 8, "requests": 3, "dcp": 2})


@pytest.mark.parametrize("variant", merge.VARIANTS)
def test_every_kernel_agrees_with_fp64(variant, device):
    calls = Merge(device, 0).build_calls(make_case(variant))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2


def return_scaled(ready):
    """Scale results by 2 %."""
    return lambda: tuple(x * 1.02 for x in ready.call())


def return_reversed(ready):
    """Return the right numbers in another order."""
    return lambda: tuple(x.flip(0) for x in ready.call())


def return_zeros(ready):
    """Return zeros."""
    return lambda: tuple(torch.zeros_like(x) for x in ready.call())


@pytest.mark.parametrize("wrong", [return_scaled, return_reversed, return_zeros])
@pytest.mark.parametrize("variant", merge.VARIANTS)
def test_wrong_kernel_fails_the_check(variant, wrong, device, monkeypatch):
    right = merge.VARIANTS[variant]

    def make_wrong(sizes, numbers):
        ready = right(sizes, numbers)
        return dataclasses.replace(ready, call=wrong(ready))

    monkeypatch.setitem(merge.VARIANTS, variant, make_wrong)
    calls = Merge(device, 0).build_calls(make_case(variant))
    assert "relative error" in calls.check(calls.run)


@pytest.mark.parametrize(
    ("variant", "memory_bytes"),
    [
        ("head-order", 2 * (2 * 8 * 576 * 2)),  # q of 8 heads, read and written, bf16
        ("correct", 2 * 8 * 512 * (2 + 4) + 4 * 2 * 8 * 4),  # o read in bf16, written in fp32; lse of 4 ranks
        ("pack", 2 * (2 * 8 * 512 * 2 + 2 * 8 * 4)),  # o and lse, read and written
        ("combine", 2 * 8 * (512 * 2 + 4) + 2 * 2 * 512 * 4),  # 4 messages of 2 heads; 2 heads written in fp32
        ("value-proj", 2 * 2 * 512 * 4 + 2 * 512 * 128 * 2 + 2 * 2 * 128 * 2),  # o, W_UV, result of 2 heads
    ],
)
def test_work_counts_bytes_once_in_each_direction(variant, memory_bytes, device):
    """Use 2 requests, 8 heads and 4 ranks, with 2 heads each."""
    sizes = Sizes(heads=8, requests=2, dcp=4)
    ready = merge.VARIANTS[variant](sizes, lambda *shape: torch.randn(shape, device=device))
    assert ready.work.memory_bytes == memory_bytes
    assert ready.work.flops == (2 * 2 * 2 * 512 * 128 if variant == "value-proj" else 0)
