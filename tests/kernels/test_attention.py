"""Attention backends against the reference in fp64: the traps are unused memory, empty shards and the LSE's base."""

import numpy as np
import pytest
import torch

from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels.attention import AttentionSpec, Shards, make_backend
from dcpbench.kernels.attention.reference import mla_decode

NAN = float("nan")


def problem(device, dtype, lengths, *, heads, latent, rope, page_size, seed=0):
    """Spec, q, a pool whose unused rows are NaN, and page tables whose unused entries point at nothing."""
    rng = np.random.default_rng(seed)
    used = [-(-n // page_size) for n in lengths]
    pages = sum(used) + 3
    order = rng.permutation(pages).astype(np.int32)
    tables, taken = [], 0
    kv = torch.full((pages, page_size, latent + rope), NAN, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for count, length in zip(used, lengths, strict=True):
        tables.append(order[taken : taken + count])
        taken += count
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


def run(backend, spec, q, kv):
    """o and lse, written into memory that held NaN."""
    o = torch.full((*q.shape[:2], spec.latent), NAN, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], NAN, dtype=torch.float32, device=q.device)
    backend.run(q, kv, o, lse)
    return o, lse


def truth(spec, q, kv, shards):
    """o and lse of every request in fp64."""
    o, lse = [], []
    for b, (pages, length) in enumerate(zip(shards.pages, shards.lengths, strict=True)):
        rows = kv[torch.from_numpy(pages.astype(np.int64)).to(kv.device)].flatten(0, 1)[:length].double()
        one_o, one_lse = mla_decode(q[b].double(), rows, spec.latent, spec.scale)
        o.append(one_o)
        lse.append(one_lse)
    return torch.stack(o), torch.stack(lse)


def assert_agrees(spec, q, kv, shards, found, limit):
    """Infinities in the same places, then errors; an empty request's o may be anything finite or not."""
    o, lse = (x.double() for x in found)
    true_o, true_lse = truth(spec, q, kv, shards)
    empty = torch.isneginf(true_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert torch.allclose(lse[~empty], true_lse[~empty], atol=limit, rtol=limit)
    wrong, size = (o[~empty] - true_o[~empty]).norm(), true_o[~empty].norm()
    assert wrong <= limit * size, f"relative error {wrong / size:.2e}"


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("heads", [1, 8, 20])
@pytest.mark.parametrize(
    "lengths", [(5,), (1, 37, 0, 130), (0, 0), (64, 63, 65)], ids=lambda n: "S" + "-".join(map(str, n))
)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_fp32_backends_agree_with_fp64(name, lengths, heads, page_size, device):
    """Uneven, empty and single-row requests over shuffled pages, with NaN in every row that nobody owns."""
    case = problem(device, torch.float32, lengths, heads=heads, latent=32, rope=16, page_size=page_size)
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [8, 24, 128])
def test_page_sizes_and_head_counts_that_are_served_agree_with_fp64(heads, page_size, device):
    """More heads than one program takes, heads that fill none, and pages larger than a tile."""
    case = problem(device, torch.float32, (65, 0, 200), heads=heads, latent=32, rope=16, page_size=page_size)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)


def test_a_long_request_beside_short_ones_is_cut_and_merged(device):
    """10,000 rows are most of the batch, so several programs share them and merge what they found."""
    case = problem(device, torch.float32, (3, 10_000, 0, 40), heads=2, latent=32, rope=16, page_size=16)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=2e-5)
    assert backend.pieces_of[1, 1] > 1


def test_the_backend_says_which_kernel_it_runs(device):
    """fp32 is not what the Hopper kernel is written for, wherever it runs."""
    spec = problem(device, torch.float32, (1,), heads=1, latent=512, rope=64, page_size=1)[0]
    assert make_backend("triton", spec).kernel == "plain"


def test_triton_in_half_precision_stays_within_rounding(device):
    """Operands of 16 bits and fp32 accumulation at the real width: 512 + 64 columns, 16 heads.

    fp16, as the interpreter has no bf16 products; bf16 is compared on a GPU below.
    """
    case = problem(device, torch.float16, (70, 3), heads=16, latent=512, rope=64, page_size=8)
    backend = make_backend("triton", case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)


def test_a_new_plan_is_seen_in_the_same_buffers(device):
    """A captured graph holds the buffers' addresses: planning again must write in place, never rebind."""
    spec, q, kv, shards = problem(device, torch.float32, (9, 30), heads=8, latent=32, rope=16, page_size=2)
    backend = make_backend("triton", spec)
    backend.plan(shards)
    before = (backend.tables.pages.data_ptr(), backend.tables.lengths.data_ptr())
    shorter = Shards(pages=shards.pages, lengths=[0, 7])
    backend.plan(shorter)
    assert before == (backend.tables.pages.data_ptr(), backend.tables.lengths.data_ptr())
    assert_agrees(spec, q, kv, shorter, run(backend, spec, q, kv), limit=2e-5)


def test_an_unknown_backend_is_an_error_that_lists_the_known_ones(device):
    """The message says what to type."""
    spec = problem(device, torch.float32, (1,), heads=1, latent=32, rope=16, page_size=1)[0]
    with pytest.raises(UsageError, match="reference, triton, flashinfer"):
        make_backend("fa4", spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FlashInfer may be installed beside a GPU")
def test_a_missing_flashinfer_says_how_to_install_it(device):
    """No traceback of an import error."""
    spec = problem(device, torch.float32, (1,), heads=1, latent=32, rope=16, page_size=1)[0]
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashinfer\]'"):
        make_backend("flashinfer", spec)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_bf16_backends_agree_with_fp64_at_full_width(name, heads, page_size):
    """LSE in natural log, requests without rows included, on the sizes that are served."""
    lengths = (1, 4099, 0, 777, 64, 0)
    case = problem(torch.device("cuda"), torch.bfloat16, lengths, heads=heads, latent=512, rope=64, page_size=page_size)
    backend = make_backend(name, case[0])
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)


CUDA = torch.device("cuda")
FULL = {"latent": 512, "rope": 64}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [8, 20, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_hopper_kernel_agrees_with_fp64_on_uneven_batches(dtype, heads, page_size):
    """Requests cut, whole and empty, more of them than multiprocessors, and lengths around the edges of tiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    lengths = (3000, 63, 64, 65, 0, 1, *(130,) * 150)
    case = problem(CUDA, dtype, lengths, heads=heads, page_size=page_size, **FULL)
    backend = make_backend("triton", case[0])
    assert backend.kernel == "hopper"
    backend.plan(case[3])
    assert_agrees(*case, run(backend, *case[:3]), limit=1e-2)


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths_that_change_in_place():
    """Nothing about the division of work is decided on the host: only the lengths on the device are written."""
    spec, q, kv, shards = problem(CUDA, torch.bfloat16, (4000, 64, 0, 700), heads=64, page_size=16, **FULL)
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
def test_rows_beyond_two_to_the_31_elements_are_found():
    """4,000,000 rows of 576 columns are 2.3e9 elements: their offsets do not fit 32 bits."""
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
