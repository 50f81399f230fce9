"""What is compared of a point: each metric with its direction, where its value stands, and which samples lie below."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.compare import resampling
from dcpbench.errors import DcpbenchError
from dcpbench.points.memory import GIB
from dcpbench.records import formulas
from dcpbench.serving.samples import read_samples, samples_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dcpbench.compare.model import Workload
    from dcpbench.records.record import Record

WINDOWS = 64
"""Of a served run, in each of which its tokens are counted: how a rate scatters."""
SMALLEST = 1e-150
"""Nothing that is measured is smaller, or larger than one by this; ratios of such numbers fit into a double."""


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Requests of one served record, in order of submission; empty without a file of samples."""

    times: list[formulas.RequestTimes]

    @property
    def finished(self) -> list[formulas.RequestTimes]:
        """Those whose latency is known."""
        return [t for t in self.times if t.finished]


@dataclasses.dataclass(frozen=True)
class Measure:
    """One metric. Names are those of --fail-on and --metric."""

    name: str
    title: str
    unit: str
    value: Callable[[Record], float | None]
    error: Callable[[Record, Requests, int], resampling.Error | None] | None = None
    """How well one record knows it; None for what is counted and not sampled."""
    higher_is_better: bool = False
    absolute: bool = False
    """Small whole numbers, whose ratio says little."""

    @property
    def sampled(self) -> bool:
        """Whether a test is needed to tell two values apart."""
        return self.error is not None


def of(record: Record, measure: Measure) -> float | None:
    """The value as a number that can be compared; None where it was not measured or cannot be."""
    found = measure.value(record)
    try:
        value = math.nan if found is None else float(found)
    except OverflowError:
        return None
    if value == 0:
        return None if measure.sampled else value
    return value if SMALLEST <= value <= 1 / SMALLEST else None


def requests_of(record: Record, folder: Path) -> Requests:
    """The requests of a served record, from the file of samples that it names in its own run's folder.

    Empty where there is none, or where it cannot be read: then what a launch knows by itself is not known.
    """
    try:
        path = samples_path(folder, record.serve.samples_file) if record.serve else None
        if path is None:
            return Requests([])
        rows = sorted(read_samples(path), key=lambda row: row.submitted_s)
        times = [
            formulas.RequestTimes(row.submitted_s, row.token_s, finished=row.outcome == "finished")
            for row in rows
            if row.token_s
        ]
    except (DcpbenchError, TypeError, ValueError):
        return Requests([])
    return Requests(times)


def _steps(q: float) -> Callable[[Record, Requests, int], resampling.Error | None]:
    def error(record: Record, _: Requests, seed: int) -> resampling.Error | None:
        samples = record.metrics.step_samples_ms if record.metrics else []
        return resampling.error_of([s for s in samples if s > 0], resampling.quantile(q), seed)

    return error


def _latency(name: str, q: float) -> Callable[[Record, Requests, int], resampling.Error | None]:
    one = {"ttft": formulas.ttft_ms, "tpot": formulas.tpot_ms, "e2el": formulas.e2el_ms}[name]

    def error(_: Record, requests: Requests, seed: int) -> resampling.Error | None:
        found = [v for t in requests.finished if (v := one(t)) is not None]
        return resampling.error_of_requests(found, resampling.quantile(q), seed)

    return error


def _gaps(q: float) -> Callable[[Record, Requests, int], resampling.Error | None]:
    def error(_: Record, requests: Requests, seed: int) -> resampling.Error | None:
        return resampling.error_of_pooled([formulas.itl_ms(t) for t in requests.finished], q, seed)

    return error


def _rate(record: Record, requests: Requests, seed: int, *, steady: bool = False) -> resampling.Error | None:
    """Tokens in equal windows of the run, or of its steady part."""
    if not requests.times:
        return None
    span = (min(t.submitted_s for t in requests.times), max(t.end_s for t in requests.times))
    if steady:
        clients = record.point.clients
        found = formulas.steady_window(requests.times, clients) if clients and clients > 0 else None
        if found is None:
            return None
        span = found
    if not span[1] > span[0]:
        return None
    counts, _ = np.histogram(np.concatenate([np.asarray(t.token_s) for t in requests.times]), WINDOWS, span)
    return resampling.error_of_requests(counts.astype(np.float64), resampling.mean, seed)


