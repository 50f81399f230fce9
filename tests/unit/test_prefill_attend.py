"""What chunks of prompts attend to, against fp64 over all keys at once."""

import contextlib

import pytest
import torch

from dcpbench.engine import prefill
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.kernels.prefill.reference import attend
from dcpbench.kernels.rope import softmax_scale
from dcpbench.points import memory
from dcpbench.points.layout import Layout
from dcpbench.serving.requests import Chunk
from tests.unit.engine_builder import alone, layers, shape_like_tiny

SHAPE = shape_like_tiny(nope=128, rope=64, value=128, latent=512, heads=4, layers=1, first_dense=1)
"""Widths of the published models, with few heads."""
ONE = Layout(1)
PAGE = 64
CHUNKS = [(64, 192), (0, 70), (0, 1), (448, 449), (128, 400)]
"""First and last token: with and without prefixes, of one token, and more than a tile of any kernel."""
TABLE = 512


def made(device, dtype, backend, window):
    """A prefiller over a pool of random rows, and a table in which requests lie one behind the other."""
    weights = load_weights(SyntheticSource(0, dtype, device), SHAPE, ONE, 0, layers(SHAPE))
    kv = KvPool(1, len(CHUNKS) * TABLE // PAGE, PAGE, SHAPE.kv_width, dtype, device)
    generator = torch.Generator().manual_seed(1)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    model = Model(SHAPE, ONE, alone(ONE, 0), weights, kv, interleave=1, max_context=TABLE, device=device)
    nbytes = memory.window_bytes(SHAPE, ONE, window, dtype.itemsize)
    prefiller = Prefiller(model, backend=backend, tokens=512, window_bytes=nbytes)
    table = torch.arange(len(CHUNKS) * TABLE, dtype=torch.int32, device=device).view(len(CHUNKS), TABLE)
    return prefiller, table


def truth(prefiller, q, rows):
    """Values in fp64: keys and values of prefix and chunk, decompressed without rounding."""
    model, w = prefiller.model, prefiller.model.weights.layer(0).attention
    pool, all_rows, first = model.kv.rows(0).view(len(CHUNKS), TABLE, -1), [], 0
    for slot, (start, stop) in enumerate(CHUNKS):
        all_rows += [pool[slot, :start], rows[first : first + stop - start]]
        first += stop - start
    row_SQ = torch.cat(all_rows).double()
    latent = row_SQ[:, : SHAPE.latent]
    keys = torch.einsum("sr,hnr->shn", latent, w.w_uk.double())
    rope = row_SQ[:, None, SHAPE.latent :].expand(-1, SHAPE.heads, -1)
    values = torch.einsum("sr,hrv->shv", latent, w.w_uv.double())
    lengths = [stop - start for start, stop in CHUNKS], [stop for _, stop in CHUNKS]
    o, _ = attend(q, torch.cat((keys, rope), -1), values, *lengths, causal=True, scale=softmax_scale(SHAPE))
    return o


@contextlib.contextmanager
def no_waiting(device):
    """Where there is a GPU, an error for whatever waits for it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [64, 192, 4096], ids=lambda w: f"window{w}")
@pytest.mark.parametrize(
    ("place", "dtype", "backend", "limit"),
    [
        pytest.param("cpu", torch.float32, "sdpa", 1e-5, id="cpu-fp32"),
        pytest.param("cuda", torch.float32, "sdpa", 1e-5, id="gpu-fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, "sdpa", 1e-2, id="gpu-sdpa", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, "flashinfer", 1e-2, id="gpu-flashinfer", marks=pytest.mark.gpu),
    ],
)
def test_windows_and_own_chunk_together_are_attention_over_all_keys(place, dtype, backend, limit, window):
    """The error is relative, by norms; in bf16 keys, values and weights are rounded. The second time nothing waits."""
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    device = torch.device(place)
    prefiller, table = made(device, dtype, backend, window)
    generator = torch.Generator().manual_seed(2)
    tokens = sum(stop - start for start, stop in CHUNKS)
    q = torch.randn(tokens, SHAPE.heads, SHAPE.nope + SHAPE.rope, generator=generator).to(device, dtype)
    rows = torch.randn(tokens, SHAPE.kv_width, generator=generator).to(device, dtype)
    chunks = [Chunk(None, slot, start, stop, samples=True) for slot, (start, stop) in enumerate(CHUNKS)]
    w = prefiller.model.weights.layer(0).attention
    prefiller.plan(chunks, table).attend(q, *prefiller.decompress(rows, w), w, 0)
    with no_waiting(device):
        planned = prefiller.plan(chunks, table)
        found = planned.attend(q, *prefiller.decompress(rows, w), w, 0)
    assert len(planned.windows) == -(-sum(start for start, _ in CHUNKS) // window)
    expected = truth(prefiller, q, rows)
    assert float((found - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("nope", "latent", "rope"), [(128, 512, 64), (6, 16, 4), (6, 16, 8), (3, 5, 2), (8, 18, 8)])
def test_rope_parts_are_copied_wherever_they_lie(nope: int, latent: int, rope: int, dtype: torch.dtype) -> None:
    """In words of 8 bytes only where keys and rows both have them there: 6 columns of bf16 end within a word."""
    keys, rows = torch.zeros(3, 2, nope + rope, dtype=dtype), torch.randn(3, latent + rope).to(dtype)
    to, rotated = prefill._in_words(keys[..., nope:], rows[:, None, latent:])
    to.copy_(rotated)
    assert torch.equal(keys[..., nope:], rows[:, None, latent:].expand(3, 2, rope))
    assert (to.dtype == torch.int64) == ((nope, latent) == (128, 512) or (dtype == torch.float32 and nope % 2 == 0))
