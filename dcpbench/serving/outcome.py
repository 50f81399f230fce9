"""Compute the results of a finished run of requests: the metrics of its record, and one row per request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.points.batches import GRAPH_BATCHES
from dcpbench.records import formulas
from dcpbench.records.record import ServeMetrics, SpeculationMetrics, TurnMetrics
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.points.speculation import Speculation
    from dcpbench.records.record import InstanceMetrics, StageMetrics
    from dcpbench.serving.requests import Step
    from dcpbench.serving.traffic import RequestResult

NO_SHARES: Mapping[str, float | None] = {}
FINISHED, REJECTED, CANCELLED, FAILED = OUTCOMES = ("finished", "rejected", "cancelled", "failed")
"""Outcomes of a request: all its tokens came, it can never be served here, the run ended before it did, or a real
server did not answer it to its end.
"""
REQUESTS_FAILED = "requests_failed"  # warning of a point with failed requests


@dataclasses.dataclass(slots=True)
class StepCounts:
    """Number of steps of a run, by kind."""

    steps: int = 0
    decode_steps: int = 0  # steps without prefill
    eager_decode_steps: int = 0  # decode steps larger than the largest captured graph
    decode_rows: int = 0  # requests in steps without prefill, over the layout, summed over these steps
    decoded_tokens: int = 0  # tokens that requests got in these steps
    accepted: list[int] = dataclasses.field(default_factory=list)  # steps by accepted drafts, from 0; empty: no drafts

    def add_step(self, step: Step) -> None:
        """Count a step that ran."""
        self.steps += 1
        if not step.has_chunks:
            rows = [len(r.decodes) for r in step.replicas]
            self.decode_steps += 1
            self.eager_decode_steps += max(rows) > GRAPH_BATCHES[-1]
            self.decode_rows += sum(rows)
            self.decoded_tokens += sum(r.decoded_tokens for r in step.replicas)
        for replica in step.replicas:
            self.accepted += [0] * (replica.queries - len(self.accepted) if replica.accepted else 0)
            for count in replica.accepted:
                self.accepted[count] += 1

    def summarize_speculation(self, stated: Speculation | None, step_times: str = "") -> SpeculationMetrics | None:
        """Return what the steps accepted, next to what was stated; None without drafts."""
        steps = sum(self.accepted)
        if stated is None or not steps:
            return None
        reached = [sum(self.accepted[n:]) for n in range(1, len(self.accepted))]
        return SpeculationMetrics(
            draft_tokens=stated.draft_tokens,
            assumed=list(stated.acceptance),
            steps=steps,
            accepted=reached,
            tokens_per_step=1 + sum(reached) / steps,
            step_times=step_times,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A request as stored in the samples file. Times are in seconds after the start of the run."""

    number: int
    outcome: str  # one of OUTCOMES
    reason: str | None = None  # reason of a rejection or failure
    submitted_s: float
    first_token_s: float | None
    end_s: float | None  # time of its last token; None unless it finished
    input_tokens: int
    output_tokens: int  # number of output tokens received
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None if the request was never admitted
    preemptions: int | None = None
    replica: int | None = None
    instance: int | None = None  # instance that decoded the request, or had it last; prefill instances come first
    prefilled_by: int | None = None  # instance of the prefill if another one decodes; None also without decoded tokens
    kv_sent_s: float | None = None  # time at which the transfer of its KV to the decode instance began
    kv_arrived_s: float | None = None
    session: int | None = None  # turn within the session; None for single-turn requests
    turn: int | None = None
    token_s: list[float]
    tokens: list[int] = dataclasses.field(default_factory=list)  # ids; empty in replay and for other replicas' requests
    chunk_tokens: list[int] = dataclasses.field(default_factory=list)  # tokens per chunk if any has several, else empty

    @property
    def session_turn(self) -> tuple[int, int] | None:
        """Return session and turn, which requests of sub-agents share; None without a session."""
        return None if self.session is None or self.turn is None else (self.session, self.turn)


