"""Test sparse attention in plans and forecasts: figures of its page, calls between ranks, and engines without DCP for
it.
"""

import dataclasses
from pathlib import Path

import pytest

from dcpbench.models import SHAPES
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.points.roofline import Sharding, StepRows, compute_candidate_bytes, compute_exchanged_bytes
from dcpbench.points.step_calls import predict_calls
from dcpbench.servers.presets import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "sparse-attention.md").read_text()
V32 = SHAPES["deepseek-v3.2"]
REQUESTS, TOKENS = 32, 64_000


@pytest.mark.parametrize("dcp", [2, 4, 8])
def test_docs_page_has_the_bytes_of_the_formulas(dcp):
    """A DCP group has dcp / 8 of 128 heads at tp8; MB are 10⁶ bytes."""
    candidates = compute_candidate_bytes(V32.indexer, [TOKENS // dcp] * REQUESTS, dcp)
    exchanged = compute_exchanged_bytes("a2a", REQUESTS, 128 * dcp // 8, dcp, V32.query_width, V32.output_width, 2)
    cells = " | ".join(f"{size / 1e6:.2f} MB" for size in (candidates, *exchanged))
    assert f"| {dcp} | {cells} |" in PAGE


def test_docs_page_has_the_token_share_with_all_keys_on_each_rank():
    """With dcp 8, a row and a key are divided by 8, or only the row; without DCP, a layer reads all rows of a request."""
    row, key = V32.compute_kv_row_bytes(2), V32.indexer.key_bytes
    shares = [(r + key) / 8 / (r / 8 + key) for r in (row, V32.compute_kv_row_bytes(1))]
    assert f"holds {shares[0]:.2f} of the tokens with bf16 KV, {shares[1]:.2f} with fp8" in PAGE
    read = TOKENS * key / 1e6, V32.indexer.top_k * V32.compute_kv_row_bytes(1) / 1e6
    assert f"{read[0]:.1f} MB of keys and {read[1]:.1f} MB of chosen fp8 rows" in PAGE
    assert f"{row:,} bytes of KV in bf16, or 656 in fp8" in PAGE


def test_forecast_has_a_gather_of_candidates_for_each_indexer():
    """The 20 indexers of 61 layers make 20 all-gathers of 7 · 32 · 2,048 · 8 bytes; a model without an indexer has
    none.
    """
    comm_model = load_machine("H200").comm_model
    shape = dataclasses.replace(V32, indexer=dataclasses.replace(V32.indexer, layers=20))
    rows = StepRows(decodes=(TOKENS,) * REQUESTS, sampled=REQUESTS, tokens=REQUESTS)
    sharding = Sharding(shape=shape, layout=Layout(8, 1, 8), itemsize=2)
    calls = predict_calls(sharding, rows, comm_model, "a2a")
    one = comm_model.in_step.predict_seconds("all-gather", 8, 7 * REQUESTS * 2048 * 8)
    assert calls["all-gather"].mean == pytest.approx(20 * one.mean)
    dense = dataclasses.replace(sharding, shape=dataclasses.replace(shape, indexer=None))
    assert "all-gather" not in predict_calls(dense, rows, comm_model, "a2a")


def test_sglang_lacks_dcp_with_sparse_attention():
    """The pull requests of SGLang for it are open; without DCP, or with attention to all tokens, the point is supported."""
    point = Point(
        model="deepseek-v3.2", tp=8, dcp=8, exchange="a2a", concurrency=8, context=4000, backend="triton", dtype="bf16"
    )
    assert PRESETS["sglang"].find_lacking(point, V32) == ["--dcp 8 with sparse attention"]
    assert PRESETS["vllm"].find_lacking(point, V32) == []
    assert PRESETS["sglang"].find_lacking(point, SHAPES["deepseek-v3"]) == []
    assert PRESETS["sglang"].find_lacking(point) == []


def test_sglang_lacks_prefill_context_parallelism():
    """The context parallel ranks of SGLang are inside tp, so that no flag takes additional GPUs."""
    point = Point(model="deepseek-v3", tp=4, pp=2, pcp=2, concurrency=8, context=4000, backend="triton", dtype="bf16")
    assert PRESETS["sglang"].find_lacking(point) == ["--stages pcp=2"]
    command = PRESETS["vllm"].make_command(point, {}, "m", 8000)
    assert [command[command.index(f"--{name}-parallel-size") + 1] for name in ("pipeline", "prefill-context")] == [
        "2",
        "2",
    ]
