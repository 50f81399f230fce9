"""What of a record is followed over runs: name, unit, which direction is better, and where it lies in a record."""

from __future__ import annotations

import dataclasses
import math
from statistics import median
from typing import TYPE_CHECKING

from dcpbench.points.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dcpbench.records.record import Interval, Record

HIGHER, LOWER, NEITHER = "higher", "lower", ""
DEFAULT = "output_tok_s_per_gpu"
"""What the page shows first."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A median, with an interval where there is one."""

    median: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Measure:
    """One quantity."""

    id: str
    label: str
    unit: str
    better: str
    """`higher`, `lower` or neither."""
    take: Callable[[Record], Value | None]


def _plain(value: float | None) -> Value | None:
    return None if value is None or not math.isfinite(value) else Value(value)


def _interval(interval: Interval, scale: float = 1.0) -> Value:
    return Value(interval.median * scale, interval.low * scale, interval.high * scale)


def _output(record: Record) -> Value | None:
    if record.metrics:
        return _interval(record.metrics.output_tok_s)
    return _plain(record.serve.output_tok_s) if record.serve else None


def _per_gpu(record: Record) -> Value | None:
    """Output throughput divided by tp, its interval likewise."""
    if record.metrics:
        return _interval(record.metrics.output_tok_s, 1 / record.point.tp)
    return _plain(record.serve.output_tok_s_per_gpu) if record.serve else None


def _per_user(record: Record) -> Value | None:
    """1000 / median step time in ms for `decode`, whose gaps between tokens are steps."""
    if record.metrics:
        step = record.metrics.step_ms
        return Value(record.metrics.tok_s_per_user, *(1000 / ms if ms > 0 else None for ms in (step.high, step.low)))
    return _plain(record.serve.tok_s_per_user) if record.serve else None


def _step(record: Record) -> Value | None:
    return _interval(record.metrics.step_ms) if record.metrics else None


def _latency(name: str, percentile: str) -> Callable[[Record], Value | None]:
    def take(record: Record) -> Value | None:
        return _plain(getattr(getattr(record.metrics or record.serve, name, None), percentile, None))

    return take


def _served(name: str) -> Callable[[Record], Value | None]:
    return lambda record: _plain(getattr(record.serve, name, None))


def _goodput(record: Record) -> Value | None:
    return _plain(record.serve.goodput_s) if record.serve and record.serve.slo_ms else None


MEASURES = (
    Measure("output_tok_s_per_gpu", "Output throughput per GPU", "tok/s/GPU", HIGHER, _per_gpu),
    Measure("output_tok_s", "Output throughput", "tok/s", HIGHER, _output),
    Measure("tok_s_per_user", "Speed for one user", "tok/s/user", HIGHER, _per_user),
    Measure("step_ms", "Step time", "ms", LOWER, _step),
    Measure("itl_p50_ms", "ITL p50", "ms", LOWER, _latency("itl_ms", "p50")),
    Measure("itl_p99_ms", "ITL p99", "ms", LOWER, _latency("itl_ms", "p99")),
    Measure("ttft_p50_ms", "TTFT p50", "ms", LOWER, _latency("ttft_ms", "p50")),
    Measure("ttft_p99_ms", "TTFT p99", "ms", LOWER, _latency("ttft_ms", "p99")),
    Measure("tpot_p50_ms", "TPOT p50", "ms", LOWER, _latency("tpot_ms", "p50")),
    Measure("e2el_p50_ms", "E2EL p50", "ms", LOWER, _latency("e2el_ms", "p50")),
    Measure("steady_tok_s", "Steady output throughput", "tok/s", HIGHER, _served("steady_tok_s")),
    Measure("request_s", "Finished requests", "1/s", HIGHER, _served("request_s")),
    Measure("goodput_s", "Goodput under the line's objectives", "1/s", HIGHER, _goodput),
    Measure("host_syncs_per_step", "Host syncs per step", "", LOWER, lambda r: _plain(r.host_syncs_per_step)),
    Measure("host_plan_us", "Host time to plan a step", "µs", LOWER, lambda r: _plain(r.host_plan_us)),
    Measure(
        "kv_capacity_tokens",
        "KV capacity",
        "tokens",
        HIGHER,
        lambda r: _plain(r.kv.capacity_tokens if r.kv else None),
    ),
    Measure(
        "memory_peak_gib",
        "Peak memory",
        "GiB",
        LOWER,
        lambda r: _plain(None if r.memory_peak_bytes is None else r.memory_peak_bytes / GIB),
    ),
    Measure(
        "attention_error",
        "Attention error against fp64",
        "",
        LOWER,
        lambda r: _plain(r.honesty.attention_error if r.honesty else None),
    ),
)


def of_records(records: Sequence[Record]) -> dict[str, Value]:
    """What repeats of one point say together: medians of medians.

    The interval is the envelope of the repeats' 95 % intervals; where a record has none, the range of two or more
    repeats.
    """
    found = {}
    for measure in MEASURES:
        values = [value for value in map(measure.take, records) if value is not None and math.isfinite(value.median)]
        if values:
            found[measure.id] = _joined(values)
    return found


def _joined(values: Sequence[Value]) -> Value:
    middles = [value.median for value in values]
    lows, highs = _known(value.low for value in values), _known(value.high for value in values)
    if not lows and len(middles) > 1:
        lows = highs = middles
    return Value(median(middles), min(lows, default=None), max(highs, default=None))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
