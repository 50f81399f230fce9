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
        batch=len(lengths), heads=heads, latent=latent, rope=rope, page_size=page_size,
        max_pages=max(used, default=1) + 2, scale=(latent + rope) ** -0.5, dtype=dtype, device=device,
    )  # fmt: skip
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
    with pytest.raises(MissingPackageError, match=r"pip install 'dcpbench\[flashinfer\]'"):
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
