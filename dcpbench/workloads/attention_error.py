"""Error of a point's merged attention output against fp64, on the pool, page tables and exchange that are timed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcpbench.exchange.torch_collectives import reduce_max_error
from dcpbench.kernels.attention import compute_rounding_error
from dcpbench.kernels.rope import compute_softmax_scale
from dcpbench.points import layout as arithmetic

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import Batch, DecodeEngine, Request

LAYER = 0
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LIMIT = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}  # maximum relative error: a backend's own rounding and one more


def get_limit(engine: DecodeEngine) -> float:
    """Return the limit for the engine's backend. With fp8 rows, the reference uses the represented values, which are
    exact.
    """
    rounds = {what for batch in engine.batches.values() for what in batch.backend.rounds}
    shape = engine.model.shape
    deviation = shape.query_width**0.5 * compute_softmax_scale(shape)  # of scores of normal rows and queries
    return max(compute_rounding_error(rounds, deviation), LIMIT[DTYPE_NAMES[engine.model.dtype]])


def compute_attention_error(
    engine: DecodeEngine, batch: Batch, requests: list[Request], seed: int, *, all_requests: bool = False
) -> float:
    """Return ‖o − o₆₄‖ / ‖o₆₄‖ over the rows of the first and the last request (or all) and this rank's heads; the largest
    of all ranks.

    o is the merged output, latent or, with projection before the merge, projected. The reference finds a request's rows
    by the arithmetic of layout.py from its locations, not by the page tables that the backend reads, and takes them
    from all ranks of the DCP group. Collective; `batch` is planned for `requests`.
    """
    model = engine.model
    w = model.weights.get_layer(LAYER).attention
    dcp = model.groups.dcp.size
    q_BHQ = _make_queries(engine, batch, seed + 1 + model.groups.attn.rank // dcp)
    mine = model.attention.own_heads
    heads = slice(None) if model.replicated.query else mine
    o_hBR = model.run_decode_attention(
        batch.exchange.get_query_buffer(batch.size).copy_(q_BHQ[:, heads]), w, LAYER, batch
    )

    scale = compute_softmax_scale(model.shape)
    wrong, size_of_truth = 0.0, 0.0
    chosen = range(len(requests))
    checked = chosen if all_requests else sorted({*chosen[:1], *chosen[-1:]})
    length = batch.query_length
    for r, i in itertools.product(checked, range(length)):
        b = r * length + i
        rows_KQ = _gather_rows(engine, requests[r], requests[r].length - length + 1 + i)
        truth_hR, _ = model.attention.compute_truth(q_BHQ[b, mine].double(), rows_KQ, w, scale)
        wrong += float((o_hBR[:, b].double() - truth_hR).pow(2).sum())
        size_of_truth += float(truth_hR.pow(2).sum())
    error = (wrong / size_of_truth) ** 0.5 if size_of_truth else 0.0
    return reduce_max_error(error)


def _make_queries(engine: DecodeEngine, batch: Batch, seed: int) -> torch.Tensor:
    """Return random q [B, H, Q] of all heads of the DCP group, the same on all of its ranks."""
    model = engine.model
    size = (batch.size, model.heads * model.groups.dcp.size, model.attention.query_width)
    generator = torch.Generator(engine.device).manual_seed(seed)
    return torch.empty(size, dtype=model.dtype, device=engine.device).normal_(generator=generator)


def _gather_rows(engine: DecodeEngine, request: Request, tokens: int) -> torch.Tensor:
    """Return the KV rows of a request's first tokens of all ranks, fp64 [S, Q], in any order. Collective over the DCP group."""
    model = engine.model
    dcp, rank, interleave = model.layout.dcp, model.groups.dcp.rank, model.interleave
    locs = request.allocation.compute_locs(0, tokens)
    mine = locs[arithmetic.get_owner(locs, dcp, interleave) == rank]
    most = arithmetic.compute_local_length(tokens, 0, dcp, interleave)
    rows = np.zeros(most, dtype=np.int64)
    rows[: len(mine)] = arithmetic.get_row(mine, dcp, interleave)
    part = model.kv.get_rows(LAYER)[torch.from_numpy(rows).to(engine.device)].to(torch.float32) * model.kv.scale
    everyone = model.groups.dcp.all_gather(part)
    lengths = [arithmetic.compute_local_length(tokens, n, dcp, interleave) for n in range(dcp)]
    return torch.cat([everyone[n, :length] for n, length in enumerate(lengths)]).double()