def make_rows(samples: Iterable[RequestResult]) -> list[Row]:
    """Return a row per request, in order of submission."""
    found = []
    for s in samples:
        admitted = s.sequence if s.sequence and s.sequence.replica >= 0 else None
        crossed = s.sequence.transfer if s.sequence else None
        found.append(
            Row(
                number=s.request.number,
                outcome=get_outcome(s),
                reason=s.rejected or s.failed or None,
                submitted_s=s.submitted_s,
                first_token_s=s.token_s[0] if s.token_s else None,
                end_s=s.token_s[-1] if s.is_finished and not s.rejected else None,
                input_tokens=s.request.prompt_tokens,
                output_tokens=len(s.token_s),
                cached_tokens=s.cached,
                preemptions=s.sequence.preemptions if s.sequence else None,
                replica=admitted.replica if admitted else None,
                instance=s.sequence.instance if s.sequence else None,
                prefilled_by=crossed.source if crossed else None,
                kv_sent_s=crossed.begin_s if crossed else None,
                kv_arrived_s=crossed.end_s if crossed else None,
                session=s.request.session,
                turn=None if s.request.session is None else s.request.turn,
                token_s=s.token_s,
                tokens=s.tokens,
                chunk_tokens=s.chunk_tokens,
            )
        )
    return found


def compute_serve_metrics(
    samples: Sequence[RequestResult],
    *,
    gpus: int,
    concurrency: int | None,
    slo: Mapping[str, float],
    steps: StepCounts,
    idle_fraction: float | None = None,
    floor_shares: Mapping[str, float | None] = NO_SHARES,
    instances: InstanceMetrics | None = None,
    stages: StageMetrics | None = None,
    speculation: SpeculationMetrics | None = None,
    samples_file: str = "",
    interrupted: bool = False,
    limit_s: float | None = None,
) -> ServeMetrics:
    """Return the metrics of the requests of a run that has ended, by itself or by `Traffic.stop`; definitions in formulas.py.

    Latencies, goodput and request rate are those of finished requests, and null if none finished. Token rates count
    every received token, including those of requests that were cut off. `concurrency` is the target of a closed loop;
    None without a target, in which case there is no steady part. `gpus` is 0 if unknown. `slo` in ms by name
    (points.names.OBJECTIVES). `floor_shares` by the names of their fields.

    Raise UsageError if no token came at all, because then there is no rate, and for invalid objectives. `interrupted`
    and `limit_s` are the signal or the time limit that ended the run, for the message.
    """
    import numpy as np

    objectives = formulas.validate_objectives(slo)
    by_outcome = {outcome: [s for s in samples if get_outcome(s) == outcome] for outcome in OUTCOMES}
    served = [s for s in samples if s.token_s]
    if not served:
        raise UsageError(_explain_no_tokens(by_outcome, interrupted=interrupted, limit_s=limit_s))
    times = [
        formulas.RequestTimes(
            s.submitted_s, s.token_s, finished=s.is_finished, failed=bool(s.failed), turn=s.request.session_turn
        )
        for s in served
    ]
    wall = formulas.compute_wall_s(times)
    window = None
    if concurrency is not None:
        waiting = [(s.submitted_s, s.request.session_turn) for s in by_outcome[CANCELLED] if not s.token_s]
        window = formulas.find_steady_window(times, concurrency, waiting)
    input_tokens, output_tokens = (sum(s.request.prompt_tokens for s in served), sum(len(s.token_s) for s in served))
    done = [t for t in times if t.finished]
    tpot_ms = formulas.summarize_latencies([v for t in done if (v := formulas.compute_tpot_ms(t)) is not None])
    itl_ms = formulas.summarize_latencies(np.concatenate([np.empty(0), *map(formulas.compute_itl_ms, done)]))
    sequences = [s.sequence for s in samples if s.sequence is not None]
    return ServeMetrics(
        ttft_ms=formulas.summarize_latencies([formulas.compute_ttft_ms(t) for t in done]),
        itl_ms=itl_ms,
        tpot_ms=tpot_ms,
        e2el_ms=formulas.summarize_latencies([formulas.compute_e2el_ms(t) for t in done]),
        output_tok_s=output_tokens / wall,
        output_tok_s_per_gpu=formulas.compute_tok_s_per_gpu(output_tokens / wall, gpus) if gpus else None,
        total_tok_s=(input_tokens + output_tokens) / wall,
        request_throughput=len(done) / wall,
        tok_s_per_user=formulas.compute_tok_s_per_user(tpot_ms.p50) if tpot_ms.p50 else None,
        speculation=speculation,
        steady_tok_s=None if window is None else formulas.compute_tok_s_within(times, window),
        steady_s=None if window is None else window[1] - window[0],
        slo_ms=objectives,
        request_goodput=formulas.compute_goodput(times, objectives) if slo else None,
        wall_s=wall,
        submitted=len(samples),
        finished=len(done),
        rejected=len(by_outcome[REJECTED]),
        cancelled=len(by_outcome[CANCELLED]),
        failed=len(by_outcome[FAILED]),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(s.cached for s in sequences),
        preemptions=sum(s.preemptions for s in sequences),
        steps=steps.steps,
        decode_steps=steps.decode_steps,
        eager_decode_steps=steps.eager_decode_steps,
        decode_batch=steps.decode_rows / steps.decode_steps if steps.decode_steps else None,
        idle_fraction=idle_fraction,
        prefill_floor_share=floor_shares.get("prefill_floor_share"),
        prefill_matmul_share=floor_shares.get("prefill_matmul_share"),
        decode_floor_share=floor_shares.get("decode_floor_share"),
        turns=_compute_turn_metrics(served),
        instances=instances,
        stages=stages,
        samples_file=samples_file,
    )


