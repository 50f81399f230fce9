"""Model the calls between ranks of a step, by kind of call. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dcpbench.points.comm_model import CallTime
from dcpbench.points.layout import compute_local_length
from dcpbench.points.roofline import LSE_BYTES, compute_candidate_bytes, compute_exchanged_bytes, compute_query_work

if TYPE_CHECKING:
    from dcpbench.points.comm_model import CommModel
    from dcpbench.points.roofline import Sharding, StepRows


def predict_calls(sharding: Sharding, rows: StepRows, known: CommModel, exchange: str) -> dict[str, CallTime]:
    """Return the calls between ranks of a step as the engine makes them, by kind; calls of one kind have the same relative error.

    Raise UsageError if a call is unknown for the machine.
    """
    s, layout, itemsize = sharding.shape, sharding.layout, sharding.itemsize
    known = known.in_step
    hidden = s.hidden * itemsize
    decodes = rows.decode_rows
    n, dp = layout.attn_tp, layout.dp
    reduced = ("all-reduce", n, 2 * (n - 1) / n * rows.rows * hidden, 1)
    made = [
        reduced,
        reduced,
        ("all-gather", dp, (dp - 1) / dp * rows.tokens * hidden, 1),
        ("reduce-scatter", dp, (dp - 1) / dp * rows.tokens * hidden, 1),
    ]
    ranks, stored = layout.kv_ranks, sum(prefix for _, prefix in rows.chunks)
    if ranks > 1:
        made += _list_exchange_calls(sharding, decodes, exchange)
        made.append(("all-gather", ranks, (ranks - 1) / ranks * stored * sharding.row_bytes, 1))
    layers = [s.layers] * len(made)
    if s.indexer and ranks > 1:
        keys = [compute_local_length(length, 0, ranks, sharding.interleave) for length in rows.decodes]
        made.append(("all-gather", ranks, compute_candidate_bytes(s.indexer, keys * rows.queries, ranks), 1))
        made.append(("all-gather", ranks, (ranks - 1) / ranks * stored * s.indexer.key_bytes, 1))
        layers += [s.indexer.layers] * 2
    new = sum(tokens for tokens, _ in rows.chunks)
    made.append(("all-gather", sharding.pcp, (sharding.pcp - 1) * new * sharding.row_width * itemsize, 1))
    layers.append(s.layers)
    found: dict[str, CallTime] = {}
    for times, (what, over, received, barriers) in zip(layers, made, strict=True):
        if over > 1 and received:
            each = known.predict_seconds(what, over, math.ceil(received), barriers)
            before = found.get(what, CallTime(mean=0.0, low=0.0, high=0.0))
            found[what] = CallTime(
                mean=before.mean + times * each.mean,
                low=before.low + times * each.low,
                high=before.high + times * each.high,
            )
    return found


def _list_exchange_calls(sharding: Sharding, decodes: int, exchange: str) -> list[tuple[str, int, float, int]]:
    """Return the calls around decode attention of a layer: (kind, ranks, received bytes, barriers).

    DCP ranks in different PCP ranks hold the same heads, so that queries are gathered inside a PCP rank alone. As in vLLM, the
    log-sum-exps of all DCP ranks are then gathered, and their scaled outputs summed on all of them.
    """
    s, layout, itemsize = sharding.shape, sharding.layout, sharding.itemsize
    inner, ranks, heads = layout.dcp, layout.kv_ranks, s.heads // layout.attn_tp * layout.dcp
    if layout.shared_kv == 1:
        both = compute_exchanged_bytes(exchange, decodes, heads, ranks, s.query_width, s.output_width, itemsize)
        return [(exchange, ranks, sum(both), 2)]
    queries = compute_query_work(decodes, heads, inner, s.query_width, itemsize).received_bytes
    return [
        ("all-gather", inner, queries, 1),
        ("all-gather", ranks, (ranks - 1) * decodes * heads * LSE_BYTES, 1),
        ("all-reduce", ranks, 2 * (ranks - 1) / ranks * decodes * heads * s.output_width * itemsize, 1),
    ]
