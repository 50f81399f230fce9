"""Estimate the error of a metric by one launch: select the samples behind it, and resample them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.compare import resampling
from dcpbench.errors import DcpbenchError
from dcpbench.records import formulas
from dcpbench.serving.outcome import CANCELLED, FAILED, FINISHED
from dcpbench.serving.samples import find_samples, read_samples

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.metrics import Error, Metric
    from dcpbench.records.record import Record

WINDOWS = 64  # number of windows of a served run in which tokens are counted, to estimate the scatter of a rate
SMALLEST = 1e-150  # of values, and reciprocal of the largest: ratios of these fit into a double


@dataclasses.dataclass(frozen=True)
class Requests:
    """Hold the requests of one served record in order of submission; none without a file of samples."""

    times: list[formulas.RequestTimes]  # times of requests that have tokens, including those that were cut off
    waiting: list[tuple[float, tuple[int, int] | None]]  # submission and turn of requests cut off before a token

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
                formulas.RequestTimes(
                    row.submitted_s,
                    row.token_s,
                    finished=row.outcome == FINISHED,
                    failed=row.outcome == FAILED,
                    turn=row.session_turn,
                )
                for row in rows
                if row.token_s
            ],
            waiting=[
                (row.submitted_s, row.session_turn) for row in rows if row.outcome == CANCELLED and not row.token_s
            ],
        )
    except (DcpbenchError, TypeError, ValueError):
        return NO_REQUESTS


def estimate_error(
    metric: Metric, kind: Error, record: Record, requests: Requests, seed: int
) -> resampling.Error | None:
    """Return the error of the metric by the record's samples of this kind; None if they are too few."""
    level = float(metric.statistic.removeprefix("p") or 50) / 100  # 0.5, the median, for a metric without statistic
    quantile, times = resampling.make_quantile(level), requests.times
    if kind == "steps":
        samples = record.metrics.step_samples_ms if record.metrics else []
        return resampling.estimate_error([s for s in samples if s > 0], quantile, seed)
    if kind == "requests":
        one = formulas.OF_A_REQUEST[metric.latency]
        found = [v for t in requests.finished if (v := one(t)) is not None]
        return resampling.estimate_error(found, quantile, seed, requests=True)
    if kind == "gaps":
        return resampling.estimate_pooled_error([formulas.compute_itl_ms(t) for t in requests.finished], level, seed)
    if kind == "objectives":  # whether each request met them
        try:
            slo = formulas.validate_objectives(record.serve.slo_ms if record.serve else {})
        except DcpbenchError:
            return None
        met = [float(formulas.has_met_slo(t, slo)) for t in times]
        return resampling.estimate_error(met, resampling.compute_mean, seed, requests=True)
    span, clients = None, record.point.clients
    if kind == "tokens" and times:  # in equal windows of the run
        span = min(t.submitted_s for t in times), max(t.end_s for t in times)
    elif kind == "steady tokens" and clients and clients > 0:  # or of its steady part
        span = formulas.find_steady_window(times, clients, requests.waiting)
    if span is None or not span[1] > span[0]:
        return None
    counts, _ = np.histogram(np.concatenate([np.asarray(t.token_times_s) for t in times]), WINDOWS, span)
    return resampling.estimate_error(counts.astype(np.float64), resampling.compute_mean, seed, requests=True)
