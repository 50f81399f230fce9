"""Build synthetic result files of other benchmarks, in the schemas of their source code."""

from __future__ import annotations

from typing import Any


def make_distribution(mean: float, median: float, total: float = 0.0, **ends: float) -> dict[str, Any]:
    """Return GuideLLM's summary of a distribution."""
    names = ("p001", "p01", "p05", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p999")
    found: dict[str, Any] = {
        "mean": mean,
        "median": median,
        "mode": median,
        "variance": 0.0,
        "std_dev": 0.0,
        "count": 3,
        "pdf": None,
    }
    found |= {"min": ends.get("min", median), "max": ends.get("max", 2 * median), "total_sum": total}
    found["percentiles"] = {name: median * (1 + i / 20) for i, name in enumerate(names)} | {"p50": median}
    return {"successful": found, "errored": found, "incomplete": found, "total": found}


def make_guidellm_result(strategy: dict[str, Any], *, listed: int = 3, **metrics: Any) -> dict[str, Any]:
    """Return a benchmark of 3 requests of 100 tokens: TTFT 200 ms, 40, 50 and 60 ms a token of 5, 3 and 2 tokens."""
    request = {"type_": "generative_request_stats", "time_to_first_token_ms": 200.0, "output_tokens": 5}
    return {
        "type_": "generative_benchmark",
        "config": {
            "id_": "a",
            "run_id": "b",
            "run_index": 0,
            "strategy": strategy,
            "constraints": {},
            "backend": {"kind": "openai_http", "target": "http://localhost:8000", "model": "org/model"},
            "requests": {},
            "profile": {},
            "environment": {},
        },
        "scheduler_state": {},
        "scheduler_metrics": {},
        "metrics": {
            "request_totals": {"successful": 3, "incomplete": 1, "errored": 2, "total": 6},
            "request_latency": make_distribution(0.3, 0.32),
            "prompt_token_count": make_distribution(100, 100, 300.0, min=100, max=100),
            "output_token_count": make_distribution(10 / 3, 3, 10.0),
            "time_to_first_token_ms": make_distribution(200.0, 190.0),
            "inter_token_latency_ms": make_distribution(46.0, 40.0),
            "iter_tokens_per_iteration": make_distribution(1.0, 1.0),
        }
        | metrics,
        "requests": {
            "successful": [request | {"inter_token_latency_ms": ms} for ms in (40.0, 50.0, 60.0)][:listed],
            "incomplete": [],
            "errored": [],
        },
        "start_time": 1000.0,
        "end_time": 1002.0,
        "duration": 2.0,
    }


def make_statistic(unit: str, avg: float, **more: float) -> dict[str, Any]:
    return {"unit": unit, "avg": avg, **more}


PHASES: dict[str, Any] = {  # configuration that later versions of AIPerf write
    "models": {"items": [{"name": "org/model"}]},
    "endpoint": {"urls": ["http://localhost:8000"]},
    "datasets": [{"path": "/data/chat.jsonl"}],
    "phases": [
        {"name": "warmup", "type": "concurrency", "concurrency": 9},
        {"name": "profiling", "type": "gamma", "rate": 2.0, "smoothness": 0.5, "concurrency": 3},
    ],
}


def make_aiperf_summary(
    load: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return a summary of AIPerf, as exported without the fields that are not set."""
    return {
        "request_throughput": make_statistic("requests/sec", 1.5),
        "request_latency": make_statistic(
            "ms", 314.0, p50=310.0, p90=320.0, p95=330.0, p99=340.0, min=280.0, max=350.0, std=5.0
        ),
        "request_count": make_statistic("requests", 3),
        "time_to_first_token": make_statistic("ms", 200.0, p50=190.0, p90=210.0, p95=220.0, p99=230.0),
        "inter_token_latency": make_statistic("ms", 50.0, p50=48.0, p90=55.0, p95=57.0, p99=59.0),
        "inter_chunk_latency": make_statistic("ms", 49.0, p50=47.0, p90=56.0, p95=58.0, p99=60.0),
        "output_sequence_length": make_statistic("tokens", 10 / 3, min=2, max=5),
        "input_sequence_length": make_statistic("tokens", 100.0, min=100, max=100),
        "total_osl": make_statistic("tokens", 10),
        "benchmark_duration": make_statistic("sec", 2.0),
        "error_request_count": make_statistic("requests", 1),
        "input_config": {
            "endpoint": {"model_names": ["org/model"], "url": "http://localhost:8000", "streaming": True},
            "loadgen": {"concurrency": 2} if load is None else load,
            "input": given or {},
        },
        "was_cancelled": False,
        "start_time": "2026-11-01T10:00:00",
    } | changes


def make_aiperf_line(start_ns: int, gaps: list[float], phase: str = "profiling", **changes: Any) -> dict[str, Any]:
    """Return a record of a request: TTFT 500 ms, then these gaps in ms."""
    value = {
        "input_sequence_length": {"value": 100, "unit": "tokens"},
        "output_sequence_length": {"value": len(gaps) + 1, "unit": "tokens"},
        "time_to_first_token": {"value": 500.0, "unit": "ms"},
        "request_latency": {"value": 500.0 + sum(gaps), "unit": "ms"},
        "inter_chunk_latency": {"value": gaps, "unit": "ms"},
    }
    metadata = {"session_num": 0, "request_start_ns": start_ns, "benchmark_phase": phase, "was_cancelled": False}
    return {"metadata": metadata, "metrics": value, "error": None} | changes


def make_one_batch_result(**changes: Any) -> dict[str, Any]:
    """Return a result of bench_one_batch: 4 requests of 1,000 tokens, 0.5 s of prefill, then 10 steps that take 0.3 s."""
    return {
        "run_name": "default",
        "batch_size": 4,
        "input_len": 1000,
        "output_len": 11,
        "prefill_latency": 0.5,
        "prefill_throughput": 8000.0,
        "median_decode_latency": 0.029,
        "median_decode_throughput": 4 / 0.029,
        "total_latency": 0.8,
        "overall_throughput": 4 * 1011 / 0.8,
    } | changes


def make_forward_case(name: str, kv_lens: list[int], ranks: int = 1, query: int = 1, drafts: int = 0) -> dict[str, Any]:
    """Return a case of `vllm bench forward` with steps of 5 ms."""
    times = {"timer": "graph_events", "median": 5000.0, "samples_us": [4900.0, 5000.0, 5100.0, 5000.0, 5000.0]}
    rank = {"num_tokens": len(kv_lens), "kv_blocks": 9, "routing": "real", "latency_us": times, "finite": True}
    one = {"query_len": query, "num_draft_tokens": drafts, "chunked": False}
    requests = [one | {"kv_len": n} for n in kv_lens]
    return {"case": name, "requests": requests, "median_us": 5000.0, "ranks": [rank] * ranks}
