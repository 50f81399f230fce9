"""`--backend auto --exchange auto`: candidates run the attention of a point's own batch, and the fastest is used.

A candidate is a backend with an exchange. A pass over all layers of their work is timed: q written to the exchange's
buffer, gathered, attended to and merged, up to the input of o_proj; on GPUs from a captured graph. The time is that of
the slowest rank, so that all ranks make the same choice.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import DcpbenchError
from dcpbench.exchange.torch_collectives import gather_objects
from dcpbench.measuring.timing import Timer, capture_graph, measure_chunks
from dcpbench.points.names import AUTO, AUTO_EXCHANGES, TIMED_BACKENDS
from dcpbench.records.record import Candidate, Choice
from dcpbench.records.stats import StopRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.decode_engine import Batch, DecodeEngine
    from dcpbench.points.point import Point

RULE = StopRule(seconds=1.0)
CHUNK_SECONDS = 0.1


def list_candidates(point: Point) -> list[tuple[str, str]]:
    """Return every backend and exchange that a point leaves open; named ones are the only candidates."""
    backends = TIMED_BACKENDS if point.backend == AUTO else (point.backend,)
    exchanges = AUTO_EXCHANGES if point.exchange == AUTO else (point.exchange,)
    return list(itertools.product(backends, exchanges))


def get_initial_candidate(point: Point) -> tuple[str, str]:
    """Return the initial backend and exchange of an engine before the selection, which run everywhere."""
    return list_candidates(point)[0]


def choose_fastest(
    engine: DecodeEngine, point: Point, plan: Callable[[], Batch], alive: Callable[[], None]
) -> Choice | None:
    """Leave the engine with the fastest candidate and return the measured times; None if no option is `auto`.

    `plan` returns the batch that each candidate runs. Collective. A candidate that cannot run here is recorded with its
    reason. Raise the error of the last one if none can.
    """
    if AUTO not in (point.backend, point.exchange):
        return None
    found: list[Candidate] = []
    refused: DcpbenchError | None = None
    for backend, exchange in list_candidates(point):
        alive()
        refusal = _check_candidate(engine, backend, exchange, plan)
        if refusal is not None:
            refused = refusal
            found.append(Candidate(backend=backend, exchange=exchange, reason=str(refusal)))
            continue
        found.append(Candidate(backend=backend, exchange=exchange, layer_us=_measure_layer_us(engine, plan(), alive)))
    times = {(c.backend, c.exchange): c.layer_us for c in found if c.layer_us is not None}
    if not times:
        assert refused is not None
        raise refused
    backend, exchange = min(times, key=lambda name: times[name])
    engine.select_path(backend, exchange)
    return Choice(backend=backend, exchange=exchange, candidates=found)


def _check_candidate(
    engine: DecodeEngine, backend: str, exchange: str, plan: Callable[[], Batch]
) -> DcpbenchError | None:
    """Return the error with which a candidate fails on any rank: no rank may wait in a collective that the others skip."""
    refusal = None
    try:
        engine.select_path(backend, exchange)
        plan()
    except DcpbenchError as e:
        refusal = e
    return next((e for e in gather_objects(refusal) if e is not None), None)


def _measure_layer_us(engine: DecodeEngine, batch: Batch, alive: Callable[[], None]) -> float:
    """Return the median time of one layer in µs; the batch is planned."""
    attend_all = _make_pass(engine, batch)
    if engine.device.type == "cuda":
        for _ in range(2):
            attend_all()
        torch.cuda.synchronize()
        step = capture_graph(attend_all).replay
    else:
        step = attend_all
    timing = measure_chunks(Timer(step, engine.device).measure_chunk, RULE, alive, CHUNK_SECONDS)
    return statistics.median(timing.samples_ms) * 1e3 / engine.model.shape.layers


def _make_pass(engine: DecodeEngine, batch: Batch) -> Callable[[], None]:
    model = engine.model
    generator = torch.Generator(engine.device).manual_seed(0)
    shown_BhQ = torch.empty_like(batch.exchange.get_query_buffer(batch.size)).normal_(generator=generator)

    def run_layers() -> None:
        for index in range(model.shape.layers):
            w = model.weights.get_layer(index).attention
            q_BhQ = batch.exchange.get_query_buffer(batch.size).copy_(shown_BhQ)
            model.attention.compute_values(model.run_decode_attention(q_BhQ, w, index, batch), w)

    return run_layers
