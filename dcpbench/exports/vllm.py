"""Export `vllm bench serve --save-result --save-detailed`: one JSON file per served point, times of requests in
seconds.

Fields are those of vllm/benchmarks/serve.py; docs/exports.md names the commit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dcpbench.exports import RenderedFiles, bench_files, encode_json
from dcpbench.exports.measured_points import compute_digest
from dcpbench.points.names import VLLM_OBJECTIVES
from dcpbench.reports import load_labels
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.bench_files import ServedPoint
    from dcpbench.exports.measured_points import MeasuredPoint

TP, DP, DCP, EP = "tensor_parallel_size", "data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel"
"""Metadata under vLLM's option names; its tp counts the GPUs of one dp replica, dcpbench's those of all."""
OUTER = {"pp": "pipeline_parallel_size", "pcp": "prefill_context_parallel_size"}  # imported servers, above 1


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return a file per point that served requests."""
    kept, left_out = bench_files.collect_served(points)
    return RenderedFiles({_make_file_name(p): encode_json(_build_result(p)) for p in kept}, left_out)


def _build_result(p: ServedPoint) -> dict[str, Any]:
    point, serve, totals = p.m.record.point, p.serve, p.totals
    found: dict[str, Any] = {
        "date": re.sub(r"[-:Z]", "", p.m.record.started_at).replace("T", "-")[:15],
        "endpoint_type": p.label,
        "backend": p.label,
        "label": p.label,
        "model_id": point.model,
        "tokenizer_id": None,
        "num_prompts": p.load.requests,
        **_build_metadata(p),
        "request_rate": "inf" if p.request_rate is None else p.request_rate,
        "burstiness": p.load.burstiness,
        "max_concurrency": p.max_concurrency,
        "duration": p.wall_s,
        "completed": totals.finished,
        **({} if totals.failed is None else {"failed": totals.failed}),
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "request_throughput": totals.finished / p.wall_s,
        "request_goodput": serve.request_goodput if _format_goodput(p) else None,
        "output_throughput": totals.output_tokens / p.wall_s,
        "total_token_throughput": (totals.input_tokens + totals.output_tokens) / p.wall_s,
    }
    if p.requests is not None:
        found |= {**vars(p.requests), "max_concurrent_requests": p.requests.count_max_in_flight()}
    return found | bench_files.collect_statistics(p)


def _build_metadata(p: ServedPoint) -> dict[str, str]:
    """Return values without a field in vLLM's file, as its --metadata would write them."""
    point = p.m.record.point
    found = {}
    if point.tp:
        found = {TP: str(point.tp // max(point.dp, 1)), DP: str(point.dp), DCP: str(point.dcp)}
        found |= {theirs: str(degree) for ours, theirs in OUTER.items() if (degree := getattr(point, ours)) > 1}
    ranks = point.tp * point.pcp
    if ranks > 1 and point.ep_degree in (1, ranks):
        found[EP] = str(point.ep_degree == ranks)
    if goodput := _format_goodput(p):
        found["goodput"] = goodput
    if held := load_labels.describe_layers_held([p.m.record]):
        found["layers"] = held
    if warnings := p.m.record.warnings:
        found["warnings"] = ",".join(warnings)
    return found


def _format_goodput(p: ServedPoint) -> str:
    """Return the objectives for --goodput, `ttft:500 e2el:9000`; empty if vLLM cannot express them."""
    slo = p.serve.slo_ms
    return " ".join(f"{n}:{ms:g}" for n, ms in slo.items()) if slo and set(slo) <= set(VLLM_OBJECTIVES) else ""


def _make_file_name(p: ServedPoint) -> str:
    point = p.m.record.point
    rate = "inf" if p.request_rate is None else f"{p.request_rate:g}"
    at_once = "" if p.max_concurrency is None else f"-concurrency{p.max_concurrency}"
    words = f"{p.label}-{rate}qps{at_once}-{fit_name(point.model, 40)}-{point.layout_name.replace('·', '-')}"
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", words).strip("._-")
    return f"{safe}-{compute_digest(f'{p.m.run} {point.get_key()}')}.json"
