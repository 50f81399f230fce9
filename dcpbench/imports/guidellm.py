"""Read benchmarks of GuideLLM's JSON report, with the fields of src/guidellm/benchmark/schemas at version 0.7.3 (report version 2).

A report holds a benchmark for each load. Statistics are of the requests that succeeded within the measured time, in ms; the
latency of requests is in s. Its `inter_token_latency_ms` has one value for each request, weighted by its tokens: the mean is that of
all gaps, but its percentiles are not those of gaps. Its `time_per_output_token_ms` includes the first token, so that TPOT comes
from the listed requests, if all are listed. With a warm-up or a cool-down, requests that only overlap the measured time count with
all of their tokens, so that rates are GuideLLM's own, which count the tokens within that time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import result
from dcpbench.imports.documents import Document
from dcpbench.imports.result import EVEN, ONE_TOKEN, Rates, Result
from dcpbench.imports.vllm import read_summary, read_time
from dcpbench.points.names import CLOSED, GAMMA, GUIDELLM, OPENAI, TOOLS, TRACE
from dcpbench.records import formulas
from dcpbench.records.record import Latencies

SYNCHRONOUS, CONCURRENT, THROUGHPUT, CONSTANT = "synchronous", "concurrent", "throughput", "constant"
EARLIER = "run_stats"  # field of versions before 0.4
ARRIVALS = {  # arrival of each strategy's requests, in the names of a load
    SYNCHRONOUS: CLOSED,
    CONCURRENT: CLOSED,
    THROUGHPUT: CLOSED,
    CONSTANT: GAMMA,
    "poisson": GAMMA,
    "trace": TRACE,
}


class Distribution(msgspec.Struct, frozen=True):
    """Hold the statistics of one metric."""

    mean: float
    median: float
    min: float
    max: float
    total_sum: float
    percentiles: dict[str, float]


class Status(msgspec.Struct, frozen=True):
    """Hold a distribution for the requests that succeeded."""

    successful: Distribution | None = None


class Totals(msgspec.Struct, frozen=True):
    """Count requests by their end."""

    successful: int
    errored: int
    total: int
    incomplete: int = 0


class Metrics(msgspec.Struct, frozen=True):
    """Hold the metrics that are read."""

    request_totals: Totals
    request_latency: Status
    prompt_token_count: Status
    output_token_count: Status
    time_to_first_token_ms: Status
    inter_token_latency_ms: Status
    iter_tokens_per_iteration: Status | None = None
    requests_per_second: Status | None = None
    output_tokens_per_second: Status | None = None
    tokens_per_second: Status | None = None


class Strategy(msgspec.Struct, frozen=True):
    """Describe when requests are sent."""

    type_: str
    streams: int | None = None
    rate: float | None = None
    max_concurrency: int | None = None


class Config(msgspec.Struct, frozen=True):
    """Hold the configuration of a benchmark."""

    strategy: Strategy
    backend: dict[str, Any] = {}


class SchedulerMetrics(msgspec.Struct, frozen=True):
    """Hold the times in s between which requests were sent and answered, and between which they were measured."""

    request_start_time: float | None = None
    measure_start_time: float | None = None
    measure_end_time: float | None = None
    request_end_time: float | None = None

    def has_warmup(self) -> bool:
        """Return whether a part of the requests was sent or answered outside the measured time."""
        return (self.request_start_time, self.request_end_time) != (self.measure_start_time, self.measure_end_time)


class File(msgspec.Struct, frozen=True):
    """Hold the fields of a benchmark that are read; others are ignored."""

    config: Config
    metrics: Metrics
    duration: float
    scheduler_metrics: SchedulerMetrics = SchedulerMetrics()
    requests: dict[str, Any] = {}


def read(document: Document) -> Result:
    """Read one benchmark. Raise RecordsError for a document of another tool or version, or of an unknown strategy."""
    if EARLIER in document.fields:
        raise RecordsError(
            f"{document.where} is of an earlier GuideLLM, of which the reports have {EARLIER}; run the benchmark with version 0.5 "
            "or newer."
        )
    found: File = result.convert(document, File, TOOLS[GUIDELLM])
    metrics, strategy, totals = found.metrics, found.config.strategy, found.metrics.request_totals
    arrival = result.choose(document.where, "config.strategy.type_", strategy.type_, ARRIVALS)
    steps = metrics.iter_tokens_per_iteration
    several = steps is not None and steps.successful is not None and steps.successful.mean > ONE_TOKEN
    prompts, answers = metrics.prompt_token_count.successful, metrics.output_token_count.successful
    return Result(
        where=document.where,
        model=result.read_model(_get_backend_field(found, "model"), document.where),
        backend=OPENAI,
        arrival=arrival,
        request_rate=strategy.rate if arrival == GAMMA else None,
        burstiness=EVEN if strategy.type_ == CONSTANT else 1.0,
        concurrency=_read_concurrency(strategy, totals.total),
        trace="trace" if arrival == TRACE else "",
        submitted=totals.total,
        completed=totals.successful,
        failed=totals.errored,
        duration_s=found.duration,
        input_tokens=round(prompts.total_sum) if prompts else 0,
        output_tokens=round(answers.total_sum) if answers else 0,
        rates=_read_rates(metrics) if found.scheduler_metrics.has_warmup() else None,
        lengths=(_find_length(prompts), _find_length(answers)),
        summary={
            "ttft": _summarize(document, "ttft", metrics.time_to_first_token_ms, totals.successful),
            "e2el": _summarize(document, "e2el", metrics.request_latency, totals.successful, 1e3),
            "itl": _summarize_gaps(metrics, several=several),
            "tpot": _summarize_requests(document.where, found),
        },
        several_tokens=several,
        facts={
            "strategy": strategy.type_,
            "target": str(_get_backend_field(found, "target") or ""),
            "incomplete": str(totals.incomplete) if totals.incomplete else "",
        },
    )


def _read_rates(metrics: Metrics) -> Rates | None:
    """Return GuideLLM's own rates; None if the report does not have them all."""
    found = [
        status.successful.mean
        for status in (metrics.tokens_per_second, metrics.output_tokens_per_second, metrics.requests_per_second)
        if status is not None and status.successful is not None
    ]
    return Rates(found[0], found[1], gpus=1, requests=found[2]) if len(found) == 3 else None  # noqa: PLR2004 - all of them


