"""Our metrics of another engine's result: computed of its requests where it kept them, else its own summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.errors import RecordsError
from dcpbench.imports.result import LARGEST
from dcpbench.points.names import CLOSED
from dcpbench.records import formulas
from dcpbench.records.record import Latencies, ServeMetrics
from dcpbench.serving.outcome import FINISHED, Row, marks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.imports.result import Details, Result

SUMMARY_ONLY, CHUNK_GAPS, REQUESTS_FAILED = "summary_only", "chunk_gaps", "requests_failed"
"""Marks of imports; reports/explain.py has a sentence for each."""


def serve_metrics(result: Result, tp: int) -> tuple[ServeMetrics, list[str]]:
    """Metrics of a result with its marks; what it does not say is None. `tp` is 0 where nobody knows it.

    With an entry per request every definition is ours; the wall time is from the first submission to the last token
    where requests have a start, else the tool's. Raises RecordsError where no time passed.
    """
    details = result.details
    told = [REQUESTS_FAILED] if result.failed else []
    if details is None:
        found = _of_summary(result, tp)
        return found, [*told, SUMMARY_ONLY, *([CHUNK_GAPS] if result.several_tokens else [])]
    chunked = result.several_tokens or details.in_chunks()
    found = _of_details(result, details, tp, chunked=chunked)
    return found, [*told, *([CHUNK_GAPS] if chunked else []), *marks(found)]


def rows(details: Details) -> list[Row] | None:
    """A row per request as our samples have them; None where the moments of tokens are not known.

    They are not where requests have no start, or where chunks hold several tokens. A failed request has no tokens, and
    what became of it is in no word of ours: it is left out.
    """
    if details.start_times is None or not details.per_token():
        return None
    first = min(details.start_times)
    found = []
    for i in details.finished():
        token_s = _token_s(details, i, first)
        found.append(
            Row(
                number=i,
                outcome=FINISHED,
                reason=None,
                submitted_s=details.start_times[i] - first,
                first_token_s=token_s[0],
                end_s=token_s[-1],
                input_tokens=details.input_lens[i],
                output_tokens=details.output_lens[i],
                cached_tokens=None,
                preemptions=None,
                replica=None,
                token_s=token_s,
                tokens=[],
            )
        )
    return found


def _of_details(result: Result, details: Details, tp: int, *, chunked: bool) -> ServeMetrics:
    done = details.finished()
    ends = None if details.start_times is None else [details.start_times[i] + details.latency(i) for i in done]
    wall = result.duration_s
    if ends is not None and details.start_times is not None:
        wall = max(ends) - min(details.start_times[i] for i in done)
    outputs, inputs = (sum(lens[i] for i in done) for lens in (details.output_lens, details.input_lens))
    streamed = any(details.ttfts[i] > 0 for i in done)
    gaps = [gap * 1e3 for i in done for gap in details.itls[i]]
    several = [i for i in done if details.output_lens[i] > 1]
    tpot = [(details.latency(i) - details.ttfts[i]) / (details.output_lens[i] - 1) * 1e3 for i in several]
    times = {
        "ttft": formulas.latencies([details.ttfts[i] * 1e3 for i in done] if streamed else []),
        "itl": formulas.latencies(gaps),
        "tpot": formulas.latencies(tpot if streamed else []),
        "e2el": formulas.latencies([details.latency(i) * 1e3 for i in done]),
    }
    steady = _steady(result, details) if details.per_token() else (None, None)
    return _metrics(result, tp, times, wall, input_tokens=inputs, output_tokens=outputs, chunked=chunked, steady=steady)


def _of_summary(result: Result, tp: int) -> ServeMetrics:
    return _metrics(
        result,
        tp,
        result.summary,
        result.duration_s,
        input_tokens=result.input_tokens,
        output_tokens=result.output_tokens,
        chunked=result.several_tokens,
    )


def _metrics(
    result: Result,
    tp: int,
    times: Mapping[str, Latencies],
    wall_s: float,
    *,
    input_tokens: int,
    output_tokens: int,
    chunked: bool,
    steady: tuple[float | None, float | None] = (None, None),
) -> ServeMetrics:
    if not wall_s > 0:
        raise RecordsError(f"{result.where}: the run took no time, so that there are no rates. Run it again.")
    rate, itl = output_tokens / wall_s, times["itl"].p50
    found = ServeMetrics(
        ttft_ms=times["ttft"],
        itl_ms=times["itl"],
        tpot_ms=times["tpot"],
        e2el_ms=times["e2el"],
        output_tok_s=rate,
        output_tok_s_per_gpu=formulas.per_gpu(rate, tp) if tp else None,
        total_tok_s=(input_tokens + output_tokens) / wall_s,
        request_s=result.completed / wall_s,
        tok_s_per_user=formulas.tok_s_per_user(itl) if itl and not chunked else None,
        steady_tok_s=steady[0],
        steady_s=steady[1],
        slo_ms=dict(result.slo_ms) if result.goodput_s is not None else {},
        goodput_s=result.goodput_s if result.slo_ms else None,
        wall_s=wall_s,
        submitted=result.submitted,
        finished=result.completed,
        rejected=None,
        cancelled=None,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=None,
        preemptions=None,
        steps=None,
        decode_steps=None,
        eager_decode_steps=None,
        decode_batch=None,
    )
    for name in ("output_tok_s", "total_tok_s", "request_s", "tok_s_per_user"):
        value = getattr(found, name)
        if value is not None and value > LARGEST:
            raise RecordsError(f"{result.where}: its {name} would be {value:g}, so its times cannot be. Run it again.")
    return found


def _steady(result: Result, details: Details) -> tuple[float | None, float | None]:
    """Throughput at the target concurrency and for how long, where requests have a start and a target."""
    if details.start_times is None or result.arrival != CLOSED or not result.concurrency:
        return None, None
    first = min(details.start_times)
    times = [
        formulas.RequestTimes(details.start_times[i] - first, _token_s(details, i, first)) for i in details.finished()
    ]
    window = formulas.steady_window(times, result.concurrency)
    return (None, None) if window is None else (formulas.tok_s_within(times, window), window[1] - window[0])


def _token_s(details: Details, i: int, first_s: float) -> list[float]:
    """When each token came, in seconds after the first submission."""
    assert details.start_times is not None
    at = details.start_times[i] - first_s + details.ttfts[i]
    found = [at]
    for gap in details.itls[i]:
        at += gap
        found.append(at)
    return found
