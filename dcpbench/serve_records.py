"""What a point and its record say of the workload `serve`. Parts of records.py; units as there. No torch."""

from __future__ import annotations

import msgspec

from dcpbench.choices import CLOSED, LIVE, MIXED, PREFILLS


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload `serve` is asked to serve, and how; docs/serving.md has a sentence for each option."""

    mode: str = LIVE
    """`live`, or `replay`: the same scheduler in virtual time, with step times that were measured before."""
    requests: int
    """How many are submitted."""
    arrival: str = CLOSED
    """`closed` (point.concurrency clients), `gamma` (request_rate and burstiness) or `trace` (the file's times)."""
    request_rate: float | None = None
    """Requests per second, on average."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts, more is regular."""
    input_tokens: str
    """Length of prompts: `4000`, `uniform:1000-7000` or `lognormal:4000:0.5` (median and sigma); `trace`."""
    output_tokens: str
    """Tokens sampled per request, likewise."""
    prefix_share: float | None = 0.0
    """Share of each prompt that it has in common with others of its group, at the beginning. Null, like `prefix_cache`
    and `seed`, where an import does not say."""
    prefix_groups: int = 1
    trace: str = ""
    """Name of the file of requests, without its folder."""
    trace_sha256: str = ""
    chunk: int
    """Prompt tokens that a step prefills at most, over the whole layout."""
    policy: str = MIXED
    prefix_cache: bool | None = True
    prefill: str = PREFILLS[0]
    """Attention of prompts: `sdpa` (torch) or `flashinfer` (ragged prefill)."""
    seed: int | None = 0


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Times of finished requests in ms, as metrics.py defines them; percentiles are null where samples are too few."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    samples: int = 0


class ServeMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload `serve` measured, or computed in replay; definitions in metrics.py."""

    ttft_ms: Latencies
    itl_ms: Latencies
    tpot_ms: Latencies
    e2el_ms: Latencies
    output_tok_s: float
    """Of the whole run, ramp and drain included."""
    output_tok_s_per_gpu: float | None
    """Null where nobody knows how many GPUs there were, as of an import that does not say."""
    total_tok_s: float
    """Of prompt and output tokens; cached prompt tokens count."""
    request_s: float
    """Finished requests per second."""
    tok_s_per_user: float | None
    steady_tok_s: float | None
    """Of the longest time at 95 % of the target concurrency; null where it is never reached, or nothing is targeted."""
    steady_s: float | None
    """How long that was."""
    slo_ms: dict[str, float] = {}
    """Objectives as typed: `ttft`, `itl`, `tpot`, `e2el`."""
    goodput_s: float | None = None
    """Requests per second that meet all of them; null without any."""
    wall_s: float
    """First submission to last token."""
    submitted: int | None
    """Null, like all counts below that may be, where an import does not say."""
    finished: int
    rejected: int | None
    """Requests that can never fit."""
    cancelled: int | None
    """Submitted and not finished when the run was ended."""
    input_tokens: int
    """Of requests that got a token."""
    output_tokens: int
    """That came, also of requests that were cut off."""
    cached_tokens: int | None
    """Prompt tokens that the prefix cache had."""
    preemptions: int | None
    steps: int | None
    decode_steps: int | None
    """Steps without prefill."""
    eager_decode_steps: int | None = 0
    """Of these, those past the largest captured graph."""
    decode_batch: float | None
    """Mean requests in a step without prefill, over the layout."""
    idle_fraction: float | None = None
    """GPU time between two steps without prefill, as a share of it and of the steps; the worst rank's. Null in replay
    and on the CPU."""
    samples_file: str = ""
    """Parquet file beside the records: a row per request."""
