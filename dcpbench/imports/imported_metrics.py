"""Compute the metrics of an imported result from its requests if the file has them, else from the tool's own summary."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.errors import RecordsError
from dcpbench.imports.result import MIN_CHUNK_TOKENS
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.names import CLOSED
from dcpbench.records import formulas
from dcpbench.records.record import ServeMetrics
from dcpbench.serving.outcome import FINISHED, REQUESTS_FAILED, Row, find_warnings

if TYPE_CHECKING:
    from dcpbench.imports.result import Details, Result

SUMMARY_ONLY, CHUNK_GAPS, NOMINAL = "summary_only", "chunk_gaps", "nominal_lengths"  # warnings of imports


def compute_metrics(result: Result, gpus: int) -> tuple[ServeMetrics, list[str]]:
    """Return the metrics of a result and its warnings; what the file does not contain is None. `gpus` is 0 if unknown.

    With an entry per request every definition is that of docs/metrics.md. The wall time is from the first submission to
    the last token if requests have a start, else the tool's. If chunks hold several tokens, tok/s per user comes from
    TPOT. Raise RecordsError if no time passed.
    """
    details = result.details
    chunked = result.several_tokens or (count_chunk_tokens(result) or 1.0) >= MIN_CHUNK_TOKENS
    if details is not None:
        chunked |= details.has_chunk_gaps()
    found = _fill_metrics(result if details is None else _summarize_requests(result, details), gpus)
    holds = {REQUESTS_FAILED: bool(result.failed), SUMMARY_ONLY: details is None, CHUNK_GAPS: chunked}
    warnings = [warning for warning, is_set in holds.items() if is_set]
    return found, list(dict.fromkeys([*warnings, *(find_warnings(found) if details else ())]))


def count_chunk_tokens(result: Result) -> float | None:
    """Return the mean tokens per chunk after the first token: counted in details, else estimated from the summary.

    Gaps that the tool divided among the tokens of a chunk have no count.
    """
    if result.details is None:
        return result.estimate_chunk_tokens()
    done = result.details.list_finished()
    gaps = sum(len(result.details.itls[i]) for i in done)
    return sum(result.details.output_lens[i] - 1 for i in done) / gaps if gaps else None


def make_rows(result: Result) -> list[Row] | None:
    """Return a row per finished request as samples have them; None if the times of tokens are unknown.

    They are unknown if requests have no start, or if chunks hold several tokens.
    """
    details = result.details
    if details is None or details.start_times is None or not details.has_token_times():
        return None
    first = min(details.start_times)
    found = []
    for i in details.list_finished():
        submitted_s = details.start_times[i] - first
        token_s = list(itertools.accumulate(details.itls[i], initial=submitted_s + details.ttfts[i]))
        found.append(
            Row(
                number=i,
                outcome=FINISHED,
                submitted_s=submitted_s,
                first_token_s=token_s[0],
                end_s=token_s[-1],
                input_tokens=details.input_lens[i],
                output_tokens=details.output_lens[i],
                token_s=token_s,
            )
        )
    return found


def _summarize_requests(result: Result, details: Details) -> Result:
    """Return the result with sums, times and statistics of its requests in place of the tool's."""
    done, starts = details.list_finished(), details.start_times
    wall = result.duration_s
    if starts is not None:
        wall = max(starts[i] + details.compute_latency(i) for i in done) - min(starts)
    several = [i for i in done if details.output_lens[i] > 1]
    decoded = not several or any(details.compute_latency(i) > details.ttfts[i] for i in several)
    streamed = decoded and any(details.ttfts[i] > 0 for i in done)
    tpot = [(details.compute_latency(i) - details.ttfts[i]) / (details.output_lens[i] - 1) * 1e3 for i in several]
    samples = {
        "ttft": [details.ttfts[i] * 1e3 for i in done] if streamed else [],
        "itl": [gap * 1e3 for i in done for gap in details.itls[i]],
        "tpot": tpot if streamed else [],
        "e2el": [details.compute_latency(i) * 1e3 for i in done],
    }
    return dataclasses.replace(
        result,
        duration_s=wall,
        input_tokens=sum(details.input_lens[i] for i in done),
        output_tokens=sum(details.output_lens[i] for i in done),
        summary={name: formulas.summarize_latencies(found) for name, found in samples.items()},
    )


def _fill_metrics(result: Result, gpus: int) -> ServeMetrics:
    times, wall_s = result.summary, result.duration_s
    if wall_s is not None and not wall_s > 0:
        raise RecordsError(f"{result.where}: the run took no time, so that there are no rates. Run it again.")
    requests: float | None
    if (rates := result.rates) is not None:
        rate, total, requests = rates.output * rates.gpus, rates.total * rates.gpus, rates.requests
    else:
        assert wall_s is not None
        rate, total = result.output_tokens / wall_s, (result.input_tokens + result.output_tokens) / wall_s
        requests = None if result.completed is None else result.completed / wall_s
    per_token = times["tpot"].p50
    steady_tok_s, steady_s = _compute_steady(result)
    found = ServeMetrics(
        ttft_ms=times["ttft"],
        itl_ms=times["itl"],
        tpot_ms=times["tpot"],
        e2el_ms=times["e2el"],
        output_tok_s=rate,
        output_tok_s_per_gpu=formulas.compute_tok_s_per_gpu(rate, gpus) if gpus else None,
        total_tok_s=total,
        request_throughput=requests,
        tok_s_per_user=formulas.compute_tok_s_per_user(per_token) if per_token else None,
        steady_tok_s=steady_tok_s,
        steady_s=steady_s,
        slo_ms=dict(result.slo_ms) if result.request_goodput is not None else {},
        request_goodput=result.request_goodput if result.slo_ms else None,
        wall_s=wall_s,
        submitted=result.submitted,
        finished=result.completed,
        rejected=None,
        cancelled=None,
        failed=result.failed,
        input_tokens=None if result.rates else result.input_tokens,
        output_tokens=None if result.rates else result.output_tokens,
        cached_tokens=None,
        preemptions=None,
        steps=None,
        decode_steps=None,
        eager_decode_steps=None,
        decode_batch=None,
    )
    for name in ("output_tok_s", "total_tok_s", "request_throughput", "tok_s_per_user"):
        value = getattr(found, name)
        if value is not None and value > MAX_NUMBER:
            raise RecordsError(f"{result.where}: its {name} would be {value:g}, so its times cannot be. Run it again.")
    return found


def _compute_steady(result: Result) -> tuple[float | None, float | None]:
    """Return the throughput at the target concurrency and its duration; None unless requests have a start and a target."""
    if result.arrival != CLOSED or not result.concurrency or (served := make_rows(result)) is None:
        return None, None
    times = [formulas.RequestTimes(row.submitted_s, row.token_s) for row in served]
    window = formulas.find_steady_window(times, result.concurrency)
    return (None, None) if window is None else (formulas.compute_tok_s_within(times, window), window[1] - window[0])
