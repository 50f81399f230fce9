"""Weights, rows and prompts of grouped-query attention on one rank."""

import dataclasses
from unittest import mock

import pytest
import torch

from dcpbench.engine.attention.gqa import GqaWeights
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.kernels.gqa import split_rows
from dcpbench.kernels.prefill.reference import compute_attention
from dcpbench.measuring.timing import Timer
from dcpbench.models.shapes import Gqa, ModelShape
from dcpbench.models.weight_formats import FORMATS, FP8, UNQUANTISED
from dcpbench.points import memory
from dcpbench.points.budget import plan_engine
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout, QueryReplication
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.record import Environment
from dcpbench.serving.requests import Chunk
from dcpbench.workloads import decode
from dcpbench.workloads.session import build_session
from tests.unit.engine_builder import CPU, count_bytes, make_engine, make_groups, make_layers

DENSE = ModelShape(
    name="grouped",
    hidden=32,
    layers=2,
    heads=8,
    intermediate_size=64,
    first_k_dense_replace=2,
    vocab=101,
    gqa=Gqa(kv_heads=2, qk_norm=True),
    latent=0,
    qk_rope_head_dim=16,
    qk_nope_head_dim=0,
    v_head_dim=16,
    rope_interleaved=False,
    max_position=4096,
)
SPARSE = dataclasses.replace(
    DENSE, first_k_dense_replace=0, experts=8, top_k=2, moe_intermediate_size=16, tie_word_embeddings=True
)


def load_rank_weights(shape, layout, rank=0, wide=QueryReplication(), *, fp8=False):  # noqa: B008 - frozen
    return load_weights(
        SyntheticSource(0, torch.float32, CPU), shape, layout, rank, make_layers(shape), replicated=wide, fp8=fp8
    )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("wide", [QueryReplication(), QueryReplication(query=True)], ids=["own", "q-replicate"])
@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(4), Layout(4, dcp=2), Layout(8, dcp=4)], ids=str)
@pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_weights_of_a_rank_have_the_bytes_of_the_memory_plan(shape, layout, wide, fp8):
    held = load_rank_weights(shape, layout, wide=wide, fp8=fp8)
    planned = memory.compute_weight_bytes(
        shape, layout, 4, *make_layers(shape), wide, FORMATS[FP8] if fp8 else UNQUANTISED
    )
    assert count_bytes(held) == planned


