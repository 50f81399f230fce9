"""Test bench attention: its sizes, and that its check fails for every kind of wrong backend."""

import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators import attention
from dcpbench.bench.operators.attention import Attention, make_lengths, make_shards
from dcpbench.kernels.attention.reference import ReferenceBackend
from dcpbench.points.roofline import compute_attention_work


def make_case(**sizes) -> Case:
    """Return a case of 3 requests of 10 rows on pages of 4, with two pools."""
    default = {"heads": 16, "requests": 3, "context": 10, "page": 4, "lengths": "even", "kv": "bf16"}
    return Case(variant="reference", calls=2, sizes=default | sizes)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("lengths", ["even", "uneven"])
def test_correct_backend_passes_the_check(lengths, backend, device):
    base_case = make_case(lengths=lengths)
    calls = Attention(device, 0).build_calls(Case(variant=backend, calls=2, sizes=base_case.sizes))
    assert calls.check(calls.run) == ""
    assert calls.error() < attention.LIMIT
    assert len(calls.calls) == 2


@pytest.mark.parametrize("variant", ["triton", "triton-rows"])
def test_query_rows_pass_the_check_together_and_as_requests(variant, device):
    """Use 3 requests of 10 rows with 4 query rows, which see 7, 8, 9 and 10."""
    calls = Attention(device, 0).build_calls(Case(variant=variant, calls=2, sizes=make_case(query_length=4).sizes))
    assert calls.check(calls.run) == ""


def test_work_counts_the_kv_rows_of_a_request_once_for_all_query_rows():
    """Use lengths 7 to 10 of one request: 10 rows are read, and 34 pairs of rows multiplied; one head of 3 and 2
    columns, 1 byte: 10·3 + 4·(3 + 2) bytes, 2·34·(3 + 2) operations.
    """
    work = compute_attention_work(1, [7, 8, 9, 10], 1, 3, 2, query_length=4)
    assert (work.memory_bytes, work.flops) == (50, 340)


class WrongBackend(ReferenceBackend):
    """A backend that passes its inputs and outputs through the function `spoil`."""

    def __init__(self, spec, spoil) -> None:
        super().__init__(spec)
        self.spoil = spoil

    def run(self, q_BHQ, kv, o_BHR, lse_BH):
        """See Backend."""
        super().run(q_BHQ, self.spoil("kv", kv.clone()), o_BHR, lse_BH)
        self.spoil("o", o_BHR)
        self.spoil("lse", lse_BH)


def base_two(what, x):
    """Return the base-2 logarithm."""
    return x.mul_(1 / 0.6931) if what == "lse" else x


def last_request_forgotten(what, x):
    """Leave the last request's output unwritten."""
    return x[-1].fill_(float("nan")) if what == "o" else x


def two_percent_off(what, x):
    """Scale every output by 2 %."""
    return x.mul_(1.02) if what == "o" else x


def one_head_wrong(what, x):
    """Give one of 16 heads another's output: 1/16 of the numbers, still far beyond rounding."""
    return x[:, 3].copy_(x[:, 4]) if what == "o" else x


def rows_changed(what, x):
    """Attend to other rows than those of the pool."""
    return x.roll(1, dims=1) if what == "kv" else x


@pytest.mark.parametrize("spoil", [base_two, last_request_forgotten, two_percent_off, one_head_wrong, rows_changed])
def test_wrong_backend_fails_the_check(spoil, device, monkeypatch):
    monkeypatch.setattr(attention, "make_backend", lambda _, spec: WrongBackend(spec, spoil))
    calls = Attention(device, 0).build_calls(make_case())
    assert calls.check(calls.run) != ""


def test_pass_that_skips_a_pool_fails_the_check(device):
    """Check for NaN, which fills outputs before a pass."""
    calls = Attention(device, 0).build_calls(make_case())
    assert "NaN" in calls.check(calls.calls[0])


def test_unused_rows_of_a_pool_are_nan(device):
    """Use 10 rows on pages of 4: the last 2 rows of each third page, and page 0, are unused."""
    bench = Attention(device, 0)
    bench.build_calls(make_case())
    pool = bench._pools.data[0]
    assert pool.shape == (1 + 3 * 3, 4, 576)
    assert pool.isnan().any(-1).sum() == 4 + 3 * 2


def test_cases_share_a_pool_unless_its_size_differs(device):
    bench = Attention(device, 0)
    bench.build_calls(make_case())
    first = bench._pools
    bench.build_calls(make_case(heads=32))
    assert bench._pools is first
    bench.build_calls(make_case(context=8))
    assert bench._pools is not first


def test_uneven_lengths_keep_their_sum_and_span_an_eighth_to_fifteen_eighths():
    """Use 5 requests of mean 80: 10, 45, 80, 115, 150 in some order."""
    lengths = make_lengths(make_case(requests=5, context=80, lengths="uneven"), seed=3)
    assert sorted(lengths) == [10, 45, 80, 115, 150]
    assert make_lengths(make_case(requests=1, context=80, lengths="uneven"), seed=3) == [80]


def test_shortest_of_uneven_lengths_has_a_row_for_each_query_row(device):
    """Use mean 16 with 2 requests: an eighth would be 2 rows, for up to 8 query rows."""
    sizes = make_case(requests=2, context=16, lengths="uneven", query_length=3)
    assert sorted(make_lengths(sizes, seed=3)) == [8, 24]
    assert sorted(make_lengths(make_case(requests=2, context=4, lengths="uneven"), seed=3)) == [4, 4]
    calls = Attention(device, 0).build_calls(sizes)
    assert calls.check(calls.run) == ""


def test_each_page_is_used_once_and_page_0_never():
    shards = make_shards([9, 1, 8], page=4, seed=0)
    assert [len(p) for p in shards.pages] == [3, 1, 2]
    assert sorted(int(i) for p in shards.pages for i in p) == [1, 2, 3, 4, 5, 6]


def test_work_of_a_call_follows_the_formula():
    """Use 2 requests, 30 rows in all, 16 heads, bf16. Rows: 30 · 576 · 2 B = 34,560 B. q and o: 2 · 16 · (576 + 512) ·
    2 B = 69,632 B. Operations: 2 · 30 · 16 · (576 + 512) = 1,044,480.
    """
    work = compute_attention_work(16, [10, 20], torch.bfloat16.itemsize)
    assert work.memory_bytes == 34_560 + 69_632
    assert work.flops == 1_044_480
    assert work.memory_limit == "read"
