"""Build result files of vLLM and SGLang, and served points of dcpbench with samples. None was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.exports.measured_points import MeasuredPoint
from dcpbench.points.layout import Layout
from dcpbench.serving.outcome import StepCounts, compute_serve_metrics, find_warnings, make_rows
from dcpbench.serving.samples import write_samples
from dcpbench.serving.traffic import RequestResult
from tests.unit import record_builder, virtual_serving
from tests.unit import serve_record_builder as build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

NOWHERE = Path("nowhere")
TIMES = [(0.0, [0.5, 0.53, 0.561, 0.60]), (0.1, [0.6, 0.65]), (0.2, [0.7])]
"""Times of submission and of tokens of three requests, in s: TTFT 0.5 s each, gaps 30, 31, 39 and 50 ms."""


def make_vllm_result(**changes: Any) -> dict[str, Any]:
    """Return the file of `vllm bench serve --save-result --save-detailed` for the three requests,
    100 tokens in each.
    """
    return {
        "date": "20261121-101112",
        "endpoint_type": "vllm",
        "backend": "vllm",
        "label": None,
        "model_id": "deepseek-ai/DeepSeek-V3",
        "tokenizer_id": "deepseek-ai/DeepSeek-V3",
        "num_prompts": 3,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 3,
        "duration": 0.8,
        "completed": 3,
        "failed": 0,
        "total_input_tokens": 300,
        "total_output_tokens": 7,
        "request_throughput": 3.75,
        "request_goodput": None,
        "output_throughput": 8.75,
        "total_token_throughput": 383.75,
        "max_output_tokens_per_s": 7.0,
        "max_concurrent_requests": 3,
        "rtfx": 0.0,
        **make_details(),
        "latencies": [0.6, 0.55, 0.5],
        "start_times": [1000.0, 1000.1, 1000.2],
        "queue_times": [0.0, 0.0, 0.0],
        "mean_ttft_ms": 500.0,
        "median_ttft_ms": 500.0,
        "std_ttft_ms": 0.0,
        "p99_ttft_ms": 500.0,
        "mean_tpot_ms": 41.7,
        "median_tpot_ms": 41.7,
        "std_tpot_ms": 8.3,
        "p99_tpot_ms": 49.8,
        "mean_itl_ms": 37.5,
        "median_itl_ms": 35.0,
        "std_itl_ms": 8.3,
        "p99_itl_ms": 49.7,
    } | changes


def make_sglang_result(**changes: Any) -> dict[str, Any]:
    """Return the file of `sglang.bench_serving --output-details` for these requests; it has no times of submission."""
    return {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": 3,
        "sharegpt_output_len": None,
        "random_input_len": 100,
        "random_output_len": 4,
        "random_range_ratio": 0.25,
        "server_info": {"model_path": "deepseek-ai/DeepSeek-V3", "tp_size": 8, "dp_size": 1},
        "duration": 0.8,
        "completed": 3,
        "total_input_tokens": 300,
        "total_output_tokens": 7,
        "total_output_tokens_retokenized": 7,
        "request_throughput": 3.75,
        "input_throughput": 375.0,
        "output_throughput": 8.75,
        "total_throughput": 383.75,
        "mean_e2e_latency_ms": 550.0,
        "median_e2e_latency_ms": 550.0,
        "std_e2e_latency_ms": 41.0,
        "p90_e2e_latency_ms": 590.0,
        "p99_e2e_latency_ms": 599.0,
        "mean_ttft_ms": 500.0,
        "median_ttft_ms": 500.0,
        "std_ttft_ms": 0.0,
        "p99_ttft_ms": 500.0,
        "mean_tpot_ms": 41.7,
        "median_tpot_ms": 41.7,
        "std_tpot_ms": 8.3,
        "p99_tpot_ms": 49.8,
        "mean_itl_ms": 37.5,
        "median_itl_ms": 35.0,
        "std_itl_ms": 8.3,
        "p95_itl_ms": 48.5,
        "p99_itl_ms": 49.7,
        "concurrency": 2.06,
        "accept_length": None,
        **make_details(),
    } | changes


def make_sglang_2024_result(rate: float = float("inf"), **changes: Any) -> dict[str, Any]:
    """Return a line of SGLang's format of December 2024: no server, no model, three medians and no percentile."""
    return {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": rate,
        "max_concurrency": None,
        "total_input_tokens": 152_000,
        "total_output_tokens": 160_000,
        "total_output_tokens_retokenized": 159_900,
        "mean_e2e_latency_ms": 7800.0,
        "median_e2e_latency_ms": 7800.0,
        "median_ttft_ms": 85.0,
        "median_itl_ms": 14.0,
        "output_throughput": 533.3,
        "sharegpt_output_len": None,
        "random_input_len": 1024,
        "random_output_len": 1024,
        "random_range_ratio": 0.0,
        "duration": 300.0,
        "completed": 300,
    } | changes