def _get_backend_field(found: File, name: str) -> object:
    """Return a field of the backend, which versions before 0.6 have among its attributes."""
    backend = found.config.backend
    return backend.get(name) or result.get_table(backend, "attributes").get(name)


def _read_concurrency(strategy: Strategy, requests: int) -> int | None:
    """Return the clients of a closed loop, or the bound of an open one; None without a bound."""
    if strategy.type_ == SYNCHRONOUS:
        return 1
    if strategy.type_ == THROUGHPUT:
        return strategy.max_concurrency or max(requests, 1)
    return strategy.streams or strategy.max_concurrency


def _find_length(tokens: Distribution | None) -> str | None:
    """Return the length of all prompts or answers if they have the same one."""
    return str(round(tokens.min)) if tokens is not None and tokens.min == tokens.max and tokens.min >= 1 else None


def _summarize(document: Document, name: str, status: Status, completed: int, scale: float = 1.0) -> Latencies:
    """Return the statistics of a latency in ms."""
    if status.successful is None:
        return Latencies()
    numbers = {"mean": status.successful.mean, "median": status.successful.median}
    numbers |= {
        p: status.successful.percentiles[p] for p in ("p90", "p95", "p99") if p in status.successful.percentiles
    }
    times = {f"{word}_{name}_ms": value * scale for word, value in numbers.items()}
    return read_summary(Document(document.where, times), name, completed)


def _summarize_gaps(metrics: Metrics, *, several: bool) -> Latencies:
    """Return the mean gap between tokens; nothing if chunks hold several tokens, as the gaps between chunks are unknown."""
    gaps = metrics.inter_token_latency_ms.successful
    return Latencies() if gaps is None or several or not gaps.mean else Latencies(mean=gaps.mean)


def _summarize_requests(where: str, found: File) -> Latencies:
    """Return the statistics of TPOT of the listed requests; nothing if some are not listed."""
    listed = found.requests.get("successful")
    if not isinstance(listed, list) or len(listed) != found.metrics.request_totals.successful:
        return Latencies()
    streamed = [r for r in listed if isinstance(r, dict) and r.get("time_to_first_token_ms")]
    times = [read_time(Document(where, r), "inter_token_latency_ms") for r in streamed]
    return formulas.summarize_latencies([t for t in times if t is not None])
