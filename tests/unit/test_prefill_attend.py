"""Attention of prompt chunks, compared with fp64 over all keys at once."""

import contextlib
from unittest import mock

import pytest
import torch

from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.kernels.prefill.reference import compute_attention
from dcpbench.kernels.rope import compute_softmax_scale
from dcpbench.points import memory
from dcpbench.points.layout import Layout
from dcpbench.serving.requests import Chunk
from tests.unit.engine_builder import make_groups, make_layers, make_shape

SHAPE = make_shape(
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, latent=512, heads=4, layers=1, first_k_dense_replace=1
)
"""Widths of the published models, with few heads."""
ONE = Layout(1)
PAGE = 64
CHUNKS = [(64, 192), (0, 70), (0, 1), (448, 449), (128, 400)]
"""First and last token of chunks: with and without prefixes, with one token, and with more than a tile of any kernel."""
TABLE = 512


def make_prefiller(device, dtype, backend, window):
    """Return a prefiller over a pool of random rows, and a table with consecutive requests."""
    weights = load_weights(SyntheticSource(0, dtype, device), SHAPE, ONE, 0, make_layers(SHAPE))
    kv = KvPool(1, len(CHUNKS) * TABLE // PAGE, PAGE, SHAPE.kv_width, dtype, device)
    generator = torch.Generator().manual_seed(1)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    model = Model(SHAPE, ONE, make_groups(ONE, 0), weights, kv, interleave=1, max_context=TABLE, device=device)
    with mock.patch.object(memory, "PREFILL_WINDOW", window):
        prefiller = Prefiller(model, backend=backend, tokens=512)
    table = torch.arange(len(CHUNKS) * TABLE, dtype=torch.int32, device=device).view(len(CHUNKS), TABLE)
    return prefiller, table


def compute_expected(prefiller, q, rows):
    """Return the values in fp64: keys and values of prefix and chunk, decompressed without rounding."""
    model, w = prefiller.model, prefiller.model.weights.get_layer(0).attention
    pool, all_rows, first = model.kv.get_rows(0).view(len(CHUNKS), TABLE, -1), [], 0
    for slot, (start, stop) in enumerate(CHUNKS):
        all_rows += [pool[slot, :start], rows[first : first + stop - start]]
        first += stop - start
    row_SQ = torch.cat(all_rows).double()
    latent = row_SQ[:, : SHAPE.latent]
    keys = torch.einsum("sr,hnr->shn", latent, w.w_uk.double())
    rope = row_SQ[:, None, SHAPE.latent :].expand(-1, SHAPE.heads, -1)
    values = torch.einsum("sr,hrv->shv", latent, w.w_uv.double())
    lengths = [stop - start for start, stop in CHUNKS], [stop for _, stop in CHUNKS]
    o, _ = compute_attention(
        q, torch.cat((keys, rope), -1), values, *lengths, causal=True, scale=compute_softmax_scale(SHAPE)
    )
    return o


def run_attention(prefiller, planned, q, rows):
    """Return the attention of a layer for the chunks of a step."""
    return planned.run_attention(q, lambda seen: prefiller.load_keys(seen, rows, 0))


@contextlib.contextmanager
def forbid_synchronisation(device):
    """Raise an error for any call that waits for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("window", "windows"), [(64, [0, 7, 2]), (192, [0, 3, 0]), (4096, [0])], ids=str)
@pytest.mark.parametrize(
    ("place", "dtype", "backend", "limit"),
    [
        pytest.param("cpu", torch.float32, "sdpa", 1e-5, id="cpu-fp32"),
        pytest.param("cuda", torch.float32, "sdpa", 1e-5, id="gpu-fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, "sdpa", 1e-2, id="gpu-sdpa", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, "flashinfer", 1e-2, id="gpu-flashinfer", marks=pytest.mark.gpu),
    ],
)
def test_parts_and_windows_equal_attention_over_all_keys(place, dtype, backend, limit, window, windows):
    """A part of 512 keys has the first three chunks, one of 4,096 all; 448 and 128 stored tokens need several windows
    of 64. The error is relative, by norms; in bf16 keys, values and weights are rounded. The second run must not
    synchronise.
    """
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    device = torch.device(place)
    prefiller, table = make_prefiller(device, dtype, backend, window)
    generator = torch.Generator().manual_seed(2)
    tokens = sum(stop - start for start, stop in CHUNKS)
    q = torch.randn(tokens, SHAPE.heads, SHAPE.qk_nope_head_dim + SHAPE.qk_rope_head_dim, generator=generator).to(
        device, dtype
    )
    rows = torch.randn(tokens, SHAPE.kv_width, generator=generator).to(device, dtype)
    chunks = [Chunk(None, slot, start, stop, samples=True) for slot, (start, stop) in enumerate(CHUNKS)]
    run_attention(prefiller, prefiller.plan_chunks(chunks, table), q, rows)
    with forbid_synchronisation(device):
        planned = prefiller.plan_chunks(chunks, table)
        found = run_attention(prefiller, planned, q, rows)
    assert [len(part.windows) for part in planned.parts] == windows
    expected = compute_expected(prefiller, q, rows)
    assert float((found - expected).norm() / expected.norm()) < limit
