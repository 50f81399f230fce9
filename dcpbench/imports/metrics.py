"""Our metrics of another engine's result: computed of its requests where it kept them, else its own summary."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.errors import RecordsError
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.names import CLOSED
from dcpbench.records import formulas
from dcpbench.records.record import ServeMetrics
from dcpbench.serving.outcome import FINISHED, REQUESTS_FAILED, Row, marks

if TYPE_CHECKING:
    from dcpbench.imports.result import Details, Result

SUMMARY_ONLY, CHUNK_GAPS = "summary_only", "chunk_gaps"
NOMINAL = "nominal_lengths"
"""Marks of imports; reports/explain.py has a sentence for each."""


def serve_metrics(result: Result, tp: int) -> tuple[ServeMetrics, list[str]]:
    """Metrics of a result with its marks; what it does not say is None. `tp` is 0 where nobody knows it.

    With an entry per request every definition is ours; the wall time is from the first submission to the last token
    where requests have a start, else the tool's. Raises RecordsError where no time passed.
    """
    details = result.details
    chunked = result.several_tokens or (details is not None and details.in_chunks())
    found = _metrics(result if details is None else _computed(result, details), tp, chunked=chunked)
    told = {REQUESTS_FAILED: bool(result.failed), SUMMARY_ONLY: details is None, CHUNK_GAPS: chunked}
    return found, [*(mark for mark, holds in told.items() if holds), *(marks(found) if details else ())]


def rows(result: Result) -> list[Row] | None:
    """A row per request as our samples have them; None where the moments of tokens are not known.

    They are not where requests have no start, or where chunks hold several tokens. A failed request has no tokens, and
    what became of it is in no word of ours: it is left out.
    """
    details = result.details
    if details is None or details.start_times is None or not details.per_token():
        return None
    first = min(details.start_times)
    found = []
    for i in details.finished():
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


def _computed(result: Result, details: Details) -> Result:
    """The result with sums, times and statistics of its requests in place of the tool's."""
    done, starts = details.finished(), details.start_times
    wall = result.duration_s
    if starts is not None:
        wall = max(starts[i] + details.latency(i) for i in done) - min(starts[i] for i in done)
    streamed = any(details.ttfts[i] > 0 for i in done)
    several = [i for i in done if details.output_lens[i] > 1]
    tpot = [(details.latency(i) - details.ttfts[i]) / (details.output_lens[i] - 1) * 1e3 for i in several]
    samples = {
        "ttft": [details.ttfts[i] * 1e3 for i in done] if streamed else [],
        "itl": [gap * 1e3 for i in done for gap in details.itls[i]],
        "tpot": tpot if streamed else [],
        "e2el": [details.latency(i) * 1e3 for i in done],
    }
    return dataclasses.replace(
        result,
        duration_s=wall,
        input_tokens=sum(details.input_lens[i] for i in done),
        output_tokens=sum(details.output_lens[i] for i in done),
        summary={name: formulas.latencies(found) for name, found in samples.items()},
    )


def _metrics(result: Result, tp: int, *, chunked: bool) -> ServeMetrics:
    times, wall_s = result.summary, result.duration_s
    if wall_s is not None and not wall_s > 0:
        raise RecordsError(f"{result.where}: the run took no time, so that there are no rates. Run it again.")
    if result.rates is not None:
        rate, total = result.rates.output * result.rates.gpus, result.rates.total * result.rates.gpus
    else:
        assert wall_s is not None
        rate, total = result.output_tokens / wall_s, (result.input_tokens + result.output_tokens) / wall_s
    itl = times["itl"].p50
    steady_tok_s, steady_s = _steady(result)
    found = ServeMetrics(
        ttft_ms=times["ttft"],
        itl_ms=times["itl"],
        tpot_ms=times["tpot"],
        e2el_ms=times["e2el"],
        output_tok_s=rate,
        output_tok_s_per_gpu=formulas.per_gpu(rate, tp) if tp else None,
        total_tok_s=total,
        request_s=None if wall_s is None or result.completed is None else result.completed / wall_s,
        tok_s_per_user=formulas.tok_s_per_user(itl) if itl and not chunked else None,
        steady_tok_s=steady_tok_s,
        steady_s=steady_s,
        slo_ms=dict(result.slo_ms) if result.goodput_s is not None else {},
        goodput_s=result.goodput_s if result.slo_ms else None,
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
    for name in ("output_tok_s", "total_tok_s", "request_s", "tok_s_per_user"):
        value = getattr(found, name)
        if value is not None and value > MAX_NUMBER:
            raise RecordsError(f"{result.where}: its {name} would be {value:g}, so its times cannot be. Run it again.")
    return found


def _steady(result: Result) -> tuple[float | None, float | None]:
    """Throughput at the target concurrency and for how long, where requests have a start and a target."""
    if result.arrival != CLOSED or not result.concurrency or (served := rows(result)) is None:
        return None, None
    times = [formulas.RequestTimes(row.submitted_s, row.token_s) for row in served]
    window = formulas.steady_window(times, result.concurrency)
    return (None, None) if window is None else (formulas.tok_s_within(times, window), window[1] - window[0])
