"""Compute the reported metrics by pure functions; each docstring holds the formula and the unit. No torch.

Times of a request: `t0` submitted, `t1` first output token, `tn` last output token, `n` output tokens. A request that
was cut off at the end of its run has tokens, which count as output, but no latency, because its full duration is
unknown.

numpy is imported when a value is computed, so that importing a name from this module stays fast.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.names import OBJECTIVES
from dcpbench.records.record import Emulated, Latencies, Metrics, Percentiles
from dcpbench.records.stats import PERCENTILES, compute_median_interval, compute_min_samples, compute_percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

STEADY_SHARE = 0.95  # share of the target concurrency that must be in flight for a moment to count as steady
TURNAROUND_S = 1e-3  # longest time in s from a client's last token to its next request that leaves no gap
GAPS_PER_MISS = 100  # number of gaps of a request per gap that may miss an ITL objective


@dataclasses.dataclass(frozen=True, eq=False)
class RequestTimes:
    """Hold the times at which a request was submitted and each of its output tokens came, in s of one clock.

    Raise UsageError for no tokens and for decreasing times.
    """

    submitted_s: float
    token_times_s: Sequence[float] | Floats  # one per token, not per stream chunk; kept as a float64 array
    finished: bool = True  # false if the request was cut off or failed: its tokens count, its latencies do not
    failed: bool = False  # true if its server did not answer it to its end
    turn: tuple[int, int] | None = None  # session and turn; a client sends all requests of a turn (sub-agents) at once

    def __post_init__(self) -> None:
        import numpy as np

        times = np.asarray(self.token_times_s, np.float64)
        object.__setattr__(self, "token_times_s", times)
        if not len(times):
            raise UsageError("a request without output tokens has no latency; count it as failed instead.")
        everything = np.concatenate([[self.submitted_s], times])
        if not np.isfinite(everything).all() or (np.diff(everything) < 0).any():
            raise UsageError(
                "a request's times must be finite and must not run backwards; check that one clock is used."
            )

    @property
    def end_s(self) -> float:
        """Time of the last token, `tn`."""
        return float(self.token_times_s[-1])


def validate_objectives(slo: Mapping[str, float]) -> dict[str, float]:
    """Return validated service level objectives in ms, such as `{"ttft": 500, "itl": 50}`.

    Raise UsageError for other names and for limits of 0 or less.
    """
    for name, limit in slo.items():
        if name not in OBJECTIVES:
            raise UsageError(f"there is no objective {name}; use {', '.join(OBJECTIVES)}, as in --slo ttft=500.")
        if not limit > 0:
            raise UsageError(f"the objective {name}={limit:g} cannot be met; give milliseconds above 0.")
    return dict(slo)


def compute_token_times(chunk_times_s: Sequence[float], chunk_tokens: Sequence[int]) -> list[float]:
    """Return the arrival time of each token of a stream that has several tokens per chunk. Unit: s.

    Tokens of a chunk are spread evenly over the gap since the chunk before, as in SGLang's bench_serving; vLLM's
    benchmark counts that as one gap, regardless of the number of tokens. The last token of a chunk has the chunk's own
    time, and so have all tokens of the first chunk. With one token per chunk these are the times of the chunks.
    """
    found: list[float] = []
    for i, (end, count) in enumerate(zip(chunk_times_s, chunk_tokens, strict=True)):
        start = chunk_times_s[i - 1] if i else end
        found += [start + (end - start) * k / count for k in range(1, count)]
        found.append(end)
    return found


def compute_ttft_ms(request: RequestTimes) -> float:
    """Time to first token: t1 - t0, queueing included. Unit: ms."""
    return (float(request.token_times_s[0]) - request.submitted_s) * 1e3


def compute_itl_ms(request: RequestTimes) -> Floats:
    """Return the inter-token latencies: the n - 1 gaps between consecutive output tokens. Unit: ms. Pool them."""
    import numpy as np

    return np.diff(request.token_times_s) * 1e3


def compute_tpot_ms(request: RequestTimes) -> float | None:
    """Time per output token: (tn - t1) / (n - 1). Unit: ms. None if n < 2."""
    gaps = len(request.token_times_s) - 1
    return (request.end_s - float(request.token_times_s[0])) / gaps * 1e3 if gaps else None


def compute_e2el_ms(request: RequestTimes) -> float:
    """End-to-end latency: tn - t0. Unit: ms."""
    return (request.end_s - request.submitted_s) * 1e3


OF_A_REQUEST = {"ttft": compute_ttft_ms, "tpot": compute_tpot_ms, "e2el": compute_e2el_ms}  # one number per request


def summarize_latencies(samples: Sequence[float] | Floats) -> Latencies:
    """Return mean and percentiles in the unit of the samples; percentiles are None where there are too few.

    p50 needs 1 sample, p90 64, p95 130, p99 662 (stats.compute_min_samples), linear between neighbours. Raise UsageError for
    NaN and infinite samples.
    """
    import numpy as np

    values = np.asarray(samples, np.float64)
    if not len(values):
        return Latencies()
    if not np.isfinite(values).all():
        raise UsageError("samples hold NaN or infinity; a sample that was not measured must be left out.")
    known = [p for p in PERCENTILES if len(values) >= compute_min_samples(p)]
    found = {f"p{p}": float(v) for p, v in zip(known, np.percentile(values, known), strict=True)}
    return Latencies(mean=float(values.mean()), samples=len(values), **found)


def compute_wall_s(requests: Sequence[RequestTimes]) -> float:
    """Return the wall time of a run: last token - first submission. Unit: s. Raise UsageError if it is empty or 0."""
    if not requests:
        raise UsageError("no finished requests: throughput is not defined.")
    wall = max(r.end_s for r in requests) - min(r.submitted_s for r in requests)
    if wall <= 0:
        raise UsageError("the run took no time; check the clock.")
    return wall


def count_max_in_flight(spans: Iterable[tuple[float, float]]) -> int:
    """Return the maximum number of spans (start, end) that overlap; one that starts as another ends does not overlap it."""
    events = [event for start, end in spans for event in ((start, 1), (end, -1))]
    return max(itertools.accumulate((change for _, change in sorted(events)), initial=0))


def find_steady_window(
    requests: Sequence[RequestTimes],
    concurrency: int,
    waiting: Sequence[tuple[float, tuple[int, int] | None]] = (),
) -> tuple[float, float] | None:
    """Return the longest time in which at least 95 % of `concurrency` clients have a request in flight, as (start, end) in s.

    A request is in flight from t0 to tn, or to the run's last token if the run cut it off. `waiting` has t0 and turn of
    requests that were cut off before their first token. One that starts at the moment another ends leaves no gap, and
    neither does a client that takes up to TURNAROUND_S to send its next request. None if the target is never reached.
    Raise UsageError for a concurrency below 1.
    """
    if concurrency < 1:
        raise UsageError(f"a concurrency of {concurrency} cannot be reached; give at least 1.")
    last = max((r.end_s for r in requests), default=0.0)
    times: dict[object, list[float]] = {}  # by client's turn
    for r in requests:
        times.setdefault(r.turn or object(), []).extend((r.submitted_s, r.end_s if r.finished or r.failed else last))
    for submitted_s, turn in waiting:
        if submitted_s < last:
            times.setdefault(turn or object(), []).extend((submitted_s, last))
    events = sorted([(min(of), -1) for of in times.values()] + [(max(of), 1) for of in times.values()])
    windows: list[tuple[float, float]] = []
    start: float | None = None
    in_flight = 0
    for time, change in events:
        in_flight -= change
        if in_flight >= STEADY_SHARE * concurrency:
            start = time if start is None else start
        elif start is not None:
            if windows and start - windows[-1][1] <= TURNAROUND_S:
                start = windows.pop()[0]
            windows.append((start, time))
            start = None
    return max((w for w in windows if w[1] > w[0]), key=lambda w: w[1] - w[0], default=None)


def compute_tok_s_within(requests: Sequence[RequestTimes], window: tuple[float, float]) -> float:
    """Return the output tokens in (start, end] / its length. A token on the border of two windows counts once.

    Unit: tok/s.
    """
    import numpy as np

    start, end = window
    return sum(int(np.diff(np.searchsorted(r.token_times_s, window, "right"))[0]) for r in requests) / (end - start)


def compute_tok_s_per_gpu(tok_s: float, gpus: int) -> float:
    """Return throughput per GPU: tok/s / GPUs. DCP and DP add no GPUs. Unit: tok/s/GPU. Raise UsageError for less than one GPU."""
    if gpus < 1:
        raise UsageError(f"a layout has at least one GPU, not {gpus}.")
    return tok_s / gpus


def compute_tok_s_per_user(median_tpot_ms: float) -> float:
    """Return the rate that one user sees: 1000 / median TPOT in ms or, without prompts, 1000 / step time. Unit: tok/s/user.

    Raise UsageError if the TPOT is not positive.
    """
    if not median_tpot_ms > 0:
        raise UsageError(f"a median TPOT of {median_tpot_ms:g} ms gives no rate; check the samples.")
    return 1e3 / median_tpot_ms


def has_met_slo(request: RequestTimes, slo: Mapping[str, float]) -> bool:
    """Return True if a finished request meets all objectives in `slo`; a request that was cut off meets none.

    TTFT, TPOT and E2EL are each one number per request. An ITL objective is met if at least 99 of 100 gaps of the
    request are within it; below 100 gaps, all of them must be. That is stricter than AIPerf, where an ITL objective
    bounds the mean gap of a request: that is TPOT here, and it hides a stall of seconds. vLLM has no ITL objective. One
    stall in 100 gaps passes here, too: bound it with E2EL. A request with one token has neither a gap nor a TPOT, and
    cannot miss these objectives.
    """
    if not request.finished:
        return False
    for name, limit in slo.items():
        if name == "itl":
            gaps = compute_itl_ms(request)
            if int((gaps > limit).sum()) * GAPS_PER_MISS > len(gaps):
                return False
        elif (measured := OF_A_REQUEST[name](request)) is not None and not measured <= limit:
            return False
    return True


def compute_goodput(requests: Sequence[RequestTimes], slo: Mapping[str, float]) -> float:
    """Return goodput: requests that meet all objectives in `slo` / wall time of the run. Unit: requests/s.

    Raise UsageError as `compute_wall_s` does.
    """
    return sum(has_met_slo(r, slo) for r in requests) / compute_wall_s(requests)


def compute_percentiles(samples: Sequence[float]) -> Percentiles:
    """Return p50, p90, p95 and p99 in the unit of the samples; None with too few (stats.compute_min_samples)."""
    p50, p90, p95, p99 = (compute_percentile(samples, p) for p in PERCENTILES)
    return Percentiles(p50=p50, p90=p90, p95=p95, p99=p99, samples=len(samples))


def compute_forecast_error(emulated: Emulated, step_us: float) -> tuple[float, float]:
    """Return the shares by which a step of this length may be shorter and longer.

    They combine the error of the communication model with the differences between ranks.
    """
    comm_us = emulated.comm_us
    return (
        (comm_us - emulated.comm_low_us) / step_us + emulated.ranks_low,
        (emulated.comm_high_us - comm_us) / step_us + emulated.ranks_high,
    )


def compute_decode_metrics(
    step_samples_ms: list[float],
    concurrency: int,
    tp: int,
    relative_error: tuple[float, float] = (0.0, 0.0),
    tokens: float = 1.0,
) -> Metrics:
    """Return the metrics of the workload `decode`, in which every request gets `tokens` tokens on average from every step.

    ITL = step time, with one sample per STEP, because the tokens of one step are not independent; further tokens of a step
    come with gaps of 0. Output throughput = concurrency · tokens / step time, and its interval is that of the step time
    inverted. `relative_error` holds the shares by which the
    step may be shorter and longer than the timed one, in addition to scatter, if part of it was modelled. Raise
    UsageError for no samples, for samples that are not positive and finite, and for a concurrency or tp below 1.
    """
    if concurrency < 1:
        raise UsageError(f"a step of {concurrency} requests makes no tokens; give at least 1.")
    if any(not ms > 0 for ms in step_samples_ms):
        raise UsageError("a step takes more than 0 ms; leave out samples that were not measured.")
    step = compute_median_interval(step_samples_ms)
    shorter, longer = (share * step.median for share in relative_error)
    step = msgspec.structs.replace(step, low=step.low - shorter, high=step.high + longer)
    tok_s = msgspec.structs.replace(
        step,
        median=concurrency * tokens * 1e3 / step.median,
        low=concurrency * tokens * 1e3 / step.high,
        high=concurrency * tokens * 1e3 / step.low,
    )
    return Metrics(
        step_ms=step,
        itl_ms=compute_percentiles(step_samples_ms + [0.0] * round(len(step_samples_ms) * (tokens - 1))),
        output_tok_s=tok_s,
        output_tok_s_per_gpu=compute_tok_s_per_gpu(tok_s.median, tp),
        tok_s_per_user=compute_tok_s_per_user(step.median / tokens),
        step_samples_ms=list(step_samples_ms),
    )
