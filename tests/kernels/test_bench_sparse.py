"""Test benches indexer and sparse-attention: right variants pass the check, wrong ones fail it, and the work is
counted.
"""

import sys
import types

import numpy as np
import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.cases import BenchOptions, list_indexer_cases, list_sparse_attention_cases
from dcpbench.bench.operators import indexer, sparse_attention
from dcpbench.bench.operators.indexer import IndexerBench
from dcpbench.bench.operators.sparse_attention import SparseAttentionBench
from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels.attention import Shards


def make_indexer_case(variant="reference", **sizes) -> Case:
    """Return a case of 3 requests of 10 keys on pages of 4, with two pools."""
    default = {"heads": 8, "width": 16, "requests": 3, "context": 10, "page": 4, "lengths": "even"}
    return Case(variant=variant, calls=2, sizes=default | sizes)


def make_sparse_case(variant="reference", **sizes) -> Case:
    """Return a case of 3 requests of 10 rows on pages of 4, of which 6 are chosen, with two pools."""
    default = {"heads": 4, "requests": 3, "context": 10, "top_k": 6, "page": 4, "lengths": "even"}
    return Case(variant=variant, calls=2, sizes=default | sizes)


@pytest.mark.parametrize("sizes", [{}, {"lengths": "uneven"}, {"width": 128, "heads": 64}], ids=str)
def test_indexer_reference_passes_the_check(sizes, device):
    """Fill unused rows with NaN, so that reading one fails."""
    calls = IndexerBench(device, 0).build_calls(make_indexer_case(**sizes))
    assert calls.check(calls.run) == ""
    assert len(calls.calls) == 2


@pytest.mark.parametrize("sizes", [{}, {"lengths": "uneven"}, {"top_k": 16}], ids=str)
def test_sparse_attention_reference_passes_the_check(sizes, device):
    """Fill rows that no request chose with NaN; a request with fewer than top_k rows has places without a token."""
    calls = SparseAttentionBench(device, 0).build_calls(make_sparse_case(**sizes))
    assert calls.check(calls.run) == ""


@pytest.mark.parametrize("wrong", ["relu", "weights", "scale", "page"])
def test_wrong_logits_fail_the_check(wrong, device, monkeypatch):
    """Keep negative products, use another head's weights, a scale of 1.01, or pages in another order."""
    right = indexer.make_reference_call

    def make_wrong(q, w, pages, table, lengths):
        if wrong == "relu":
            relu = torch.relu
            monkeypatch.setattr(
                indexer, "compute_logits", lambda q, w, k: w @ (q @ k.T if k.dtype != torch.float64 else relu(q @ k.T))
            )
        w = {"weights": w.roll(1, 1), "scale": w * 1.01}.get(wrong, w)
        return right(q, w, pages, table.roll(1, 1) if wrong == "page" else table, lengths)

    monkeypatch.setitem(indexer.VARIANTS, "reference", make_wrong)
    calls = IndexerBench(device, 0).build_calls(make_indexer_case(context=12))
    assert "relative error" in calls.check(calls.run)


@pytest.mark.parametrize("wrong", ["token", "count", "lse"])
def test_wrong_sparse_attention_fails_the_check(wrong, device, monkeypatch):
    """Replace one chosen row by another request's, leave one out, or shift the log-sum-exp."""
    right = sparse_attention.make_reference_call

    def make_wrong(q, pages, chosen):
        chosen = chosen.clone()
        if wrong == "token":
            chosen[:, 0] = chosen[:, 0].roll(1)
        if wrong == "count":
            chosen[:, 0] = sparse_attention.NO_TOKEN
        call = right(q, pages, chosen)
        return (lambda: (call()[0], call()[1] + 0.5)) if wrong == "lse" else call

    monkeypatch.setitem(sparse_attention.VARIANTS, "reference", make_wrong)
    calls = SparseAttentionBench(device, 0).build_calls(make_sparse_case())
    assert "relative error" in calls.check(calls.run)


def test_indexer_work_counts_each_key_weight_and_logit_once(device):
    """Count 30 keys of 16 + 4 bytes and as many fp32 logits; q in e4m3 and w in fp32 for 3 · 8 heads; 2 operations a
    number.
    """
    work = IndexerBench(device, 0).build_calls(make_indexer_case()).work
    assert work.memory_bytes == 30 * 20 + 30 * 4 + 3 * 8 * (16 + 4)
    assert work.flops == 2 * 30 * 8 * 16


def test_sparse_attention_work_counts_only_the_chosen_rows(device):
    """Count 3 · 6 rows of 512 + 4 · 4 + 64 · 2 = 656 bytes, V3.2's format, with an index each; q and o of 3 · 4 heads."""
    work = SparseAttentionBench(device, 0).build_calls(make_sparse_case()).work
    itemsize = 2 if device.type == "cuda" else 4
    assert sparse_attention.ROW_BYTES == 656
    assert work.memory_bytes == 18 * 656 + 18 * 4 + 3 * 4 * (576 + 512) * itemsize
    assert work.flops == 2 * 18 * 4 * (576 + 512)


def test_packed_rows_unpack_within_rounding():
    """Allow half a step of e4m3 for a latent number, half a step of bf16 for a rope number."""
    rows = torch.randn(5, 576, generator=torch.Generator().manual_seed(1))
    stored = sparse_attention.pack_rows(rows)
    assert stored.shape == (5, 656)
    found = sparse_attention.unpack_rows(stored)
    largest = rows[:, :512].unflatten(-1, (4, 128)).abs().amax(-1).repeat_interleave(128, -1)
    assert ((found - rows)[:, :512].abs() <= largest / 28 / 2 * 1.01 + rows[:, :512].abs() / 16).all()
    assert ((found - rows)[:, 512:].abs() <= rows[:, 512:].abs() / 256).all()


