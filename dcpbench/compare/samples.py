"""How well one launch knows a metric: which of its samples lie below it, and how these are resampled."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.compare import resampling
from dcpbench.errors import DcpbenchError
from dcpbench.records import formulas
from dcpbench.serving.outcome import CANCELLED, FINISHED
from dcpbench.serving.samples import read_samples, samples_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.records.metrics import Error, Metric
    from dcpbench.records.record import Record

WINDOWS = 64
"""Of a served run, in each of which its tokens are counted: how a rate scatters."""
SMALLEST = 1e-150
"""Nothing that is measured is smaller, or larger than one by this; ratios of such numbers fit into a double."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests of one served record, in order of submission; none without a file of samples."""

    times: list[formulas.RequestTimes]
    """Times of requests that have tokens, also of those that were cut off."""
    waiting_s: list[float]
    """Submission of requests that were cut off before their first token."""

    @property
    def finished(self) -> list[formulas.RequestTimes]:
        """Times of requests whose latency is known."""
        return [times for times in self.times if times.finished]


NO_REQUESTS = Requests([], [])


def comparable(metric: Metric, record: Record, *, sampled: bool) -> float | None:
    """The value as it is shown, where it can be compared; None where it was not measured or cannot be.

    A 0 can be where things are counted, and not `sampled`: a sampled one is compared by its logarithm.
    """
    found = metric.value(record)
    try:
        value = math.nan if found is None else float(found) * metric.scale
    except OverflowError:
        return None
    if value == 0:
        return None if sampled else value
    return value if SMALLEST <= value <= 1 / SMALLEST else None


def requests_of(record: Record, folder: Path) -> Requests:
    """Read the requests of a served record from the file of samples that it names in its own run's folder.

    Return no requests if there is no file, or if it cannot be read: then the error within a launch is unknown.
    """
    try:
        path = samples_path(folder, record.serve.samples_file) if record.serve else None
        if path is None:
            return NO_REQUESTS
        rows = sorted(read_samples(path), key=lambda row: row.submitted_s)
        return Requests(
            times=[
                formulas.RequestTimes(row.submitted_s, row.token_s, finished=row.outcome == FINISHED)
                for row in rows
                if row.token_s
            ],
            waiting_s=[row.submitted_s for row in rows if row.outcome == CANCELLED and not row.token_s],
        )
    except (DcpbenchError, TypeError, ValueError):
        return NO_REQUESTS


def error_of(metric: Metric, kind: Error, record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """How well the record's launch knows the metric, by its samples of this kind; None where they are too few."""
    return ERRORS[kind](metric, record, requests, seed)


def _steps(metric: Metric, record: Record, _: Requests, seed: int) -> resampling.Error | None:
    samples = record.metrics.step_samples_ms if record.metrics else []
    return resampling.error_of([s for s in samples if s > 0], resampling.quantile(_quantile(metric)), seed)


def _latencies(metric: Metric, _: Record, requests: Requests, seed: int) -> resampling.Error | None:
    one = formulas.OF_A_REQUEST[metric.latency]
    found = [v for t in requests.finished if (v := one(t)) is not None]
    return resampling.error_of(found, resampling.quantile(_quantile(metric)), seed, requests=True)


def _gaps(metric: Metric, _: Record, requests: Requests, seed: int) -> resampling.Error | None:
    return resampling.error_of_pooled([formulas.itl_ms(t) for t in requests.finished], _quantile(metric), seed)


def _quantile(metric: Metric) -> float:
    """0.99 of a p99; the median of what has no statistics."""
    return float(metric.statistic.removeprefix("p") or 50) / 100


def _tokens(_: Metric, __: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Return the error by tokens in equal windows of the run."""
    times = requests.times
    whole = (min(t.submitted_s for t in times), max(t.end_s for t in times)) if times else None
    return _rate(requests, whole, seed)


def _steady_tokens(_: Metric, record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Return the error by tokens in equal windows of the steady part of the run."""
    clients = record.point.clients
    steady = formulas.steady_window(requests.times, clients, requests.waiting_s) if clients and clients > 0 else None
    return _rate(requests, steady, seed)


def _rate(requests: Requests, span: tuple[float, float] | None, seed: int) -> resampling.Error | None:
    if span is None or not span[1] > span[0]:
        return None
    counts, _ = np.histogram(np.concatenate([np.asarray(t.token_s) for t in requests.times]), WINDOWS, span)
    return resampling.error_of(counts.astype(np.float64), resampling.mean, seed, requests=True)


def _objectives(_: Metric, record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Return the error by whether each request met the objectives."""
    try:
        slo = formulas.objectives(record.serve.slo_ms if record.serve else {})
    except DcpbenchError:
        return None
    met = np.array([formulas.meets(t, slo) for t in requests.times], np.float64)
    return resampling.error_of(met, resampling.mean, seed, requests=True)


ERRORS: dict[Error, Callable[[Metric, Record, Requests, int], resampling.Error | None]] = {
    "steps": _steps,
    "requests": _latencies,
    "gaps": _gaps,
    "tokens": _tokens,
    "steady tokens": _steady_tokens,
    "objectives": _objectives,
}
"""By the kind of error that the catalogue of metrics names."""
