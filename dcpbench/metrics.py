"""What dcpbench reports, as pure functions: the formula and the unit of each are in its docstring. No torch.

Times of a request: `t0` submitted, `t1` first output token, `tn` last output token, `n` output tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.records import Interval, Metrics, Percentiles
from dcpbench.stats import median_interval, percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

STEADY_SHARE = 0.95
"""Share of the target concurrency that must be in flight for a moment to count as steady."""


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """When one finished request was submitted and when each of its output tokens came, in seconds of one clock.

    Raises UsageError for no tokens and for times that run backwards.
    """

    submitted_s: float
    token_s: tuple[float, ...]
    """One time per output token, not per stream chunk."""

    def __post_init__(self) -> None:
        if not self.token_s:
            raise UsageError("a request without output tokens has no latency; count it as failed instead.")
        times = (self.submitted_s, *self.token_s)
        if not all(map(math.isfinite, times)) or any(b < a for a, b in itertools.pairwise(times)):
            raise UsageError(
                "a request's times must be finite and must not run backwards; check that one clock is used."
            )

    @property
    def end_s(self) -> float:
        """Time of the last token, `tn`."""
        return self.token_s[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slo:
    """Service level objectives, in ms; None = not asked for."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


def ttft_ms(request: RequestTimes) -> float:
    """Time to first token: t1 - t0, queueing included. Unit: ms."""
    return (request.token_s[0] - request.submitted_s) * 1e3


def itl_ms(request: RequestTimes) -> list[float]:
    """Inter-token latencies: each gap between consecutive output tokens, n - 1 of them. Unit: ms. Pool them."""
    return [(b - a) * 1e3 for a, b in itertools.pairwise(request.token_s)]


def tpot_ms(request: RequestTimes) -> float | None:
    """Time per output token: (tn - t1) / (n - 1). Unit: ms. None if n < 2."""
    gaps = len(request.token_s) - 1
    return (request.end_s - request.token_s[0]) / gaps * 1e3 if gaps else None


def e2el_ms(request: RequestTimes) -> float:
    """End-to-end latency: tn - t0. Unit: ms."""
    return (request.end_s - request.submitted_s) * 1e3


def wall_s(requests: Sequence[RequestTimes]) -> float:
    """Wall time of a run: last token - first submission. Unit: s. Raises UsageError for no requests or no time."""
    if not requests:
        raise UsageError("no finished requests: throughput is not defined.")
    wall = max(r.end_s for r in requests) - min(r.submitted_s for r in requests)
    if wall <= 0:
        raise UsageError("the run took no time; check the clock.")
    return wall


def output_tok_s(requests: Sequence[RequestTimes]) -> float:
    """Output throughput: output tokens / wall time of the run, ramp and drain included. Unit: tok/s.

    Raises UsageError as `wall_s` does.
    """
    return sum(len(r.token_s) for r in requests) / wall_s(requests)


def steady_window(requests: Sequence[RequestTimes], concurrency: int) -> tuple[float, float] | None:
    """Longest time in which at least 95 % of `concurrency` requests are in flight, as (start, end) in s.

    A request is in flight from t0 to tn. One that starts at the moment another ends leaves no gap. None if the target
    is never reached. Raises UsageError for a concurrency below 1.
    """
    if concurrency < 1:
        raise UsageError(f"a concurrency of {concurrency} cannot be reached; give at least 1.")
    events = sorted([(r.submitted_s, -1) for r in requests] + [(r.end_s, 1) for r in requests])
    best: tuple[float, float] | None = None
    start: float | None = None
    flying = 0
    for time, change in events:
        flying -= change
        if flying >= STEADY_SHARE * concurrency:
            start = time if start is None else start
        elif start is not None:
            if time > start and (best is None or time - start > best[1] - best[0]):
                best = (start, time)
            start = None
    return best


def steady_tok_s(requests: Sequence[RequestTimes], concurrency: int) -> float | None:
    """Steady throughput: output tokens in the steady window / its length. Unit: tok/s. None without such a window.

    Tokens count in (start, end], so that a token on the border of two windows counts once. Raises UsageError for a
    concurrency below 1.
    """
    window = steady_window(requests, concurrency)
    if window is None:
        return None
    start, end = window
    return sum(start < t <= end for r in requests for t in r.token_s) / (end - start)


def per_gpu(tok_s: float, tp: int) -> float:
    """Throughput per GPU: tok/s / tp. DCP and DP add no GPUs. Unit: tok/s/GPU. Raises UsageError for tp < 1."""
    if tp < 1:
        raise UsageError(f"a layout has at least one GPU, not tp={tp}.")
    return tok_s / tp


def tok_s_per_user(median_itl_ms: float) -> float:
    """What one user sees: 1000 / median ITL in ms. Unit: tok/s/user. Raises UsageError unless the ITL is positive."""
    if not median_itl_ms > 0:
        raise UsageError(f"a median ITL of {median_itl_ms:g} ms gives no rate; check the samples.")
    return 1e3 / median_itl_ms


def meets(request: RequestTimes, slo: Slo) -> bool:
    """Whether a request meets every objective given. A request with one token has no TPOT and cannot miss it."""
    measured = (ttft_ms(request), tpot_ms(request), e2el_ms(request))
    limits = (slo.ttft_ms, slo.tpot_ms, slo.e2el_ms)
    return all(v is None or limit is None or v <= limit for v, limit in zip(measured, limits, strict=True))


def goodput(requests: Sequence[RequestTimes], slo: Slo) -> float:
    """Goodput: requests that meet every SLO given / wall time of the run. Unit: requests/s.

    Raises UsageError as `wall_s` does.
    """
    return sum(meets(r, slo) for r in requests) / wall_s(requests)


def percentiles(samples: Sequence[float]) -> Percentiles:
    """p50, p90, p95 and p99 in the unit of the samples; None where there are too few (stats.least_samples)."""
    p50, p90, p95, p99 = (percentile(samples, p) for p in (50, 90, 95, 99))
    return Percentiles(p50=p50, p90=p90, p95=p95, p99=p99, samples=len(samples))


def decode_metrics(step_samples_ms: list[float], concurrency: int, tp: int) -> Metrics:
    """Metrics of the workload `decode`, in which every request gets one token from every step.

    ITL = step time, one sample per STEP: the tokens of one step are not independent. Output throughput =
    concurrency / step time, its interval that of the step time turned over. Raises UsageError for no samples, for
    samples that are not positive and finite, and for a concurrency or tp below 1.
    """
    if concurrency < 1:
        raise UsageError(f"a step of {concurrency} requests makes no tokens; give at least 1.")
    if any(not ms > 0 for ms in step_samples_ms):
        raise UsageError("a step takes more than 0 ms; leave out samples that were not measured.")
    step = median_interval(step_samples_ms)
    tok_s = Interval(
        median=concurrency * 1e3 / step.median,
        low=concurrency * 1e3 / step.high,
        high=concurrency * 1e3 / step.low,
        samples=step.samples,
    )
    return Metrics(
        step_ms=step,
        itl_ms=percentiles(step_samples_ms),
        output_tok_s=tok_s,
        output_tok_s_per_gpu=per_gpu(tok_s.median, tp),
        tok_s_per_user=tok_s_per_user(step.median),
        step_samples_ms=list(step_samples_ms),
    )