def _compute_turn_metrics(served: list[RequestResult]) -> list[TurnMetrics]:
    """Return the metrics of each turn, of requests that got a token; empty for single-turn requests."""
    by_turn: dict[int, list[RequestResult]] = {}
    for sample in served:
        if sample.request.session is not None:
            by_turn.setdefault(sample.request.turn, []).append(sample)
    found = []
    for turn, samples in sorted(by_turn.items()):
        done = [formulas.RequestTimes(s.submitted_s, s.token_s, finished=True) for s in samples if s.is_finished]
        cached = [s.cached for s in samples]
        found.append(
            TurnMetrics(
                turn=turn + 1,
                requests=len(samples),
                input_tokens=sum(s.request.prompt_tokens for s in samples),
                cached_tokens=None if None in cached else sum(c for c in cached if c is not None),
                ttft_ms=formulas.summarize_latencies([formulas.compute_ttft_ms(times) for times in done]),
            )
        )
    return found


def get_outcome(sample: RequestResult) -> str:
    """Return the outcome of a request, one of OUTCOMES; an unfinished request counts as cancelled."""
    if sample.rejected or sample.failed:
        return REJECTED if sample.rejected else FAILED
    return FINISHED if sample.is_finished else CANCELLED


def find_warnings(found: ServeMetrics, *, cut_off: bool = False) -> list[str]:
    """Return the warnings of the metrics themselves: `cut_off`, `few_samples`, `rejections`, `requests_failed`.

    `few_samples` is set if a percentile of TTFT or ITL has too few samples (stats.compute_min_samples). `cut_off`: the run
    ended before all requests were sent, which the metrics do not show.
    """
    lacking = any(None in (times.p90, times.p95, times.p99) for times in (found.ttft_ms, found.itl_ms))
    found_warnings = {
        "cut_off": cut_off or bool(found.cancelled),
        "few_samples": lacking,
        "rejections": bool(found.rejected),
    }
    found_warnings |= {REQUESTS_FAILED: bool(found.failed)}
    return [warning for warning, holds in found_warnings.items() if holds]


def format_summary(found: ServeMetrics) -> str:
    """Return `408 tok/s, TTFT 981.8 ms, ITL 111.5 ms`, for a progress line; medians, if any request finished.

    With drafts TPOT replaces ITL, which is then mostly 0.
    """
    gaps = ("TPOT", found.tpot_ms.p50) if found.speculation else ("ITL", found.itl_ms.p50)
    medians = (("TTFT", found.ttft_ms.p50), gaps)
    return ", ".join(
        [f"{found.output_tok_s:,.0f} tok/s", *(f"{n} {ms:,.1f} ms" for n, ms in medians if ms is not None)]
    )


def _explain_no_tokens(
    by_outcome: Mapping[str, list[RequestResult]], *, interrupted: bool = False, limit_s: float | None = None
) -> str:
    """Return the reason why a run has no metrics, and the option that helps."""
    rejected, cancelled, failed = (by_outcome[name] for name in (REJECTED, CANCELLED, FAILED))
    if failed:
        others = f", {format_count(len(cancelled), 'other')} cut off" if cancelled else ""
        return f"no output token came: {format_count(len(failed), 'request')} failed{others}; the first one: {failed[0].failed}"
    if not rejected and not cancelled:
        return "no request was submitted; give --num-requests 1 or more."
    counts = f"no output token came: {format_count(len(rejected), 'request')} rejected and {len(cancelled):,} cut off"
    if rejected:
        return f"{counts}; the first one rejected: {rejected[0].rejected}"
    if interrupted:
        return f"{counts}: a signal ended the run before the first token. Serve the load again with --resume."
    if limit_s is not None:
        return f"{counts} by --timeout load={limit_s:g}; use a longer one."
    return f"{counts}, though neither --timeout nor a signal ended the run; read the log of the server or of the run."
