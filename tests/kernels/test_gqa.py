"""Compare grouped-query decode attention with an fp64 reference: unused memory, empty shards, groups that fill no
tile.
"""

import dataclasses

import numpy as np
import pytest
import torch

from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels.attention import Shards
from dcpbench.kernels.gqa import GqaSpec, make_gqa_backend, split_rows
from dcpbench.kernels.gqa.reference import compute_gqa_decode
from dcpbench.kernels.merge import merge_partials
from dcpbench.points import layout

NAN = float("nan")


def make_case(device, dtype, lengths, *, heads, kv_heads, head_dim, page_size, seed=0):
    """Return spec, q, a pool with NaN in unused rows, and page tables with unused entries."""
    rng = np.random.default_rng(seed)
    used = [-(-n // page_size) for n in lengths]
    order = rng.permutation(sum(used) + 3).astype(np.int32)
    tables = np.split(order[: sum(used)], np.cumsum(used)[:-1])
    width = 2 * kv_heads * head_dim
    kv = torch.full((len(order), page_size, width), NAN, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for pages, length in zip(tables, lengths, strict=True):
        for i in range(length):
            kv[int(pages[i // page_size]), i % page_size].normal_(generator=generator)
    q = torch.empty(len(lengths), heads, head_dim, dtype=dtype, device=device).normal_(generator=generator)
    spec = GqaSpec(
        batch=len(lengths),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_pages=max(used, default=1) + 2,
        scale=head_dim**-0.5,
        dtype=dtype,
        device=device,
    )
    return spec, q, kv, Shards(pages=tables, lengths=list(lengths))


def run(name, spec, q, kv, shards):
    """Run the backend on outputs filled with NaN, and return o and lse."""
    backend = make_gqa_backend(name, spec)
    backend.plan(shards)
    o = torch.full_like(q, NAN)
    lse = torch.full(q.shape[:2], NAN, dtype=torch.float32, device=q.device)
    backend.run(q, kv, o, lse)
    return o, lse


def assert_agrees(spec, q, kv, shards, found, limit):
    """Check the positions of infinities, then errors; o of an empty request may be any finite number."""
    assert torch.isfinite(found[0]).all()
    for b, (pages, length) in enumerate(zip(shards.repeat_pages(), shards.lengths, strict=True)):
        o, lse = (part[b].double() for part in found)
        rows = kv[torch.from_numpy(pages.astype(np.int64)).to(kv.device)].flatten(0, 1)[:length].double()
        true_o, true_lse = compute_gqa_decode(q[b].double(), rows * spec.kv_scale, spec.kv_heads, spec.scale)
        if not length:
            assert torch.isneginf(lse).all()
            continue
        assert torch.allclose(lse, true_lse, atol=limit, rtol=limit)
        assert (o - true_o).norm() <= limit * true_o.norm()


def test_reference_is_softmax_attention_with_repeated_kv_heads():
    """Use two rows, one KV head of width 1, two query heads: scores 1·k and 2·k. k = (0, ln 3), v = (1, 5): q = 1
    weighs 1 : 3, o = 16/4 = 4, lse = ln 4; q = 2 weighs 1 : 9, o = 46/10, lse = ln 10.
    """
    rows = torch.tensor([[0.0, 1.0], [np.log(3), 5.0]], dtype=torch.float64)
    o, lse = compute_gqa_decode(torch.tensor([[1.0], [2.0]], dtype=torch.float64), rows, 1, 1.0)
    assert o.flatten().tolist() == pytest.approx([4.0, 4.6])
    assert lse.tolist() == pytest.approx([np.log(4), np.log(10)])


def test_query_head_attends_to_the_kv_head_of_its_group():
    """Use one row, so that o is V: heads 0 and 1 of four see the first of two KV heads, 2 and 3 the second."""
    rows = torch.arange(8.0).view(1, 8)  # K heads (0, 1), (2, 3), then V heads (4, 5), (6, 7)
    o, _ = compute_gqa_decode(torch.ones(4, 2), rows, 2, 1.0)
    assert o.tolist() == [[4, 5], [4, 5], [6, 7], [6, 7]]
    keys, values = split_rows(rows, 2)
    assert keys.tolist() == [[[0, 1], [2, 3]]]
    assert values.tolist() == [[[4, 5], [6, 7]]]


@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (8, 8), (12, 4), (16, 1), (20, 1), (70, 1)], ids=lambda n: f"{n}"
)
@pytest.mark.parametrize(
    "lengths", [(5,), (1, 37, 0, 130), (0, 0), (64, 63, 65)], ids=lambda n: "S" + "-".join(map(str, n))
)
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.sample(10)
def test_fp32_backends_agree_with_fp64(name, lengths, heads, kv_heads, page_size, device):
    """Use uneven, empty and single-row requests over shuffled pages, with NaN in every unused row. With pages of 32
    rows a tile lies in one page. Groups of 1, 3, 16, 20 and 70 heads: less than a product's side, one that is no power
    of two, and one that needs two programs.
    """
    case = make_case(device, torch.float32, lengths, heads=heads, kv_heads=kv_heads, head_dim=16, page_size=page_size)
    assert_agrees(*case, run(name, *case), limit=2e-5)


@pytest.mark.parametrize(("rank", "dcp"), [(0, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (12, 4), (20, 1)], ids=lambda n: f"{n}")
@pytest.mark.parametrize("query_length", [2, 4, 8])
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.sample(8)
def test_query_rows_of_a_request_see_the_tokens_up_to_their_own(name, query_length, heads, kv_heads, rank, dcp, device):
    """Use requests of 8 tokens, in which early rows see none or one; of a tile and some tokens; and split ones."""
    tokens = (8, 32 * dcp + 1, 64 * dcp + 4, 330)
    local = [layout.compute_local_length(n, rank, dcp, 1) for n in tokens]
    spec, _, kv, shards = make_case(
        device, torch.float32, local, heads=heads, kv_heads=kv_heads, head_dim=16, page_size=32
    )
    seen = [max(n - back, 0) for n in tokens for back in range(query_length - 1, -1, -1)]
    rows = Shards(pages=shards.pages, lengths=[layout.compute_local_length(n, rank, dcp, 1) for n in seen])
    spec = dataclasses.replace(spec, batch=len(seen), query_length=query_length)
    q = torch.randn(len(seen), heads, 16, generator=torch.Generator(device).manual_seed(1), device=device)
    assert_agrees(spec, q, kv, rows, run(name, spec, q, kv, rows), limit=2e-5)


def test_flashinfer_is_rejected_for_several_query_rows(device):
    spec = make_case(device, torch.float32, (8, 8), heads=2, kv_heads=1, head_dim=64, page_size=8)[0]
    with pytest.raises(UsageError, match=r"--backend flashinfer does not take the 2 query rows.*use --backend triton"):
        make_gqa_backend("flashinfer", dataclasses.replace(spec, query_length=2))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_published_head_sizes_agree_in_half_precision(head_dim, kv_heads, device):
    """Use fp16, because the interpreter has no bf16 products: 16-bit operands, fp32 accumulation."""
    case = make_case(device, torch.float16, (70, 0, 3), heads=16, kv_heads=kv_heads, head_dim=head_dim, page_size=16)
    assert_agrees(*case, run("triton", *case), limit=1e-2)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("kv_scale", [1.0, 0.25])
def test_fp8_rows_are_scaled(name, kv_scale, device):
    """Store K and V in e4m3, and multiply with the pool's scale."""
    spec, q, kv, shards = make_case(device, torch.float32, (1, 37, 0), heads=8, kv_heads=2, head_dim=16, page_size=4)
    spec = dataclasses.replace(spec, kv_dtype=torch.float8_e4m3fn, kv_scale=kv_scale)
    case = spec, q, kv.to(torch.float8_e4m3fn), shards
    assert_agrees(spec, q, case[2].float(), shards, run(name, *case), limit=2e-5)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("dcp", [2, 3])
def test_shards_of_dcp_ranks_merge_to_the_attention_over_all_rows(dcp, interleave, device):
    """Attend to each rank's rows of a request, and merge by lse; the third rank has no rows of short requests."""
    lengths, heads, kv_heads, width = (1, 9, 50), 8, 1, 16
    generator = torch.Generator(device).manual_seed(0)
    rows = [torch.randn(n, 2 * kv_heads * width, generator=generator, device=device) for n in lengths]
    q = torch.randn(len(lengths), heads, width, generator=generator, device=device)
    parts = []
    for rank in range(dcp):
        mine = [part[layout.list_local_tokens(len(part), rank, dcp, interleave)] for part in rows]
        spec = GqaSpec(
            batch=len(lengths), heads=heads, kv_heads=kv_heads, head_dim=width, page_size=1,
            max_pages=max(lengths), scale=0.3, dtype=q.dtype, device=device,
        )  # fmt: skip
        starts = np.cumsum([0, *map(len, mine)])
        pages = [np.arange(start, start + len(part), dtype=np.int32) for start, part in zip(starts, mine, strict=False)]
        shards = Shards(pages=pages, lengths=[len(part) for part in mine])
        parts.append(run("triton", spec, q, torch.cat(mine).unsqueeze(1), shards))
    merged = merge_partials(*(torch.stack(part) for part in zip(*parts, strict=True)))
    for b, part in enumerate(rows):
        truth, _ = compute_gqa_decode(q[b].double(), part.double(), kv_heads, 0.3)
        assert torch.allclose(merged[b].double(), truth, atol=1e-5)


def test_new_plan_is_written_into_the_same_buffers(device):
    """Check addresses, because a captured graph holds them."""
    spec, q, kv, shards = make_case(device, torch.float32, (9, 30), heads=4, kv_heads=2, head_dim=16, page_size=2)
    backend = make_gqa_backend("triton", spec)
    backend.plan(shards)
    before = (backend.tables.pages.data_ptr(), backend.tables.lengths.data_ptr())
    shorter = Shards(pages=shards.pages, lengths=[0, 7])
    backend.plan(shorter)
    assert before == (backend.tables.pages.data_ptr(), backend.tables.lengths.data_ptr())
    o, lse = torch.full_like(q, NAN), torch.full(q.shape[:2], NAN, device=device)
    backend.run(q, kv, o, lse)
    assert_agrees(spec, q, kv, shorter, (o, lse), limit=2e-5)


def test_unknown_backend_raises_an_error_with_the_known_ones(device):
    """Use FlashMLA, which reads only rows of MLA."""
    spec = make_case(device, torch.float32, (1,), heads=1, kv_heads=1, head_dim=16, page_size=1)[0]
    with pytest.raises(UsageError, match="reference, triton, flashinfer"):
        make_gqa_backend("flashmla", spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FlashInfer may be installed on a machine with a GPU")
def test_missing_flashinfer_raises_an_error_with_the_install_command(device):
    spec = make_case(device, torch.float32, (1,), heads=1, kv_heads=1, head_dim=16, page_size=1)[0]
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashinfer\]'"):
        make_gqa_backend("flashinfer", spec)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (64, 8), (64, 4), (16, 1), (64, 1)])
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_bf16_backends_agree_with_fp64_on_a_gpu(name, heads, kv_heads, head_dim, page_size):
    """Use published sizes, an empty request and split requests."""
    if name == "flashinfer":
        pytest.importorskip("flashinfer")
    case = make_case(
        torch.device("cuda"), torch.bfloat16, (3000, 0, 65, 1),
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
    )  # fmt: skip
    assert_agrees(*case, run(name, *case), limit=1e-2)


@pytest.mark.gpu
def test_captured_graph_uses_the_lengths_of_a_new_plan():
    case = make_case(torch.device("cuda"), torch.bfloat16, (900, 70), heads=16, kv_heads=2, head_dim=128, page_size=16)
    spec, q, kv, shards = case
    backend = make_gqa_backend("triton", spec)
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    backend.plan(shards)
    backend.run(q, kv, o, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, kv, o, lse)
    shorter = Shards(pages=shards.pages, lengths=[123, 0])
    backend.plan(shorter)
    graph.replay()
    assert_agrees(spec, q, kv, shorter, (o, lse), limit=1e-2)
