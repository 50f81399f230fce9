"""What is exported of a point: one list, from which every format takes what it has a place for."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.exports.measured import Measured
    from dcpbench.records.record import Interval, Latencies, Percentiles, Record

Better = Literal["bigger", "smaller", ""]
TIMES = {
    "ttft": "time to first token, queueing included",
    "itl": "gap between two output tokens of a request",
    "tpot": "time per output token after the first, one per request",
    "e2el": "time from submission to the last token",
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a point."""

    name: str
    """With its unit, as in a record."""
    unit: str
    """As said in words."""
    better: Better = ""
    """Nothing where a change is neither good nor bad."""
    help: str
    of: Callable[[Record], float | None]
    interval: Callable[[Record], Interval | None] = lambda _: None
    whole: bool = False
    """Whether it counts things."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A metric of a point over its repeats: their median, and how far they reach."""

    metric: Metric
    value: float
    low: float | None
    high: float | None
    """95 % interval of a single measurement, or the envelope of several; None where one number is all there is."""
    each: tuple[float, ...]
    """Of each repeat that has it."""


def values(repeats: Sequence[Measured]) -> list[Value]:
    """What is known of a point, in the order of METRICS; what was not measured, or is no number, is left out."""
    found = []
    for metric in METRICS:
        each = [(v, metric.interval(m.record)) for m in repeats if (v := known(metric, m.record)) is not None]
        if each:
            low, high = _reach(each)
            numbers = tuple(v for v, _ in each)
            found.append(Value(metric, statistics.median(numbers), low, high, numbers))
    return found


def known(metric: Metric, record: Record) -> float | None:
    """The number, unless it was not measured or is none: a record may hold anything."""
    value = metric.of(record)
    return None if value is None or not math.isfinite(value) else float(value)


def _reach(each: Sequence[tuple[float, Interval | None]]) -> tuple[float | None, float | None]:
    intervals = [interval for _, interval in each if interval is not None]
    if len(each) == 1 and not intervals:
        return None, None
    low = min(min((i.low for i in intervals), default=math.inf), *(v for v, _ in each), math.inf)
    high = max(max((i.high for i in intervals), default=-math.inf), *(v for v, _ in each), -math.inf)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)


def _times(name: str) -> Callable[[Record], Latencies | Percentiles | None]:
    def of(record: Record) -> Latencies | Percentiles | None:
        holder = record.serve or record.metrics
        return getattr(holder, f"{name}_ms", None)

    return of


def _latency(name: str, statistic: str) -> Metric:
    times = _times(name)
    help_ = f"{statistic} of the {TIMES[name]}; absent where samples are too few"
    return Metric(
        name=f"{name}_{statistic}_ms",
        unit="ms",
        better="smaller",
        help=help_,
        of=lambda r: getattr(times(r), statistic, None),
    )


def _served(name: str, unit: str, help_: str, better: Better = "", *, whole: bool = False) -> Metric:
    """A number of requests that were served, by its name in ServeMetrics."""
    return Metric(
        name=name, unit=unit, better=better, help=help_, whole=whole, of=lambda r: getattr(r.serve, name, None)
    )


def _kv(name: str, unit: str, help_: str, better: Better = "", *, whole: bool = False) -> Metric:
    """A number of the KV cache, by its name in Kv."""
    return Metric(
        name=f"kv_{name}", unit=unit, better=better, help=help_, whole=whole, of=lambda r: getattr(r.kv, name, None)
    )


def _output_tok_s(record: Record) -> float | None:
    if record.serve:
        return record.serve.output_tok_s
    return record.metrics.output_tok_s.median if record.metrics else None


def _idle_fraction(record: Record) -> float | None:
    if record.serve:
        return record.serve.idle_fraction
    return record.phases.idle_fraction if record.phases else None


METRICS: tuple[Metric, ...] = (
    Metric(
        name="output_tok_s",
        unit="tok/s",
        better="bigger",
        help="output tokens per second of the whole layout",
        of=_output_tok_s,
        interval=lambda r: r.metrics.output_tok_s if r.metrics else None,
    ),
    Metric(
        name="output_tok_s_per_gpu",
        unit="tok/s/GPU",
        better="bigger",
        help="output tokens per second and GPU",
        of=lambda r: getattr(r.serve or r.metrics, "output_tok_s_per_gpu", None),
    ),
    Metric(
        name="tok_s_per_user",
        unit="tok/s/user",
        better="bigger",
        help="1000 over the median ITL in ms",
        of=lambda r: getattr(r.serve or r.metrics, "tok_s_per_user", None),
    ),
    _served("total_tok_s", "tok/s", "input and output tokens per second of the whole layout", "bigger"),
    _served("steady_tok_s", "tok/s", "output tokens per second while the target concurrency is held", "bigger"),
    _served("request_s", "requests/s", "finished requests per second", "bigger"),
    _served("goodput_s", "requests/s", "requests per second that meet every objective", "bigger"),
    Metric(
        name="step_ms",
        unit="ms",
        better="smaller",
        help="median time of a decode step, slowest rank",
        of=lambda r: r.metrics.step_ms.median if r.metrics else None,
        interval=lambda r: r.metrics.step_ms if r.metrics else None,
    ),
    *(_latency(name, statistic) for name in TIMES for statistic in STATISTICS),
    Metric(
        name="host_syncs_per_step",
        unit="syncs/step",
        better="smaller",
        help="calls in one step that make the host wait for the GPU",
        of=lambda r: r.host_syncs_per_step,
    ),
    Metric(
        name="host_plan_us",
        unit="µs",
        better="smaller",
        help="host time to plan one step",
        of=lambda r: r.host_plan_us,
    ),
    Metric(
        name="idle_fraction",
        unit="share",
        better="smaller",
        help="share of a step in which no kernel runs",
        of=_idle_fraction,
    ),
    _kv("capacity_tokens", "tokens", "tokens that the KV pools hold, each counted once", "bigger", whole=True),
    _kv("capacity_requests", "requests", "requests of the point's context that fit at once", "bigger", whole=True),
    _kv("pool_bytes_per_gpu", "bytes", "size of one GPU's KV pool", whole=True),
    _kv("bytes_per_token_per_gpu", "bytes", "KV bytes of a token, averaged over the layout's GPUs", "smaller"),
    Metric(
        name="memory_peak_bytes",
        unit="bytes",
        better="smaller",
        whole=True,
        help="peak memory of a GPU",
        of=lambda r: r.memory_peak_bytes,
    ),
    _served("wall_s", "s", "time from the first submission to the last token"),
    _served("submitted", "requests", "requests that were submitted", whole=True),
    _served("finished", "requests", "requests that got all their tokens", whole=True),
    _served("rejected", "requests", "requests that can never fit", whole=True),
    _served("cancelled", "requests", "requests that the end of the run cut off", whole=True),
    _served("input_tokens", "tokens", "prompt tokens of requests that got a token", whole=True),
    _served("output_tokens", "tokens", "output tokens that came", whole=True),
    _served("cached_tokens", "tokens", "prompt tokens that the prefix cache had", whole=True),
    _served("preemptions", "preemptions", "how often a request lost its KV cache to others", "smaller", whole=True),
    _served("steps", "steps", "steps of the run", whole=True),
    _served("decode_steps", "steps", "steps without prefill", whole=True),
    _served("decode_batch", "requests", "mean requests in a step without prefill"),
)