def test_packed_page_stores_keys_before_scales():
    """Pack two keys of 16: 32 bytes of e4m3, then two fp32 scales; the largest number of a key is stored as 448."""
    keys = torch.arange(1.0, 33.0).view(1, 2, 16)
    (page,) = indexer.pack_keys(keys)
    assert page.shape == (2 * 16 + 2 * 4,)
    assert page[:32].view(torch.float8_e4m3fn)[[15, 31]].tolist() == [448.0, 448.0]
    assert page[32:].view(torch.float32).tolist() == pytest.approx([16 / 448, 32 / 448])


def test_chosen_tokens_are_distinct_rows_of_their_request():
    """Use request 0 with rows 0 to 9 on pages 2, 1 and 4, and request 1 with 3 rows on page 3, fewer than top_k."""
    shards = Shards(pages=[np.array([2, 1, 4], np.int32), np.array([3], np.int32)], lengths=[10, 3])
    first, second = sparse_attention.choose_tokens(shards, 4, 6, seed=0).tolist()
    assert len(set(first)) == 6
    assert set(first) <= {*range(8, 12), *range(4, 8), 16, 17}
    assert sorted(second) == [-1, -1, -1, 12, 13, 14]


def test_deepgemm_receives_arguments_of_its_signature(device, monkeypatch):
    """Use a fake that reads a page's keys and scales by itself; lengths and queries have a second axis."""

    def fp8_paged_mqa_logits(q, cache, w, lengths, table, schedule, longest):
        assert q.shape[1] == 1
        assert (lengths.shape, schedule) == ((3, 1), "schedule")
        pages, page, one, row = cache.shape
        assert (one, cache.dtype, table.dtype) == (1, torch.uint8, torch.int32)
        flat, width = cache.reshape(pages, -1), row - 4
        keys = flat[:, : page * width].contiguous().view(torch.float8_e4m3fn).float().view(pages, page, width)
        keys = keys * flat[:, page * width :].contiguous().view(torch.float32)[..., None]
        own = keys[table.long()].flatten(1, 2)[:, :longest]
        return torch.einsum("bhs,bh->bs", torch.relu(torch.einsum("bhi,bsi->bhs", q[:, 0].float(), own)), w)

    monkeypatch.setitem(
        sys.modules,
        "deep_gemm",
        types.SimpleNamespace(
            fp8_paged_mqa_logits=fp8_paged_mqa_logits,
            get_paged_mqa_logits_metadata=lambda *sizes: "schedule" if sizes[1:] == (4, 132) else "",
            get_num_sms=lambda: 132,
        ),
    )
    calls = IndexerBench(device, 0).build_calls(make_indexer_case("deepgemm", lengths="uneven"))
    assert calls.check(calls.run) == ""


def test_flashmla_receives_arguments_of_its_signature(device, monkeypatch):
    """Use a fake of the paged kernel with indices: a query axis in q, indices and log-sum-exps, one KV head in the
    cache.
    """

    def flash_mla_with_kvcache(q, cache, tables, lengths, latent, schedule, *, softmax_scale, indices, **flags):
        assert (tables, lengths, latent, schedule) == (None, None, 512, "schedule")
        assert softmax_scale == 192**-0.5
        assert flags == {"is_fp8_kvcache": True, "use_legacy": True}
        assert (q.shape[1], indices.shape[1], cache.shape[2:]) == (1, 1, (1, 656))
        found = [
            sparse_attention.compute_truth(one[0].float(), cache[:, :, 0], row[0])
            for one, row in zip(q, indices, strict=True)
        ]
        return torch.stack([o for o, _ in found])[:, None].to(q.dtype), torch.stack([lse for _, lse in found])[
            ..., None
        ]

    package = types.SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: ("schedule", None)
    )
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    monkeypatch.setitem(sys.modules, "flash_mla.flash_mla_interface", package)
    calls = SparseAttentionBench(device, 0).build_calls(make_sparse_case("flashmla", heads=64, top_k=64))
    assert calls.check(calls.run) == ""


def test_missing_library_raises_an_error_with_its_package(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "flash_mla.flash_mla_interface", None)
    with pytest.raises(MissingPackageError, match=r"not installed.*sgl-deep-gemm"):
        IndexerBench(device, 0).build_calls(make_indexer_case("deepgemm"))
    with pytest.raises(MissingPackageError, match=r"not installed.*flashmla"):
        SparseAttentionBench(device, 0).build_calls(make_sparse_case("flashmla", heads=64, top_k=64))


@pytest.mark.parametrize("sizes", [{"heads": 16, "top_k": 64}, {"heads": 64, "top_k": 60}], ids=str)
def test_sizes_unsupported_by_the_kernel_are_rejected(sizes, device):
    with pytest.raises(UsageError, match="--heads 64,128 --top-k 2048"):
        SparseAttentionBench(device, 0).build_calls(make_sparse_case("flashmla", **sizes))


def test_gpu_cases_use_the_library_even_if_it_is_not_installed():
    """List the library, so that the table names what is missing instead of leaving the operator out."""
    names = ("lengths", "width", "page", "context", "requests", "heads", "variant", "top_k", "layers")
    for cpu, wanted in ((True, [{"reference"}, {"reference"}]), (False, [{"deepgemm"}, {"flashmla"}])):
        options = BenchOptions(cpu=cpu, typed=dict.fromkeys(names) | {"lengths": "even"})
        lists = (list_indexer_cases(options), list_sparse_attention_cases(options))
        assert [{case.variant for case in cases} for cases in lists] == wanted
