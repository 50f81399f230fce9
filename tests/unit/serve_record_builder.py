"""Build records of served loads with the real scheduler, in virtual time with synthetic step times. Nothing is measured."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.points.layout import Layout
from dcpbench.points.point import Load
from dcpbench.records.record import Kv, Record, ServeMetrics
from dcpbench.serving.outcome import compute_serve_metrics, find_warnings
from tests.unit import record_builder, virtual_serving

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.serving.requests import Step

TP, DCP, DP = Layout(4), Layout(4, 1, 4), Layout(4, 4)
SLO = {"ttft": 2000.0, "itl": 30.0}


def make_load(**changes: Any) -> Load:
    """Return a closed loop of 96 requests, 400 tokens in and 40 out."""
    plain = {"requests": 96, "input_tokens": "400", "output_tokens": "40", "chunk": 2048}
    return Load(**(plain | changes))


def make_point(
    layout: Layout = TP, concurrency: int = 8, changed: dict[str, Any] | None = None, **changes: Any
) -> Point:
    """Return a served point of kimi-k2; `changed` are fields of its load."""
    served = make_load(**(changed or {}))
    plain = {"workload": "serve", "concurrency": concurrency, "context": 440, "load": served}
    return record_builder.make_point(layout, **(plain | changes))


def compute_step_s(step: Step, layout: Layout, exchange: str) -> float:
    """Return a synthetic step time: a floor, weights, 25 ns for each KV row that a rank reads, an exchange, and
    prefill.
    """
    rows = max(len(r.decodes) for r in step.replicas)
    kv = max(sum(r.positions) for r in step.replicas)
    prefill = max(sum(c.tokens for c in r.chunks) for r in step.replicas)
    extra = {"ag_rs": 2.5e-3, "symm": 1.2e-3}.get(exchange, 0.0)
    return 9e-3 + 1e-4 * rows + 1e-6 * kv / layout.dcp + extra + 2e-5 * prefill


@functools.cache
def compute_metrics(
    point: Point, pages: int = 1000, until_s: float = float("inf"), faster: float = 1.0
) -> ServeMetrics:
    """Return the metrics of a run of a point with `pages` of 16 tokens for each rank, with steps `faster` times as
    fast.
    """
    layout, served = point.layout, point.load
    assert served is not None
    inputs, outputs = int(served.input_tokens), int(served.output_tokens)
    rate = served.request_rate
    requests = [
        virtual_serving.make_request(i, inputs, outputs, arrival_s=i / rate if rate else None)
        for i in range(served.requests)
    ]
    traffic, steps = virtual_serving.serve(
        requests,
        concurrency=None if rate else point.concurrency,
        seconds=lambda step: compute_step_s(step, layout, point.exchange) / faster,
        until_s=until_s,
        pages=pages,
        dcp=layout.dcp,
        replicas=layout.dp,
        chunk=served.chunk // layout.dp,
    )
    return compute_serve_metrics(
        traffic.samples, gpus=point.tp, concurrency=traffic.concurrency, slo=SLO, steps=steps, idle_fraction=0.012
    )


def make_served_record(point: Point, pages: int = 1000, **changes: Any) -> Record:
    """Return a finished record of a served point; `until_s` and `faster` are those of `metrics`."""
    how = {name: changes.pop(name) for name in ("until_s", "faster") if name in changes}
    tokens = pages * 16 * point.layout.dcp * point.layout.dp
    kv = Kv(
        pool_bytes_per_gpu=pages * 16 * record_builder.KV_ROW_BYTES,
        bytes_per_token_per_gpu=record_builder.KV_ROW_BYTES / point.layout.dcp / point.layout.dp,
        capacity_tokens=tokens,
        capacity_requests=tokens // point.context,
        bounded_by="kv_memory",
        fragmentation=0.0,
    )
    found = compute_metrics(point, pages, **how)
    plain = record_builder.make_ok_record(msgspec.structs.replace(point, load=None), steps=20)
    fields = {
        "point": point,
        "metrics": None,
        "phases": None,
        "serve": found,
        "kv": kv,
        "warnings": find_warnings(found),
    }
    return msgspec.structs.replace(plain, **(fields | changes))


def make_run() -> list[Record]:
    """Return tp4, tp4·dcp4 with two exchanges and tp4·dp4 at three concurrencies live, and replayed at one more length."""
    found = []
    for layout, exchange in ((TP, "none"), (DCP, "ag_rs"), (DCP, "symm"), (DP, "none")):
        for concurrency in (8, 32, 48):
            live_point = make_point(layout, concurrency, exchange=exchange)
            found.append(make_served_record(live_point))
            replayed = msgspec.structs.replace(live_point, load=make_load(mode="replay"))
            found.append(make_served_record(replayed, faster=1.03))
            long = make_point(
                layout, concurrency, {"mode": "replay", "input_tokens": "1600"}, exchange=exchange, context=1640
            )
            found.append(make_served_record(long))
    return found
