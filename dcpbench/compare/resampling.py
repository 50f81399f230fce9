"""Estimate the error of a statistic from one launch's own samples: a block bootstrap, because neighbouring samples correlate."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Statistic = Callable[[Floats], Floats]  # function that computes a statistic of each row of a matrix

DRAWS = 400
MIN_SAMPLES = 8  # minimum number of samples that show their scatter
MANY = 20_000  # samples above which BATCHES contiguous batches give the same result with fewer copies
BATCHES = 64
MAX_DRAWN_VALUES = 4_000_000  # maximum number of values that are drawn at once


@dataclasses.dataclass(frozen=True, eq=False)
class Error:
    """Hold the error of the logarithm of a statistic, and the degrees of freedom with which it was estimated."""

    variance: float
    df: float
    draws: Floats | None = None  # logarithms for resampled requests; the n-th draw of any launch has the same ones
    samples: int = 0  # number of these requests

    @property
    def of_requests(self) -> bool:
        """Return True if the error is for a different choice of requests; launches with the same requests do not differ by it."""
        return self.draws is not None


def join_variances(a: Error, b: Error) -> list[tuple[float, float]]:
    """Return the variances, with degrees of freedom, of the difference of two launches' logarithms.

    If both served the same requests, these are drawn for both at once: effects of a request on both sides cancel.
    """
    if a.draws is None or b.draws is None or a.samples != b.samples:
        return [(a.variance, a.df), (b.variance, b.df)]
    return [(float((b.draws - a.draws).var(ddof=1)), min(a.df, b.df))]


def compute_block_length(series: Floats) -> int:
    """Return the block length in samples: (√6·ρ / (1 - ρ²))^⅔ · n^⅓, at least 1 and at most n / 4.

    Politis and White, Automatic block-length selection for the dependent bootstrap (2004), for the circular bootstrap
    and a series with autocorrelation ρ, ρ², …; ρ is the correlation of neighbours, taken as 0 if negative.
    """
    n = len(series)
    centred = series - series.mean()
    power = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / power if power > 0 else 0.0
    rho = min(max(rho, 0.0), 0.99)
    best: float = (math.sqrt(6) * rho / (1 - rho**2)) ** (2 / 3) * n ** (1 / 3)
    return max(1, min(round(best), n // 4))


def draw_indices(n: int, length: int, draws: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return the indices of `draws` resampled series, [draws, n], made of blocks that start anywhere and wrap around."""
    blocks = math.ceil(n / length)
    starts = rng.integers(0, n, (draws, blocks, 1))
    return ((starts + np.arange(length)) % n).reshape(draws, -1)[:, :n]


def estimate_error(
    samples: Sequence[float] | Floats, statistic: Statistic, seed: int, *, requests: bool = False
) -> Error | None:
    """Return the error of `statistic` of one launch's samples in their order; None with too few, or if it is not positive.

    With `requests` there is one sample per request, or per window of a run, so that two launches can use the same
    draws; blocks then have the length of `compute_request_block_length`, regardless of the samples. Samples that are not finite are
    left out.
    """
    series = np.asarray(samples, np.float64)
    series = series[np.isfinite(series)]
    if len(series) < MIN_SAMPLES or not series.any():
        return None
    # Over the largest of them no statistic's logarithm scatters otherwise, and no sum overflows.
    series = np.asarray(series / np.abs(series).max(), np.float64)
    if len(series) > MANY:
        return _estimate_by_batches(series, statistic)
    length = compute_request_block_length(len(series)) if requests else compute_block_length(series)
    rng = np.random.default_rng(seed)
    at_once = max(1, MAX_DRAWN_VALUES // len(series))
    found = [
        statistic(series[draw_indices(len(series), length, min(at_once, DRAWS - done), rng)])
        for done in range(0, DRAWS, at_once)
    ]
    return _make_error(np.concatenate(found), len(series) / length - 1, len(series) if requests else 0)


def compute_request_block_length(n: int) -> int:
    """Return the number of neighbouring requests that are drawn together, 2·n^⅓, because they share steps and queues."""
    wanted: float = 2 * n ** (1 / 3)
    return max(1, min(round(wanted), n // 4))


def estimate_pooled_error(groups: Sequence[Floats], q: float, seed: int) -> Error | None:
    """Return the error of the q-quantile of all groups' pooled samples, where groups are drawn instead of samples.

    It applies to gaps between tokens: those of a request are dependent, and neighbouring requests share steps.
    """
    groups = [kept for g in groups if len(kept := g[np.isfinite(g)])]
    if len(groups) < MIN_SAMPLES:
        return None
    n = len(groups)
    values = np.concatenate(groups)
    owners = np.repeat(np.arange(n), [len(g) for g in groups])
    order = np.argsort(values, kind="stable")[:: max(1, len(values) // 200_000)]
    values, owners = values[order], owners[order]
    length = compute_request_block_length(n)
    rng = np.random.default_rng(seed)
    found = []
    for indices in draw_indices(n, length, DRAWS // 2, rng):
        below = np.cumsum(np.bincount(indices, minlength=n)[owners])
        found.append(values[min(int(np.searchsorted(below, q * below[-1])), len(values) - 1)])
    return _make_error(np.array(found), n / length - 1, n)


def make_quantile(q: float) -> Statistic:
    """Return a function for the q-quantile of each row, linear between neighbours; ten times as fast as numpy's for short rows."""

    def compute_rows(rows: Floats) -> Floats:
        ordered = np.sort(rows, axis=1)
        place = (rows.shape[1] - 1) * q
        below = math.floor(place)
        low, high = ordered[:, below], ordered[:, min(below + 1, rows.shape[1] - 1)]
        return np.asarray(low + (high - low) * (place - below), np.float64)

    return compute_rows


def compute_mean(rows: Floats) -> Floats:
    """Return the mean of each row."""
    return np.asarray(rows.mean(axis=1), np.float64)


def _estimate_by_batches(series: Floats, statistic: Statistic) -> Error | None:
    """Return the error from batch means: contiguous batches are nearly independent, and their spread over √batches is the error."""
    size = len(series) // BATCHES
    rows = series[: size * BATCHES].reshape(BATCHES, size)
    error = _make_error(statistic(rows), BATCHES - 1.0)
    return None if error is None else dataclasses.replace(error, variance=error.variance / BATCHES)


def _make_error(values: Floats, df: float, requests: int = 0) -> Error | None:
    """Return the error from draws of a statistic; with `requests` the draws are kept."""
    if not (np.isfinite(values).all() and (values > 0).all()):
        return None
    logs = np.log(values)
    return Error(float(logs.var(ddof=1)), df, logs if requests else None, requests)