def _steady_rate(record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    return _rate(record, requests, seed, steady=True)


def _meets(record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Whether each request met the objectives."""
    try:
        slo = formulas.Slo.of(record.serve.slo_ms if record.serve else {})
    except DcpbenchError:
        return None
    met = np.array([formulas.meets(t, slo) for t in requests.times], np.float64)
    return resampling.error_of_requests(met, resampling.mean, seed)


def _field(*names: str) -> Callable[[Record], float | None]:
    """A value of the record by its names from the outside in; None where a part of it was not measured."""

    def value(record: Record) -> float | None:
        found: object = record
        for name in names:
            found = getattr(found, name, None)
        return found if isinstance(found, int | float) else None

    return value


def _gib(record: Record) -> float | None:
    return None if record.memory_peak_bytes is None else record.memory_peak_bytes / GIB


DECODE = (
    Measure("step_time", "step time", "ms", _field("metrics", "step_ms", "median"), _steps(0.5)),
    Measure("itl_p90", "ITL p90", "ms", _field("metrics", "itl_ms", "p90"), _steps(0.9)),
    Measure("itl_p99", "ITL p99", "ms", _field("metrics", "itl_ms", "p99"), _steps(0.99)),
)
SERVE = (
    Measure("tok_s", "output tok/s", "tok/s", _field("serve", "output_tok_s"), _rate, higher_is_better=True),
    Measure(
        "steady_tok_s", "steady tok/s", "tok/s", _field("serve", "steady_tok_s"), _steady_rate, higher_is_better=True
    ),
    Measure("ttft_p50", "TTFT p50", "ms", _field("serve", "ttft_ms", "p50"), _latency("ttft", 0.5)),
    Measure("ttft_p99", "TTFT p99", "ms", _field("serve", "ttft_ms", "p99"), _latency("ttft", 0.99)),
    Measure("itl_p50", "ITL p50", "ms", _field("serve", "itl_ms", "p50"), _gaps(0.5)),
    Measure("itl_p99", "ITL p99", "ms", _field("serve", "itl_ms", "p99"), _gaps(0.99)),
    Measure("tpot_p50", "TPOT p50", "ms", _field("serve", "tpot_ms", "p50"), _latency("tpot", 0.5)),
    Measure("e2el_p50", "E2EL p50", "ms", _field("serve", "e2el_ms", "p50"), _latency("e2el", 0.5)),
    Measure("goodput", "goodput", "req/s", _field("serve", "goodput_s"), _meets, higher_is_better=True),
)
COUNTED = (
    Measure("kv_capacity", "KV capacity", "tokens", _field("kv", "capacity_tokens"), higher_is_better=True),
    Measure("memory", "memory peak", "GiB", _gib),
    Measure("syncs", "host syncs", "/step", _field("host_syncs_per_step"), absolute=True),
)
ALIASES = {
    "slower": {"decode": "step_time", "serve": "tok_s"},
    "tok_s": {"decode": "step_time", "serve": "tok_s"},
    "itl_p50": {"decode": "step_time", "serve": "itl_p50"},
}
"""In `decode` throughput is concurrency / step time, and the median ITL is the step time: one test, three names."""
NAMES = tuple(dict.fromkeys([*ALIASES, *(m.name for m in (*DECODE, *SERVE, *COUNTED))]))
"""Everything that options may name."""


def measures_of(workload: Workload, names: Sequence[str] = ()) -> list[Measure]:
    """What is compared of a point of this workload; with names only these."""
    wanted = {real_name(name, workload) for name in names}
    return [m for m in (*(DECODE if workload == "decode" else SERVE), *COUNTED) if not wanted or m.name in wanted]


def real_name(name: str, workload: Workload) -> str:
    """The metric behind a name of ours."""
    return ALIASES.get(name, {}).get(workload, name)
