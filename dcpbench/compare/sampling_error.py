"""Estimate the error of a metric by one launch: select the samples behind it, and resample them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.compare import resampling
from dcpbench.errors import DcpbenchError
from dcpbench.records import formulas
from dcpbench.serving.outcome import CANCELLED, FINISHED
from dcpbench.serving.samples import find_samples, read_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.records.metrics import Error, Metric
    from dcpbench.records.record import Record

WINDOWS = 64
"""Number of windows of a served run in which tokens are counted, to estimate the scatter of a rate."""
SMALLEST = 1e-150
"""Lower bound of measured values, and reciprocal of the upper bound; ratios of such values fit into a double."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """Hold the requests of one served record in order of submission; none without a file of samples."""

    times: list[formulas.RequestTimes]
    """Times of requests that have tokens, including those that were cut off."""
    waiting_s: list[float]
    """Submission times of requests that were cut off before their first token."""

    @property
    def finished(self) -> list[formulas.RequestTimes]:
        """Times of requests with a known latency."""
        return [times for times in self.times if times.finished]


NO_REQUESTS = Requests([], [])


def get_comparable(metric: Metric, record: Record, *, sampled: bool) -> float | None:
    """Return the value as it is shown; None if it was not measured or cannot be compared.

    A value of 0 is allowed for counted metrics, which are not `sampled`: a sampled one is compared by its logarithm.
    """
    found = metric.get_value(record)
    try:
        value = math.nan if found is None else float(found) * metric.scale
    except OverflowError:
        return None
    if value == 0:
        return None if sampled else value
    return value if SMALLEST <= value <= 1 / SMALLEST else None


def read_record_requests(record: Record, folder: Path) -> Requests:
    """Read the requests of a served record from the file of samples that it names in its own run's folder.

    Return no requests if there is no file, or if it cannot be read: then the error within a launch is unknown.
    """
    try:
        path = find_samples(folder, record.serve.samples_file) if record.serve else None
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


def estimate_error(
    metric: Metric, kind: Error, record: Record, requests: Requests, seed: int
) -> resampling.Error | None:
    """Return the error of the metric by the record's samples of this kind; None if they are too few."""
    return ERRORS[kind](metric, record, requests, seed)


def _estimate_step_error(metric: Metric, record: Record, _: Requests, seed: int) -> resampling.Error | None:
    samples = record.metrics.step_samples_ms if record.metrics else []
    return resampling.estimate_error(
        [s for s in samples if s > 0], resampling.make_quantile(_get_quantile(metric)), seed
    )


def _estimate_latency_error(metric: Metric, _: Record, requests: Requests, seed: int) -> resampling.Error | None:
    one = formulas.OF_A_REQUEST[metric.latency]
    found = [v for t in requests.finished if (v := one(t)) is not None]
    return resampling.estimate_error(found, resampling.make_quantile(_get_quantile(metric)), seed, requests=True)


def _estimate_gap_error(metric: Metric, _: Record, requests: Requests, seed: int) -> resampling.Error | None:
    return resampling.estimate_pooled_error(
        [formulas.compute_itl_ms(t) for t in requests.finished], _get_quantile(metric), seed
    )


def _get_quantile(metric: Metric) -> float:
    """Return 0.99 for a p99; 0.5, the median, for a metric without statistic."""
    return float(metric.statistic.removeprefix("p") or 50) / 100


def _estimate_token_error(_: Metric, __: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Return the error by tokens in equal windows of the run."""
    times = requests.times
    whole = (min(t.submitted_s for t in times), max(t.end_s for t in times)) if times else None
    return _estimate_rate_error(requests, whole, seed)


def _estimate_steady_token_error(_: Metric, record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Return the error by tokens in equal windows of the steady part of the run."""
    clients = record.point.clients
    steady = (
        formulas.find_steady_window(requests.times, clients, requests.waiting_s) if clients and clients > 0 else None
    )
    return _estimate_rate_error(requests, steady, seed)


def _estimate_rate_error(requests: Requests, span: tuple[float, float] | None, seed: int) -> resampling.Error | None:
    if span is None or not span[1] > span[0]:
        return None
    counts, _ = np.histogram(np.concatenate([np.asarray(t.token_s) for t in requests.times]), WINDOWS, span)
    return resampling.estimate_error(counts.astype(np.float64), resampling.compute_mean, seed, requests=True)


def _estimate_objective_error(_: Metric, record: Record, requests: Requests, seed: int) -> resampling.Error | None:
    """Return the error by whether each request met the objectives."""
    try:
        slo = formulas.validate_objectives(record.serve.slo_ms if record.serve else {})
    except DcpbenchError:
        return None
    met = np.array([formulas.has_met_slo(t, slo) for t in requests.times], np.float64)
    return resampling.estimate_error(met, resampling.compute_mean, seed, requests=True)


ERRORS: dict[Error, Callable[[Metric, Record, Requests, int], resampling.Error | None]] = {
    "steps": _estimate_step_error,
    "requests": _estimate_latency_error,
    "gaps": _estimate_gap_error,
    "tokens": _estimate_token_error,
    "steady tokens": _estimate_steady_token_error,
    "objectives": _estimate_objective_error,
}
"""Function for each kind of error in the catalogue of metrics."""
