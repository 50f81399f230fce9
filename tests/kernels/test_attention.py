"""Compare attention backends with an fp64 reference; the cases cover unused memory, empty shards and the LSE's base."""

import dataclasses
import importlib
import math
import sys
import types

import numpy as np
import pytest
import torch

from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels.attention import (
    AttentionSpec,
    Shards,
    compute_rounding_error,
    hopper_pairs,
    make_backend,
    triton_mla,
)
from dcpbench.kernels.attention.reference import compute_mla_decode
from dcpbench.kernels.attention.triton_mla import PageTables, choose_kernel
from dcpbench.points import layout

NAN = float("nan")
CUDA = torch.device("cuda")
FULL = {"latent": 512, "rope": 64}


def make_case(device, dtype, lengths, *, heads, latent, rope, page_size, seed=0):
    """Return spec, q, a pool with NaN in unused rows, and page tables with unused entries."""
    rng = np.random.default_rng(seed)
    used = [-(-n // page_size) for n in lengths]
    pages = sum(used) + 3
    order = rng.permutation(pages).astype(np.int32)
    tables, used_pages = [], 0
    kv = torch.full((pages, page_size, latent + rope), NAN, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for count, length in zip(used, lengths, strict=True):
        tables.append(order[used_pages : used_pages + count])
        used_pages += count
        for i in range(length):
            row = kv[int(tables[-1][i // page_size]), i % page_size]
            row.normal_(generator=generator)
    q = torch.empty(len(lengths), heads, latent + rope, dtype=dtype, device=device).normal_(generator=generator)
    spec = AttentionSpec(
        batch=len(lengths),
        heads=heads,
        latent=latent,
        rope=rope,
        page_size=page_size,
        max_pages=max(used, default=1) + 2,
        scale=(latent + rope) ** -0.5,
        dtype=dtype,
        device=device,
    )
    return spec, q, kv, Shards(pages=tables, lengths=list(lengths))


def add_query_rows(case, tokens, query_length, rank=0, dcp=1):
    """Replace each request's query by several rows: row i of a request of n tokens sees this rank's share of the first
    n - query_length + 1 + i tokens.
    """
    spec, q, kv, shards = case
    seen = [n - back for n in tokens for back in range(query_length - 1, -1, -1)]
    lengths = [layout.compute_local_length(n, rank, dcp, 1) if n > 0 else 0 for n in seen]
    spec = dataclasses.replace(spec, batch=len(lengths), query_length=query_length)
    generator = torch.Generator(q.device).manual_seed(1)
    q = torch.empty(len(lengths), *q.shape[1:], dtype=q.dtype, device=q.device).normal_(generator=generator)
    return spec, q, kv, Shards(pages=shards.pages, lengths=lengths)


def store_in_fp8(spec, q, kv, shards, kv_scale=1.0):
    """Store the rows in e4m3; times `kv_scale` they are the values."""
    spec = dataclasses.replace(spec, kv_dtype=torch.float8_e4m3fn, kv_scale=kv_scale)
    return spec, q, kv.to(torch.float8_e4m3fn), shards


def run(backend, spec, q, kv):
    """Run the backend on outputs filled with NaN, and return o and lse."""
    o = torch.full((*q.shape[:2], spec.latent), NAN, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], NAN, dtype=torch.float32, device=q.device)
    backend.run(q, kv, o, lse)
    return o, lse


def compute_truth(spec, q, kv, shards):
    """Compute o and lse of every request in fp64."""
    o, lse = [], []
    for b, (pages, length) in enumerate(zip(shards.repeat_pages(), shards.lengths, strict=True)):
        rows = (
            kv[torch.from_numpy(pages.astype(np.int64)).to(kv.device)].flatten(0, 1)[:length].double() * spec.kv_scale
        )
        one_o, one_lse = compute_mla_decode(q[b].double(), rows, spec.latent, spec.scale)
        o.append(one_o)
        lse.append(one_lse)
    return torch.stack(o), torch.stack(lse)


def assert_agrees(spec, q, kv, shards, found, limit, lse_limit=None):
    """Check the positions of infinities, then errors; o of an empty request may have any value."""
    lse_limit = lse_limit or limit
    o, lse = (x.double() for x in found)
    true_o, true_lse = compute_truth(spec, q, kv, shards)
    empty = torch.isneginf(true_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert torch.allclose(lse[~empty], true_lse[~empty], atol=lse_limit, rtol=lse_limit)
    wrong, size = (o[~empty] - true_o[~empty]).norm(), true_o[~empty].norm()
    assert wrong <= limit * size, f"relative error {wrong / size:.2e}"


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("heads", [1, 8, 20])
@pytest.mark.parametrize(
    "lengths", [(5,), (1, 37, 0, 130), (0, 0), (64, 63, 65)], ids=lambda n: "S" + "-".join(map(str, n))
)
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.sample(5)
def test_fp32_backends_agree_with_fp64(name, lengths, heads, page_size, device):
    """Use uneven, empty and single-row requests over shuffled pages, with NaN in every unused row."""
    case = make_case(device, torch.float32, lengths, heads=heads, latent=32, rope=16, page_size=page_size)
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kv_scale", [1.0, 0.25])
@pytest.mark.parametrize("lengths", [(1, 37, 0, 130), (64, 63, 65)], ids=lambda n: "S" + "-".join(map(str, n)))
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_backends_over_fp8_rows_agree_with_fp64(name, lengths, kv_scale, page_size, device):
    """Compare with fp64 over the same rows, so that only sums are rounded; unused rows hold e4m3's NaN."""
    case = make_case(device, torch.float32, lengths, heads=8, latent=32, rope=16, page_size=page_size)
    case = store_in_fp8(*case, kv_scale)
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


@pytest.mark.parametrize(("rank", "dcp"), [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4)])
@pytest.mark.parametrize("heads", [1, 8, 20])
@pytest.mark.parametrize("query_length", [2, 4, 8])
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.sample(8)
def test_query_rows_of_a_request_see_the_tokens_up_to_their_own(name, query_length, heads, rank, dcp, device):
    """Use requests of 8 tokens, in which early rows see none or one; of a tile and 1 to 4 tokens, where early rows do
    not see the last tile; and split ones. Unused rows and rows behind the last token hold NaN.
    """
    tokens = (8, 32 * dcp + 1, 32 * dcp + 4, 330, 70)
    local = [layout.compute_local_length(n, rank, dcp, 1) for n in tokens]
    case = make_case(device, torch.float32, local, heads=heads, latent=32, rope=16, page_size=4)
    case = add_query_rows(case, tokens, query_length, rank, dcp)
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


@pytest.mark.parametrize("kv_scale", [1.0, 0.25])
def test_query_rows_of_a_request_over_fp8_agree_with_fp64(kv_scale, device):
    case = make_case(device, torch.float32, (33, 130, 5), heads=8, latent=32, rope=16, page_size=4)
    case = store_in_fp8(*add_query_rows(case, (33, 130, 5), 4), kv_scale)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


def test_rows_after_a_querys_token_do_not_change_its_output(device):
    """Change rows 6 and 7: row 0 of 3 query rows sees 6 of 8 rows, so that only rows 1 and 2 change."""
    case = make_case(device, torch.float32, (8,), heads=2, latent=32, rope=16, page_size=8)
    spec, q, kv, shards = add_query_rows(case, (8,), 3)
    backend = make_backend("triton", spec)
    backend.plan(shards)
    before, _ = run(backend, spec, q, kv)
    kv[int(shards.pages[0][0]), 6:] += 1
    after, _ = run(backend, spec, q, kv)
    assert [torch.equal(before[i], after[i]) for i in range(3)] == [True, False, False]


@pytest.mark.parametrize("name", ["flashinfer", "flashmla"])
def test_backend_without_support_for_several_query_rows_is_rejected(name, device):
    """Reject the backend before its library is loaded."""
    case = make_case(device, torch.float32, (8,), heads=2, latent=32, rope=16, page_size=8)
    with pytest.raises(UsageError, match=f"--backend {name} does not take the 3 query rows.*use --backend triton"):
        make_backend(name, add_query_rows(case, (8,), 3)[0])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [8, 24, 128])
@pytest.mark.sample(4)
def test_served_page_sizes_and_head_counts_agree_with_fp64(heads, page_size, device):
    """Use more heads than one program takes, heads that do not fill one, and pages larger than a tile."""
    case = make_case(device, torch.float32, (65, 0, 200), heads=heads, latent=32, rope=16, page_size=page_size)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


@pytest.mark.long
def test_long_request_among_short_ones_is_split_and_merged(device):
    """Use 10,000 rows, most of the batch, so that several programs share them and merge their results."""
    case = make_case(device, torch.float32, (3, 10_000, 0, 40), heads=2, latent=32, rope=16, page_size=16)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)
    assert backend.partial.of_request[1, 1] > 1


def test_backend_names_the_kernel_it_selects(device):
    """Expect the plain kernel for fp32, which the Hopper kernels do not support."""
    spec = make_case(device, torch.float32, (1,), heads=1, latent=512, rope=64, page_size=1)[0]
    plain = make_backend("triton", spec)
    assert (plain.kernel, plain.rounds) == ("plain", ())
    halved = dataclasses.replace(spec, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    found = make_backend("triton", halved)
    assert (found.kernel, found.rounds) == (("hopper-fp8", ("queries",)) if hopper else ("plain", ()))


def test_triton_in_half_precision_stays_within_rounding(device):
    """Use 16-bit operands and fp32 accumulation at the full width: 512 + 64 columns, 16 heads. The type is fp16,
    because the interpreter has no bf16 products; bf16 is compared on a GPU below.
    """
    case = make_case(device, torch.float16, (70, 3), heads=16, latent=512, rope=64, page_size=8)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)


def test_new_plan_is_written_into_the_same_buffers(device):
    """Check addresses, because a captured graph holds them."""
    spec, q, kv, shards = make_case(device, torch.float32, (9, 30), heads=8, latent=32, rope=16, page_size=2)
    backend = make_backend("triton", spec)
    backend.plan(shards)
    before = (backend.tables.pages.data_ptr(), backend.tables.lengths.data_ptr())
    shorter = Shards(pages=shards.pages, lengths=[0, 7])
    backend.plan(shorter)
    assert before == (backend.tables.pages.data_ptr(), backend.tables.lengths.data_ptr())
    assert_agrees(spec, q, kv, shorter, run(backend, spec, q, kv), limit=2e-5)


def test_unknown_backend_raises_an_error_with_the_known_ones(device):
    spec = make_case(device, torch.float32, (1,), heads=1, latent=32, rope=16, page_size=1)[0]
    with pytest.raises(UsageError, match="reference, triton, flashinfer, flashmla"):
        make_backend("fa4", spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FlashInfer may be installed on a machine with a GPU")
def test_missing_flashinfer_raises_an_error_with_the_install_command(device):
    spec = make_case(device, torch.float32, (1,), heads=1, latent=32, rope=16, page_size=1)[0]
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashinfer\]'"):
        make_backend("flashinfer", spec)


def test_missing_flashmla_raises_an_error_with_the_install_command(device, monkeypatch):
    """Name the extra and an alternative backend."""
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.delitem(sys.modules, "dcpbench.kernels.attention.flashmla_dense", raising=False)
    spec = make_case(device, torch.float32, (1,), heads=1, latent=32, rope=16, page_size=1)[0]
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashmla\]'.*--backend triton"):
        make_backend("flashmla", spec)


@pytest.fixture
def flashmla(monkeypatch):
    """Install a fake `flash_mla` with the reference as its kernel, which returns +inf for empty requests as FlashMLA
    does.
    """
    library = types.ModuleType("flash_mla")
    interface = types.ModuleType("flash_mla.flash_mla_interface")
    library.planned = []

    def get_mla_decoding_metadata(lengths, heads, groups, is_fp8_kvcache, use_legacy):
        assert (groups, is_fp8_kvcache, use_legacy) == (1, False, True)
        assert heads > 0
        library.planned.append(lengths.tolist())
        return lengths.repeat(8, 1).T.contiguous(), torch.cumsum(lengths, 0)

    def flash_mla_with_kvcache(q, kv, pages, lengths, latent, metadata, *, softmax_scale, use_legacy):
        assert use_legacy
        assert metadata.tile_scheduler_metadata[:, 0].tolist() == lengths.tolist(), "planned for other lengths"
        spec = AttentionSpec(
            batch=len(q),
            heads=q.shape[2],
            latent=latent,
            rope=q.shape[3] - latent,
            page_size=kv.shape[1],
            max_pages=pages.shape[1],
            scale=softmax_scale,
            dtype=q.dtype,
            device=q.device,
        )
        reference = make_backend("reference", spec)
        reference.plan(Shards(pages=list(pages.numpy()), lengths=lengths.tolist()))
        o, lse = q.new_empty(len(q), q.shape[2], latent), torch.empty(len(q), q.shape[2])
        reference.run(q[:, 0], kv[:, :, 0], o, lse)
        return o.unsqueeze(1), lse.masked_fill(torch.isneginf(lse), float("inf")).unsqueeze(2)

    library.get_mla_decoding_metadata = get_mla_decoding_metadata
    interface.flash_mla_with_kvcache = flash_mla_with_kvcache
    interface.FlashMLASchedMeta = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    monkeypatch.setitem(sys.modules, "flash_mla.flash_mla_interface", interface)
    monkeypatch.delitem(sys.modules, "dcpbench.kernels.attention.flashmla_dense", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    yield library
    sys.modules.pop("dcpbench.kernels.attention.flashmla_dense", None)


def on_hopper(spec):
    """Return the spec on a CUDA device, as a backend for Hopper requires."""
    return dataclasses.replace(spec, device=torch.device("cuda"))


@pytest.mark.usefixtures("flashmla")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the library itself is tested there")
class TestFlashMla:
    """Test the code around FlashMLA's kernel: its plan in fixed buffers, the output buffers, and -inf."""

    def backend(self, case, monkeypatch):
        """Built as on a GPU, with tensors of the CPU."""
        module = importlib.import_module("dcpbench.kernels.attention.flashmla_dense")
        monkeypatch.setattr(module, "PageTables", lambda _: PageTables(case[0]))
        return make_backend("flashmla", on_hopper(case[0]))

    def test_results_equal_the_kernels_and_empty_requests_have_negative_infinite_lse(self, device, monkeypatch):
        case = make_case(device, torch.float16, (70, 0, 3), heads=5, latent=512, rope=64, page_size=64)
        backend = self.backend(case, monkeypatch)
        backend.plan(case[3])
        assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)

    def test_planning_on_device_updates_the_plan_in_place(self, flashmla, device, monkeypatch):
        """Check addresses, because a captured graph holds them."""
        spec, q, kv, shards = make_case(device, torch.float16, (70, 9), heads=4, latent=512, rope=64, page_size=64)
        backend = self.backend((spec,), monkeypatch)
        backend.plan(shards)
        plan = backend.metadata.tile_scheduler_metadata.data_ptr(), backend.metadata.num_splits.data_ptr()
        backend.tables.lengths.copy_(torch.tensor([12, 0], dtype=torch.int32))
        backend.plan_on_device()
        assert flashmla.planned[-1] == [12, 0]
        assert plan == (backend.metadata.tile_scheduler_metadata.data_ptr(), backend.metadata.num_splits.data_ptr())
        shorter = Shards(pages=shards.pages, lengths=[12, 0])
        assert_agrees(spec, q, kv, shorter, run(backend, spec, q, kv), limit=1e-2)

    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({"page_size": 1}, "reads pages of 64 rows, not 1; use --page-size 64"),
            ({"latent": 256}, "takes latent 512, rope 64 in bf16 or fp16, not 256, 64"),
            ({"dtype": torch.float32}, "not 512, 64 in float32; use --backend triton"),
            ({"device": torch.device("cpu")}, "needs a Hopper GPU"),
        ],
    )
    def test_unsupported_spec_raises_an_error_with_the_fix(self, changed, expected, device):
        spec = make_case(device, torch.float16, (70,), heads=4, latent=512, rope=64, page_size=64)[0]
        with pytest.raises(UsageError, match=expected):
            make_backend("flashmla", dataclasses.replace(on_hopper(spec), **changed))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_flashmla_agrees_with_fp64_at_full_width(heads):
    """Use NaN in every unused row, requests without rows, and lengths that change under a captured graph."""
    pytest.importorskip("flash_mla")
    lengths = (1, 4099, 0, 777, 64, 0)
    spec, q, kv, shards = make_case(CUDA, torch.bfloat16, lengths, heads=heads, page_size=64, **FULL)
    backend = make_backend("flashmla", spec)
    backend.plan(shards)
    o, lse = run(backend, spec, q, kv)
    assert_agrees(spec, q, kv, shards, (o, lse), limit=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, kv, o, lse)
    for changed in ([1, 17, 0, 0, 3, 0], [1, 4000, 0, 700, 64, 0], [0] * 6):
        backend.tables.lengths.copy_(torch.tensor(changed, dtype=torch.int32))
        backend.plan_on_device()
        o.fill_(NAN)
        graph.replay()
        assert_agrees(spec, q, kv, Shards(pages=shards.pages, lengths=changed), (o, lse), limit=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_scale", [1.0, 0.25])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    ("name", "page_size"),
    [("triton", 1), ("triton", 16), ("triton", 32), ("triton", 64), ("triton", 128), ("flashmla", 64)],
)
def test_backends_over_fp8_rows_agree_with_fp64_at_full_width(name, page_size, heads, kv_scale):
    """Use split, whole and empty requests, more than multiprocessors. Scores have a deviation of 1; the log-sum-exp of
    a request with one row is its score, which a rounded query changes by five deviations at most.
    """
    if name == "flashmla":
        pytest.importorskip("flash_mla")
    lengths = (1, 4099, 0, 777, 64, 65, 0, *(130,) * 150)
    case = make_case(CUDA, torch.bfloat16, lengths, heads=heads, page_size=page_size, **FULL)
    case = store_in_fp8(*case, kv_scale)
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    limit = max(1e-2, compute_rounding_error(backend.rounds, 1.0))
    assert_agrees(*case, run(backend, *case[:3]), limit, lse_limit=5 * limit if backend.rounds else limit)