def make_inferencex_row(**changes: Any) -> dict[str, Any]:
    """Return a row of InferenceX's `process_result.py`, on one node."""
    return {
        "hw": "h200",
        "conc": 64,
        "image": "vllm/vllm-openai:v0.11",
        "model": "deepseek-ai/DeepSeek-R1-0528",
        "infmax_model_prefix": "dsr1",
        "framework": "sglang",
        "precision": "fp8",
        "spec_decoding": "none",
        "disagg": False,
        "isl": 8192,
        "osl": 1024,
        "is_multinode": False,
        "tp": 8,
        "pp": 1,
        "ep": 1,
        "dp_attention": "false",
        "tput_per_gpu": 900.0,
        "output_tput_per_gpu": 100.0,
        "input_tput_per_gpu": 800.0,
        "median_ttft": 0.5,
        "p99_ttft": 2.0,
        "median_tpot": 0.02,
        "p99_tpot": 0.03,
        "median_intvty": 50.0,
        "median_itl": 0.019,
        "p99_itl": 0.2,
    } | changes


MAKERS = {
    "vllm": make_vllm_result,
    "sglang": make_sglang_result,
    "inferencex": make_inferencex_row,
}  # by engine of an import


def make_details() -> dict[str, Any]:
    """Return the lists that both formats have."""
    return {
        "input_lens": [100, 100, 100],
        "output_lens": [4, 2, 1],
        "ttfts": [0.5, 0.5, 0.5],
        "itls": [[0.03, 0.031, 0.039], [0.05], []],
        "generated_texts": ["a b c d", "a b", "a"],
        "errors": ["", "", ""],
    }


def remove_details(result: dict[str, Any]) -> dict[str, Any]:
    """Return the same result, saved without details."""
    return {n: v for n, v in result.items() if n not in (*make_details(), "latencies", "start_times", "queue_times")}


def write_file(folder: Path, *results: dict[str, Any], name: str = "result.json") -> Path:
    """Write a file with a JSON object per line, like Python: Infinity is one word."""
    path = folder / name
    path.write_text("\n".join(json.dumps(result) for result in results))
    return path


def write_sweep(folder: Path, server: dict[str, Any], bench: dict[str, Any], runs: int = 2, **changes: Any) -> Path:
    """Write the folder of `vllm bench sweep serve` for one set of parameters: its runs, and a summary of them.

    Parameters follow `run_number`, except for those with a field in a result.
    """
    names = ["-".join(f"{name}={value}" for name, value in part.items()) for part in (server, bench)]
    inside = folder / "-".join(f"{kind}--{name}" for kind, name in zip(("SERVE", "BENCH"), names, strict=True) if name)
    inside.mkdir(parents=True)
    results = []
    for number in range(runs):
        result = remove_details(make_vllm_result(duration=0.8 + 0.01 * number)) | changes | {"run_number": number}
        results.append(result | server | bench)
        (inside / f"run={number}.json").write_text(json.dumps(results[-1], indent=4))
    (inside / "summary.json").write_text(json.dumps(results, indent=4))
    return inside


def make_point(**changes: Any) -> Point:
    """Return a point of tp4·dcp4 with three clients; requests have 100 tokens in and several lengths out."""
    load = {"requests": 3, "input_tokens": "100", "output_tokens": "uniform:1-4"}
    clients = changes.pop("concurrency", 3)
    return build.make_point(Layout(4, 1, 4), clients, load | changes.pop("changed", {}), **({"context": 104} | changes))


def make_measured_point(
    folder: Path,
    times: Sequence[tuple[float, Sequence[float]]] = TIMES,
    served_point: Point | None = None,
    inputs: int = 100,
    **changes: Any,
) -> MeasuredPoint:
    """Return a served point with tokens at these times, with its samples next to the record."""
    served_point = served_point or make_point()
    samples = [
        RequestResult(virtual_serving.make_request(i, inputs, len(token_s)), submitted, list(token_s))
        for i, (submitted, token_s) in enumerate(times)
    ]
    slo = changes.pop("slo", {})
    found = compute_serve_metrics(
        samples,
        gpus=served_point.tp,
        concurrency=served_point.clients,
        slo=slo,
        steps=StepCounts(),
        samples_file=write_samples(folder, served_point, make_rows(samples)),
    )
    plain = record_builder.make_ok_record(msgspec.structs.replace(served_point, load=None), steps=20)
    record: Record = msgspec.structs.replace(
        plain,
        **(
            {"point": served_point, "metrics": None, "phases": None, "serve": found, "warnings": find_warnings(found)}
            | changes
        ),
    )
    return MeasuredPoint("run", folder, record)


def make_served_point(**changes: Any) -> MeasuredPoint:
    """Return a measured point of fixed lengths, 400 in and 40 out, without samples next to it."""
    return MeasuredPoint("run", NOWHERE, build.make_served_record(build.make_point(build.DCP), **changes))


def make_decode_point(**changes: Any) -> MeasuredPoint:
    """Return a measured point of decode steps."""
    return MeasuredPoint("run", NOWHERE, record_builder.make_ok_record(record_builder.make_point(build.DCP), **changes))


def make_replayed_point() -> MeasuredPoint:
    """Return the served point in virtual time."""
    m = make_served_point()
    assert m.record.point.load
    load = msgspec.structs.replace(m.record.point.load, mode="replay")
    return MeasuredPoint(
        m.run, m.folder, msgspec.structs.replace(m.record, point=msgspec.structs.replace(m.record.point, load=load))
    )


def make_cpu_point() -> MeasuredPoint:
    """Return the served point on a CPU."""
    return make_served_point(environment=record_builder.CPU, warnings=["cpu"])