def test_more_ranks_than_kv_heads_hold_copies():
    """With 2 KV heads on 4 ranks, ranks 0 and 1 hold the first and ranks 2 and 3 the second, each for 2 of 8 query
    heads.
    """
    weights_of_ranks = [load_rank_weights(DENSE, Layout(4), rank).get_layer(1).attention for rank in range(4)]
    whole = load_rank_weights(DENSE, Layout(1)).get_layer(1).attention
    assert isinstance(whole, GqaWeights)
    q, k, v = whole.qkv.split((128, 32, 32))
    for rank, one in enumerate(weights_of_ranks):
        head = slice(rank // 2 * 16, (rank // 2 + 1) * 16)
        assert torch.equal(one.qkv, torch.cat((q[rank * 32 : (rank + 1) * 32], k[head], v[head])))
        assert torch.equal(one.o, whole.o[:, rank * 32 : (rank + 1) * 32])


def test_rank_holds_the_kv_heads_of_its_query_heads():
    """Each of 2 ranks has four of 8 KV heads."""
    shape = dataclasses.replace(DENSE, gqa=Gqa(kv_heads=8))
    held, whole = (
        load_rank_weights(shape, layout, rank).get_layer(0).attention
        for layout, rank in ((Layout(2), 1), (Layout(1), 0))
    )
    q, k, v = whole.qkv.split((128, 128, 128))
    assert torch.equal(held.qkv, torch.cat([part[64:] for part in (q, k, v)]))
    assert held.q_norm is None


def test_step_of_a_dense_model_needs_no_router():
    """Two requests have different lengths; logits are finite, and the KV row of each new token is written."""
    built = make_engine(shape=DENSE, page_size=4)
    requests = [built.add_request(n) for n in (3, 9)]
    for number, request in enumerate(requests):
        built.write_random_kv(request, number, 0)
    before = built.model.kv.data.clone()
    batch = built.plan_step(requests)
    built.run_eager(batch)
    assert batch.logits.isfinite().all()
    changed = (built.model.kv.data != before).any(-1)[:, 1:].sum((1, 2))
    assert changed.tolist() == [2, 2]


@pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("kv_dtype", ["", "fp8"])
def test_decode_point_has_accurate_attention_and_planned_memory(shape, kv_dtype, monkeypatch):
    """The reference is fp64, and a token takes the K and V heads of the rank: 2 heads of 16 columns, in 2 layers."""
    monkeypatch.setattr(Timer, "measure_chunk", lambda timer, steps: (timer.step(), ([2.0] * steps, 0.1))[1])
    point = Point(
        model="tiny", tp=1, concurrency=3, context=9, backend="reference", dtype="fp32", page_size=4, kv_dtype=kv_dtype
    )
    probe = Probe(device="cpu", count=0, name="CPU")
    built = build_session(point, shape, plan_engine([point], Settings(), shape, probe), rank=0, device=CPU, seed=0)
    with torch.inference_mode():
        record = decode.run(built, point, Settings(profile=False), Environment(device="CPU", device_count=0), tell=id)
    assert record.metrics.step_ms.median == 2
    assert 0 < record.conditions.attention_error < 1e-5
    assert record.kv.bytes_per_token_per_gpu == 2 * 2 * 2 * 16 * (1 if kv_dtype else 4)
    assert count_bytes(built.engine.model.weights) == built.plan.weight_bytes


PAGE, TABLE = 8, 64
CHUNKS = [(8, 24), (0, 9), (0, 1), (56, 57), (16, 40)]
"""First and last token of each chunk, with and without a prefix; one chunk has one token."""


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=["fp32", "fp8"])
@pytest.mark.parametrize("window", [8, 24, 512])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.sample(5)
def test_chunks_attend_to_prefixes_and_their_own_rows(kv_heads, window, kv_dtype):
    """Attention runs in one call and in windows, merged by their log-sum-exp; stored rows are read as they are stored."""
    shape = dataclasses.replace(DENSE, gqa=Gqa(kv_heads=kv_heads), layers=1, first_k_dense_replace=1)
    layout = Layout(1)
    width = shape.compute_kv_width(1)
    kv = KvPool(1, len(CHUNKS) * TABLE // PAGE, PAGE, width, kv_dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    model = Model(
        shape,
        layout,
        make_groups(layout, 0),
        load_rank_weights(shape, layout),
        kv,
        interleave=1,
        max_context=TABLE,
        device=CPU,
    )
    with mock.patch.object(memory, "PREFILL_WINDOW", window):
        prefiller = Prefiller(model, backend="sdpa", tokens=128)
    table = torch.arange(len(CHUNKS) * TABLE, dtype=torch.int32).view(len(CHUNKS), TABLE)
    chunks = [Chunk(None, slot, start, stop, samples=False) for slot, (start, stop) in enumerate(CHUNKS)]
    plan = prefiller.plan_chunks(chunks, table)
    tokens = sum(stop - start for start, stop in CHUNKS)
    q = torch.randn(tokens, shape.heads, 16, generator=generator)
    rows = torch.randn(tokens, width, generator=generator)
    found = plan.run_attention(q, lambda seen: prefiller.load_keys(seen, rows, 0))
    pool, seen, first = kv.get_rows(0).view(len(CHUNKS), TABLE, -1).float(), [], 0
    for slot, (start, stop) in enumerate(CHUNKS):
        seen += [pool[slot, :start], rows[first : first + stop - start]]
        first += stop - start
    lengths = [stop - start for start, stop in CHUNKS], [stop for _, stop in CHUNKS]
    truth, _ = compute_attention(q, *split_rows(torch.cat(seen), kv_heads), *lengths, causal=True, scale=0.25)
    assert torch.allclose(found.double(), truth, atol=1e-5)