@pytest.mark.gpu
def test_captured_graph_over_fp8_rows_uses_lengths_changed_in_place():
    """Include a query of zeros, because its largest absolute value cannot be a divisor."""
    case = make_case(CUDA, torch.bfloat16, (4000, 64, 0, 700), heads=64, page_size=16, **FULL)
    spec, q, kv, shards = store_in_fp8(*case, 0.25)
    q[3, 5] = 0.0
    backend = make_backend("triton", spec)
    if torch.cuda.get_device_capability() == (9, 0):
        assert backend.kernel == "hopper-apart-fp8"
    backend.plan(shards)
    o, lse = run(backend, spec, q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, kv, o, lse)
    limit = max(1e-2, compute_rounding_error(backend.rounds, 1.0))
    for lengths in ([4000, 64, 0, 700], [17, 0, 0, 700], [3999, 63, 0, 0], [0, 0, 0, 0]):
        backend.tables.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        o.fill_(NAN)
        graph.replay()
        changed = Shards(pages=shards.pages, lengths=lengths)
        assert_agrees(spec, q, kv, changed, (o, lse), limit, lse_limit=5 * limit)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_bf16_backends_agree_with_fp64_at_full_width(name, heads, page_size):
    """Compare o and the natural-log LSE at the sizes that are served, with requests without rows."""
    lengths = (1, 4099, 0, 777, 64, 0)
    case = make_case(
        torch.device("cuda"), torch.bfloat16, lengths, heads=heads, latent=512, rope=64, page_size=page_size
    )
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [3, 8, 16, 20, 32, 40, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_hopper_kernel_agrees_with_fp64_on_uneven_batches(dtype, heads, page_size):
    """Use split, whole and empty requests, more than multiprocessors, and lengths around the edges of tiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    lengths = (3000, 63, 64, 65, 0, 1, *(130,) * 150)
    case = make_case(CUDA, dtype, lengths, heads=heads, page_size=page_size, **FULL)
    backend = make_backend("triton", case[0])
    assert backend.kernel == ("hopper" if page_size == 1 else "hopper-few" if heads <= 16 else "hopper-pairs")
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("query_length", [2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2, 4, 16, 20, 128])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_hopper_kernels_with_several_query_rows_agree_with_fp64(kv, heads, query_length, page_size):
    """Use split and whole requests, more than multiprocessors, and tokens around the edges of tiles, where early rows
    do not see the last tile or see no row.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    tokens = (3000, 63, 64, 65, 66, 71, 8, 128, 129, *(131,) * 150)
    case = make_case(CUDA, torch.bfloat16, tokens, heads=heads, page_size=page_size, **FULL)
    for rank, dcp in ((0, 1), (1, 2)):
        local = [layout.compute_local_length(n, rank, dcp, 1) for n in tokens]
        rows = add_query_rows(case, tokens, query_length, rank, dcp)
        rows = store_in_fp8(*rows, 0.25) if kv == "fp8" else rows
        backend = make_backend("triton", rows[0])
        few = query_length * heads <= 16
        assert backend.kernel == ("hopper-apart-fp8" if kv == "fp8" else "hopper-few" if few else "hopper-pairs")
        backend.plan(rows[3])
        assert backend.tables.lengths.tolist() == local
        limit = max(1e-2, compute_rounding_error(backend.rounds, 1.0))
        assert_agrees(*rows, run(backend, *rows[:3]), limit, lse_limit=5 * limit if backend.rounds else limit)


@pytest.mark.gpu
def test_hopper_kernel_for_single_rows_is_rejected_for_several():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = make_case(CUDA, torch.bfloat16, (70,), heads=16, page_size=1, **FULL)
    with pytest.raises(UsageError, match="Use --page-size 64"):
        make_backend("triton", add_query_rows(case, (70,), 4)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_captured_graph_uses_lengths_changed_in_place(heads):
    """Write only the lengths on the device: the work must not be divided on the host."""
    spec, q, kv, shards = make_case(CUDA, torch.bfloat16, (4000, 64, 0, 700), heads=heads, page_size=16, **FULL)
    backend = make_backend("triton", spec)
    backend.plan(shards)
    o, lse = run(backend, spec, q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, kv, o, lse)
    for lengths in ([4000, 64, 0, 700], [17, 0, 0, 700], [3999, 63, 0, 0], [0, 0, 0, 0]):
        backend.tables.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        o.fill_(NAN)
        graph.replay()
        assert_agrees(spec, q, kv, Shards(pages=shards.pages, lengths=lengths), (o, lse), limit=1e-2)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements_are_read():
    """Use 4,000,000 rows of 576 columns, which are 2.3e9 elements: their offsets do not fit 32 bits."""
    rows, length = 4_000_000, 300
    kv = torch.empty(rows, 1, 576, dtype=torch.bfloat16, device=CUDA)
    pages = np.arange(rows - 1, rows - 1 - length, -1, dtype=np.int32)
    kv[rows - length :].normal_()
    q = torch.randn(1, 64, 576, dtype=torch.bfloat16, device=CUDA)
    spec = AttentionSpec(
        batch=1, heads=64, page_size=1, max_pages=length, scale=576**-0.5, dtype=torch.bfloat16, device=CUDA, **FULL
    )
    shards = Shards(pages=[pages], lengths=[length])
    backend = make_backend("triton", spec)
    backend.plan(shards)
    assert_agrees(spec, q, kv, shards, run(backend, spec, q, kv), limit=1e-2)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("unused", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.sample(3)
def test_every_fp8_value_is_read_exactly_and_unused_nan_rows_are_ignored(name, unused, page_size, device):
    """Use all values, which are exact in fp32 (subnormals too); unused rows are NaN of either sign; the scale is 0.25."""
    spec, q, kv, shards = make_case(
        device, torch.float32, (1, 37, 0, 130, 300), heads=8, latent=32, rope=16, page_size=page_size
    )
    stored = torch.where(kv.isnan(), torch.zeros_like(kv), kv).to(torch.float8_e4m3fn).view(torch.uint8)
    stored[kv.isnan()] = unused
    stored = stored.view(torch.float8_e4m3fn)
    spec = dataclasses.replace(spec, kv_dtype=torch.float8_e4m3fn, kv_scale=0.25)
    backend = make_backend(name, spec)
    backend.plan(shards)
    assert_agrees(spec, q, stored, shards, run(backend, spec, q, stored), limit=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("heads", [16, 128])
def test_repeated_runs_are_bitwise_equal(heads, fp8):
    """Use odd numbers of tiles, splits inside tiles, and more requests than programs, as warps hand tiles to each
    other.
    """
    for length in (1, 65, 129, 191, 320, 447):
        case = make_case(CUDA, torch.bfloat16, (length,) * 140, heads=heads, page_size=64, seed=length, **FULL)
        case = store_in_fp8(*case) if fp8 else case
        backend = make_backend("triton", case[0])
        backend.plan(case[3])
        first = run(backend, *case[:3])
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, run(backend, *case[:3]), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_values_with_a_mean_are_summed_without_losing_bits(heads):
    """Sum 16,384 equal values: sums of e4m3 in tensor cores alone keep 13 bits, and would be off by tenths."""
    case = make_case(CUDA, torch.bfloat16, (16_384, 0), heads=heads, page_size=64, **FULL)
    case[2][..., :512] += 1
    case = store_in_fp8(*case, 0.25)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2, lse_limit=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_scores_may_vary_by_more_than_the_range_of_weights(heads):
    """Raise scores by 64 * 2 / 24 every 100 rows and by 130 at the end, negated for odd heads: e4m3 holds 2^-9 to 448.
    Queries of 1 and -1 are exact in e4m3, so that only weights are rounded.
    """
    spec, q, kv, shards = make_case(CUDA, torch.bfloat16, (1000, 1, 0, 700, 64), heads=heads, page_size=64, **FULL)
    q.copy_(torch.where(q < 0, -1.0, 1.0))
    q[:, 0::2, 512:], q[:, 1::2, 512:] = 1.0, -1.0
    for pages, length in zip(shards.pages, shards.lengths, strict=True):
        row = torch.arange(length, device=CUDA)
        page = torch.from_numpy(pages.astype(np.int64)).to(CUDA)[row // 64]
        kv[page, row % 64, 512:] = torch.where(row < length - 50, row // 100 * 2, 64).to(kv.dtype)[:, None]
    case = store_in_fp8(spec, q, kv, shards)
    backend = make_backend("triton", case[0])
    backend.plan(shards)
    assert_agrees(*case, run(backend, *case[:3]), limit=max(1e-2, compute_rounding_error(backend.rounds, 1.0)))


@pytest.mark.gpu
def test_fp8_rows_keep_their_weight_next_to_a_dominant_row():
    """Score row 0 by 11 above 16,383 others with a deviation of a quarter: each has 2^-16 of its weight, together a
    fifth of the sum. Blocks of 64 heads are as many as multiprocessors, so that no piece ends before the request.
    """
    heads = 64 * torch.cuda.get_device_properties(CUDA).multi_processor_count
    spec, q, kv, shards = make_case(CUDA, torch.bfloat16, (16_384,), heads=heads, page_size=64, **FULL)
    q.mul_(0.25 / (spec.scale * 512**0.5))
    q[..., 512:] = 0
    q[..., 512] = 1
    kv[..., :512] += 1
    kv[..., 512] = 0
    kv[int(shards.pages[0][0]), 0, 512] = 11 / spec.scale
    case = store_in_fp8(spec, q, kv, shards)
    backend = make_backend("triton", case[0])
    backend.plan(shards)
    assert_agrees(*case, run(backend, *case[:3]), limit=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [15, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_may_jump_between_tiles(dtype, tiles):
    """Change scores by tens to thousands (base 2) up and down, in either tile of a pair and in both, differently for
    heads and warps. Blocks of 64 heads are as many as multiprocessors, so that no piece ends before the request.
    """
    levels = (0, 100, 300, 250, 20, 900, 1000, 1200, 1150, 1140, 1230, 1250, 1262, 0, 1500, 1210)[:tiles]
    heads = 64 * torch.cuda.get_device_properties(CUDA).multi_processor_count
    spec, q, kv, shards = make_case(CUDA, dtype, (64 * len(levels) - 7,), heads=heads, page_size=64, **FULL)
    warp_factors, head_factors = torch.tensor([1, 0.4, 0.1, 0.01]), torch.tensor([1, 0.01, -1, -0.1])
    block = torch.outer(warp_factors, head_factors).repeat(1, 4).flatten()  # a warp has 16 heads of 64
    q[..., 512:] = block.repeat(heads // 64).to(CUDA)[:, None]
    for page, level in zip(shards.pages[0], levels, strict=True):
        kv[int(page), :, 512:] += level / (64 * spec.scale * math.log2(math.e))  # NaN past the end stays
    backend = make_backend("triton", spec)
    backend.plan(shards)
    assert_agrees(spec, q, kv, shards, run(backend, spec, q, kv), limit=1e-2)


@pytest.mark.parametrize(
    ("page_size", "installed", "heads", "kernel", "fp8"),
    [
        (1, True, 4, "hopper", "hopper-fp8"),
        (16, True, 4, "hopper-few", "hopper-apart-fp8"),
        (16, True, 17, "hopper-pairs", "hopper-apart-fp8"),
        (48, True, 4, "hopper", "hopper-fp8"),
        (128, True, 16, "hopper-few", "hopper-apart-fp8"),
        (64, False, 4, "hopper", "hopper-fp8"),
    ],
)
def test_kernel_choice_follows_page_size_heads_and_compiler(
    page_size, installed, heads, kernel, fp8, device, monkeypatch
):
    """Use tiles of 64 rows, so that the border of a page of 48 lies within a tile. Without a compiler Triton's kernel
    runs.
    """
    monkeypatch.setattr(hopper_pairs, "is_installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_mla.triton, "__version__", "3.6.0")
    spec = make_case(device, torch.bfloat16, (70,), heads=heads, page_size=page_size, **FULL)[0]
    assert choose_kernel(on_hopper(spec)) == kernel
    assert choose_kernel(dataclasses.replace(on_hopper(spec), kv_dtype=torch.float8_e4m3fn)) == fp8
