"""Export SGLang's `bench_serving --output-details`: one JSON line per served point, times of requests in seconds.

Fields are those of python/sglang/bench_serving.py; docs/exports.md names the commit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dcpbench.exports import RenderedFiles, bench_files, encode_json
from dcpbench.points.names import TRACE
from dcpbench.reports import load_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.bench_files import ServedPoint
    from dcpbench.exports.measured_points import MeasuredPoint
    from dcpbench.records.record import Record

NAMES = {"e2el": "e2e_latency", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
FILE = "sglang.jsonl"


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file with a line per served point; the rate of a closed loop is Infinity, as SGLang writes it."""
    kept, left_out = bench_files.collect_served(points)
    lines = [encode_json(_build_result(p), infinity=True) for p in kept]
    return RenderedFiles({FILE: b"".join(lines)} if lines else {}, left_out)


def _build_result(p: ServedPoint) -> dict[str, Any]:
    serve, totals, wall = p.serve, p.totals, p.wall_s
    inputs, outputs = (
        bench_files.parse_fixed_length(p.load.input_tokens),
        bench_files.parse_fixed_length(p.load.output_tokens),
    )
    found: dict[str, Any] = {
        "tag": p.m.record.point.layout_name,
        "backend": p.label,
        "dataset_name": p.load.trace or "random",
        "request_rate": "trace" if p.load.arrival == TRACE else math.inf if p.request_rate is None else p.request_rate,
        "max_concurrency": p.max_concurrency,
        "random_input_len": inputs,
        "random_output_len": outputs,
        "random_range_ratio": 1.0 if inputs is not None and outputs is not None else None,
        "server_info": _describe_server(p.m.record),
        "duration": wall,
        "completed": totals.finished,
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "request_throughput": totals.finished / wall,
        "input_throughput": totals.input_tokens / wall,
        "output_throughput": totals.output_tokens / wall,
        "total_throughput": (totals.input_tokens + totals.output_tokens) / wall,
        **bench_files.collect_statistics(p, NAMES),
        "accept_length": serve.speculation.tokens_per_step if serve.speculation else None,
    }
    if serve.e2el_ms.mean is not None:
        found["concurrency"] = serve.e2el_ms.mean / 1e3 * serve.e2el_ms.samples / wall
    if p.requests is not None:
        lists = {name: each for name, each in vars(p.requests).items() if name not in ("latencies", "start_times")}
        found |= {"max_concurrent_requests": p.requests.count_max_in_flight(), **lists}
    return found


def _describe_server(record: Record) -> dict[str, Any]:
    """Return the layout under SGLang's argument names, in which dp lies inside tp, and the layers that were held."""
    point = record.point
    found: dict[str, Any] = {"model_path": point.model}
    if point.tp and point.pcp == 1:  # its own prefill context parallelism lies inside tp
        found |= {f"{name}_size": getattr(point, name) for name in ("tp", "dp", "dcp", "pp")}
        found["enable_dp_attention"] = point.dp > 1
    if ranks := point.ep_degree:
        found["ep_size"] = ranks
    if held := load_labels.describe_layers_held([record]):
        found["layers"] = held
    return found
