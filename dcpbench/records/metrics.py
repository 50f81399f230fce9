"""The catalogue of metrics: each one's name, unit, direction and words, where a record holds it, and where it is shown.

What prints, draws, exports, compares or checks a number reads it here. A new metric is a field of the record, an entry
of METRICS, and its name in those lists at the end of this file in which it is to be shown. Formulas stand in
`formulas`; how far repeats and launches scatter is resampled in `compare`, by the kind of error that stands here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import TYPE_CHECKING, Literal

from dcpbench.points.memory import GIB
from dcpbench.points.names import OBJECTIVES
from dcpbench.records.record import Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dcpbench.records.record import Record

DECODE, SERVE = "decode", "serve"
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
PERCENTILES = STATISTICS[1:]
Direction = Literal["higher", "lower", ""]
Error = Literal["steps", "requests", "gaps", "tokens", "steady tokens", "objectives"]
"""What a launch has many of, so that it says by itself how well it knows a metric: times of steps, latencies of
requests, gaps between tokens, tokens in windows of the run or of its steady part, and whether requests met their
objectives."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One number of a point."""

    name: str
    """With its unit, as in a record."""
    unit: str
    """As said in words."""
    better: Direction = ""
    """Nothing where a change is neither good nor bad."""
    help: str = ""
    """What it is, in a line. Exports carry it."""

    at: tuple[str, ...] = ()
    """Where a record holds it, as a number or as an Interval: of the first of these whose outermost part it has."""
    of: Callable[[Record], float | None] | None = None
    """Or how it follows from a record. A metric with neither is of points beside each other, and no record has it."""
    derived: Callable[[Record], tuple[float, float] | None] | None = None
    """Ends of its interval, where that follows from another metric's and no record holds it."""
    merged: Literal["median", "max", "min", "first"] = "median"
    """What a report shows of repeats. Exports and the dashboard show medians."""
    ranged: bool = False
    """Whether tables have both ends of its interval beside it, as `…_low` and `…_high`."""
    positive: bool = False
    """Whether no record can hold a 0 of it."""
    whole: bool = False
    """Whether it counts things."""
    exported: bool = True

    label: str = ""
    """What it is called beside its unit."""
    title: str = ""
    """The same where there is more room."""
    brief: str = ""
    """The same where there is less."""
    heading: str = ""
    """Of its column in a report's tables."""
    shown_unit: str | None = None
    """Where it is shown in another unit than it is recorded in, or where its words say it already."""
    brief_unit: str | None = None
    """The unit beside `brief`."""
    scale: float = 1.0
    """From the unit to the one that is shown."""
    digits: int = 4
    """Significant ones in a report's tables."""
    term: str = ""
    """The word that a report explains."""
    defined: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The explanation, by workload."""
    gauge: str = ""
    """Name in Prometheus where that does not follow from the unit, without `dcpbench_`."""

    latency: str = ""
    """`ttft` of `ttft_p99_ms`."""
    statistic: str = ""
    """`p99` of it."""

    option: str = ""
    """What `compare` calls it, in options and in what it writes."""
    aliases: tuple[str, ...] = ()
    """Other names that options of `compare` take for it."""
    errors: Mapping[str, Error] = dataclasses.field(default_factory=dict)
    """What `compare` resamples, by workload; nothing of what is counted, where every difference is one."""
    absolute: bool = False
    """Small whole numbers, whose ratio says little."""

    def __post_init__(self) -> None:
        """Words that were not given are those that were."""
        unit = self.unit if self.shown_unit is None else self.shown_unit
        brief = self.brief or self.label
        brief_unit = unit if self.brief_unit is None else self.brief_unit
        given = {
            "shown_unit": unit,
            "title": self.title or self.label,
            "brief": brief,
            "brief_unit": brief_unit,
            "option": self.option or self.name.removesuffix(f"_{self.unit}"),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "heading", self.heading or self.in_brief)

    @property
    def in_brief(self) -> str:
        """`TTFT p50 ms`; words that say their unit already, such as `output tok/s`, stay as they are."""
        unit = self.brief_unit or ""
        return self.brief if unit in self.brief else f"{self.brief} {unit}"

    @functools.cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """`at`, as names from the outside in."""
        return tuple(tuple(path.split(".")) for path in self.at)

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Outermost parts of a record that may hold it, such as `serve`."""
        return frozenset(path[0] for path in self.paths)

    @property
    def options(self) -> tuple[str, ...]:
        """All names that options of `compare` take for it."""
        return self.option, *self.aliases, self.name

    @property
    def shown_name(self) -> str:
        """The name with the unit in which it is shown: `memory_peak_gib`."""
        return self.name.replace("_bytes", "_gib") if self.shown_unit == "GiB" else self.name

    def held(self, record: Record) -> float | Interval | None:
        """What a record says of it; None where that was not measured."""
        if self.of is not None:
            return self.of(record)
        for path in self.paths:
            found: object = getattr(record, path[0])
            if found is not None:
                for name in path[1:]:
                    found = getattr(found, name, None)
                return found if isinstance(found, float | int | Interval) else None
        return None

    def value(self, record: Record) -> float | None:
        """The number, or the median of what was measured."""
        found = self.held(record)
        return found.median if isinstance(found, Interval) else found

    def interval(self, record: Record) -> tuple[float, float] | None:
        """The ends of its 95 % interval, where a record holds one."""
        found = self.held(record)
        return (found.low, found.high) if isinstance(found, Interval) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """A time of requests, of which a metric is made for each statistic."""

    name: str
    label: str
    help: str
    decoded: bool = False
    """Whether decode has it too, as percentiles alone."""
    defined: Mapping[str, str]

    def metric(self, statistic: str) -> Metric:
        """`ttft_p50_ms`."""
        leads = statistic in STATISTICS[:2]
        in_decode = self.decoded and statistic in PERCENTILES
        path = f"{self.name}_ms.{statistic}"
        errors: dict[str, Error] = {SERVE: "gaps" if self.name == "itl" else "requests"}
        if in_decode:
            errors[DECODE] = "steps"
        return Metric(
            name=f"{self.name}_{statistic}_ms",
            unit="ms",
            better="lower",
            help=f"{statistic} of the {self.help}; absent where samples are too few",
            at=(f"serve.{path}", *([f"metrics.{path}"] if in_decode else [])),
            label=f"{self.label} {statistic}",
            heading="" if leads else statistic,
            latency=self.name,
            statistic=statistic,
            errors=errors,
        )


LATENCIES = {
    found.name: found
    for found in (
        Latency(
            name="ttft",
            label="TTFT",
            help="time to first token, queueing included",
            decoded=True,
            defined={SERVE: "t1 - t0: first output token - submitted (open loop: due), queueing included"},
        ),
        Latency(
            name="itl",
            label="ITL",
            help="gap between two output tokens of a request",
            decoded=True,
            defined={
                DECODE: "gap between two output tokens of a request: one step, one sample per step",
                SERVE: "each gap between consecutive output tokens of a request, pooled over requests",
            },
        ),
        Latency(
            name="tpot",
            label="TPOT",
            help="time per output token after the first, one per request",
            defined={SERVE: "(tn - t1) / (n - 1), one per request, none if n < 2"},
        ),
        Latency(
            name="e2el",
            label="E2EL",
            help="time from submission to the last token",
            defined={SERVE: "tn - t0: last output token - submitted"},
        ),
    )
}
"""By the names that --slo has for them."""
assert tuple(LATENCIES) == OBJECTIVES


def _both(definition: str) -> dict[str, str]:
    return dict.fromkeys((DECODE, SERVE), definition)


def _per_gpu_interval(record: Record) -> tuple[float, float] | None:
    """That of the output throughput, divided by tp."""
    if record.metrics is None:
        return None
    return record.metrics.output_tok_s.low / record.point.tp, record.metrics.output_tok_s.high / record.point.tp


def _per_user_interval(record: Record) -> tuple[float, float] | None:
    """That of the step time turned over: the gaps between tokens of `decode` are its steps."""
    return None if record.metrics is None else (1000 / record.metrics.step_ms.high, 1000 / record.metrics.step_ms.low)


def _kv_tokens_per_gib(record: Record) -> float | None:
    kv = record.kv
    return kv.capacity_tokens / (kv.pool_bytes_per_gpu / GIB) if kv and kv.pool_bytes_per_gpu else None


def _cached_share(record: Record) -> float | None:
    serve = record.serve
    if serve is None or serve.cached_tokens is None or not serve.input_tokens:
        return None
    return serve.cached_tokens / serve.input_tokens


def _either(name: str) -> tuple[str, str]:
    """Where records of both workloads hold it."""
    return f"serve.{name}", f"metrics.{name}"


METRICS: tuple[Metric, ...] = (
    Metric(
        name="output_tok_s",
        unit="tok/s",
        better="higher",
        help="output tokens per second of the whole layout",
        at=_either("output_tok_s"),
        ranged=True,
        positive=True,
        label="output",
        title="output throughput",
        brief="output tok/s",
        term="output throughput",
        defined={
            DECODE: "concurrency / step time, of the whole layout",
            SERVE: "output tokens / wall time (first submission to last token), ramp and drain included",
        },
        gauge="output_tokens_per_second",
        option="tok_s",
        aliases=("slower",),
        errors={SERVE: "tokens"},
    ),
    Metric(
        name="output_tok_s_per_gpu",
        unit="tok/s/GPU",
        better="higher",
        help="output tokens per second and GPU",
        at=_either("output_tok_s_per_gpu"),
        derived=_per_gpu_interval,
        positive=True,
        label="output per GPU",
        title="output throughput per GPU",
        heading="tok/s/GPU",
        term="per GPU",
        defined=_both("output throughput / tp; neither dp nor dcp adds GPUs"),
        gauge="output_tokens_per_second_per_gpu",
    ),
    Metric(
        name="tok_s_per_user",
        unit="tok/s/user",
        better="higher",
        help="1000 over the median ITL in ms",
        at=_either("tok_s_per_user"),
        derived=_per_user_interval,
        positive=True,
        label="speed for one user",
        heading="tok/s/user",
        digits=3,
        term="per user",
        defined=_both("1000 / median ITL in ms"),
        gauge="output_tokens_per_second_per_user",
    ),
    Metric(
        name="total_tok_s",
        unit="tok/s",
        better="higher",
        help="input and output tokens per second of the whole layout",
        at=("serve.total_tok_s",),
        label="input and output",
        heading="input + output tok/s",
        gauge="input_and_output_tokens_per_second",
    ),
    Metric(
        name="steady_tok_s",
        unit="tok/s",
        better="higher",
        help="output tokens per second while the target concurrency is held",
        at=("serve.steady_tok_s",),
        label="steady output",
        title="steady output throughput",
        brief="steady tok/s",
        heading="steady",
        term="steady",
        defined={SERVE: "the same over the longest time with at least 95 % of a closed loop's clients in flight"},
        gauge="steady_output_tokens_per_second",
        errors={SERVE: "steady tokens"},
    ),
    Metric(
        name="steady_s",
        unit="s",
        help="how long the target concurrency was held",
        at=("serve.steady_s",),
        exported=False,
        label="time at the target concurrency",
    ),
    Metric(
        name="request_s",
        unit="requests/s",
        better="higher",
        help="finished requests per second",
        at=("serve.request_s",),
        label="finished requests",
        gauge="requests_per_second",
    ),
    Metric(
        name="goodput_s",
        unit="requests/s",
        better="higher",
        help="requests per second that meet every objective",
        at=("serve.goodput_s",),
        label="goodput",
        title="goodput under the line's objectives",
        brief_unit="req/s",
        digits=3,
        term="goodput",
        defined={SERVE: "finished requests that meet every objective / wall time; ITL in 99 of 100 gaps"},
        gauge="goodput_requests_per_second",
        option="goodput",
        errors={SERVE: "objectives"},
    ),
    Metric(
        name="step_ms",
        unit="ms",
        better="lower",
        help="median time of a decode step, slowest rank",
        at=("metrics.step_ms",),
        ranged=True,
        positive=True,
        label="step time",
        term="step time",
        defined={DECODE: "slowest rank's time from graph launch to the step's end; median with its 95 % interval"},
        option="step_time",
        aliases=("slower", "tok_s", "itl_p50"),
        errors={DECODE: "steps"},
    ),
    *(latency.metric(statistic) for latency in LATENCIES.values() for statistic in STATISTICS),
    Metric(
        name="host_syncs_per_step",
        unit="syncs/step",
        better="lower",
        help="calls in one step that make the host wait for the GPU",
        at=("host_syncs_per_step",),
        merged="max",
        label="host syncs per step",
        shown_unit="",
        brief="host syncs",
        brief_unit="/step",
        heading="host syncs",
        digits=3,
        option="syncs",
        absolute=True,
    ),
    Metric(
        name="allocations_per_step",
        unit="allocations/step",
        better="lower",
        help="calls to CUDA's allocator in one timed step",
        at=("allocations_per_step",),
        merged="max",
        exported=False,
        label="allocations per step",
        heading="allocations",
        digits=3,
    ),
    Metric(
        name="host_plan_us",
        unit="µs",
        better="lower",
        help="host time to plan one step",
        at=("host_plan_us",),
        label="host time to plan a step",
        heading="host plan µs",
        digits=3,
    ),
    Metric(
        name="idle_fraction",
        unit="share",
        better="lower",
        help="share of a step in which no kernel runs",
        at=("serve.idle_fraction", "phases.idle_fraction"),
        label="GPU idle",
        heading="GPU idle",
        shown_unit="%",
        scale=100.0,
        gauge="gpu_idle_ratio",
    ),
    Metric(
        name="kv_capacity_tokens",
        unit="tokens",
        better="higher",
        help="tokens that the KV pools hold, each counted once",
        at=("kv.capacity_tokens",),
        merged="first",
        whole=True,
        label="KV capacity",
    ),
    Metric(
        name="kv_capacity_requests",
        unit="requests",
        better="higher",
        help="requests of the point's context that fit at once",
        at=("kv.capacity_requests",),
        merged="first",
        whole=True,
        label="KV capacity",
    ),
    Metric(
        name="kv_pool_bytes_per_gpu",
        unit="bytes",
        help="size of one GPU's KV pool",
        at=("kv.pool_bytes_per_gpu",),
        merged="first",
        whole=True,
        label="KV pool per GPU",
        heading="pool GiB per GPU",
        shown_unit="GiB",
        scale=1 / GIB,
    ),
    Metric(
        name="kv_bytes_per_token_per_gpu",
        unit="bytes",
        better="lower",
        help="KV bytes of a token, averaged over the layout's GPUs",
        at=("kv.bytes_per_token_per_gpu",),
        merged="first",
        label="KV per token and GPU",
        heading="bytes per token per GPU",
        digits=5,
    ),
    Metric(
        name="kv_tokens_per_gib",
        unit="tokens/GiB",
        better="higher",
        help="tokens that the KV pools hold, over the GiB of one GPU's pool",
        of=_kv_tokens_per_gib,
        merged="first",
        exported=False,
        label="KV tokens per GiB on each GPU",
        shown_unit="tokens",
        term="KV tokens per GiB",
        defined={"": "tokens that the layout's pools hold, each counted once / GiB of one GPU's pool"},
    ),
    Metric(
        name="memory_peak_bytes",
        unit="bytes",
        better="lower",
        help="peak memory of a GPU",
        at=("memory_peak_bytes",),
        merged="max",
        whole=True,
        label="memory peak per GPU",
        title="peak memory",
        brief="memory peak",
        shown_unit="GiB",
        scale=1 / GIB,
        option="memory",
    ),
    Metric(
        name="wall_s",
        unit="s",
        help="time from the first submission to the last token",
        at=("serve.wall_s",),
        label="wall time",
        heading="wall s",
        gauge="wall_seconds",
    ),
    Metric(
        name="submitted",
        unit="requests",
        help="requests that were submitted",
        at=("serve.submitted",),
        whole=True,
        label="submitted",
        gauge="submitted_requests",
    ),
    Metric(
        name="finished",
        unit="requests",
        help="requests that got all their tokens",
        at=("serve.finished",),
        whole=True,
        label="finished",
        heading="finished",
        gauge="finished_requests",
    ),
    Metric(
        name="rejected",
        unit="requests",
        help="requests that can never fit",
        at=("serve.rejected",),
        whole=True,
        label="rejected",
        heading="rejected",
        gauge="rejected_requests",
    ),
    Metric(
        name="cancelled",
        unit="requests",
        help="requests that the end of the run cut off",
        at=("serve.cancelled",),
        whole=True,
        label="cut off",
        heading="cut off",
        gauge="cancelled_requests",
    ),
    Metric(
        name="input_tokens",
        unit="tokens",
        help="prompt tokens of requests that got a token",
        at=("serve.input_tokens",),
        whole=True,
        label="input",
    ),
    Metric(
        name="output_tokens",
        unit="tokens",
        help="output tokens that came",
        at=("serve.output_tokens",),
        whole=True,
        label="output",
    ),
    Metric(
        name="cached_tokens",
        unit="tokens",
        help="prompt tokens that the prefix cache had",
        at=("serve.cached_tokens",),
        whole=True,
        label="input from the prefix cache",
    ),
    Metric(
        name="cached_share",
        unit="share",
        help="prompt tokens that the prefix cache had, as a share of all",
        of=_cached_share,
        exported=False,
        label="prompt tokens from the prefix cache",
        heading="cached",
        shown_unit="%",
        scale=100.0,
    ),
    Metric(
        name="preemptions",
        unit="preemptions",
        better="lower",
        help="how often a request lost its KV cache to others",
        at=("serve.preemptions",),
        whole=True,
        label="preemptions",
        shown_unit="",
        heading="preempted",
    ),
    Metric(
        name="steps",
        unit="steps",
        help="steps of the run",
        at=("serve.steps",),
        whole=True,
        label="steps",
    ),
    Metric(
        name="decode_steps",
        unit="steps",
        help="steps without prefill",
        at=("serve.decode_steps",),
        whole=True,
        label="steps without prefill",
    ),
    Metric(
        name="eager_decode_steps",
        unit="steps",
        help="steps without prefill that no captured graph ran",
        at=("serve.eager_decode_steps",),
        whole=True,
        exported=False,
        label="eager steps without prefill",
        heading="of these eager",
    ),
    Metric(
        name="decode_batch",
        unit="requests",
        help="mean requests in a step without prefill",
        at=("serve.decode_batch",),
        label="requests in a decode step",
        heading="requests in these",
        digits=3,
        gauge="decode_batch_requests",
    ),
    Metric(
        name="kernels",
        unit="kernels/step",
        help="kernels in one profiled step",
        at=("phases.kernels",),
        exported=False,
        label="kernels per step",
        shown_unit="",
        heading="kernels",
    ),
    Metric(
        name="attention_error",
        unit="",
        better="lower",
        help="relative error of the merged attention output against fp64, worst rank",
        at=("honesty.attention_error",),
        merged="max",
        exported=False,
        label="attention error",
        title="attention error against fp64",
    ),
    Metric(
        name="sm_clock_mhz_min",
        unit="MHz",
        help="lowest clock of any GPU while the point was measured",
        at=("gpu.sm_clock_mhz_min",),
        merged="min",
        exported=False,
        label="lowest SM clock",
    ),
    Metric(
        name="temperature_c_max",
        unit="°C",
        help="highest temperature of any GPU while the point was measured",
        at=("gpu.temperature_c_max",),
        merged="max",
        exported=False,
        label="highest temperature",
    ),
    Metric(
        name="dcp_ratio",
        unit="×",
        better="higher",
        help="output throughput over that of the same layout, load and settings with dcp 1",
        ranged=True,
        exported=False,
        label="output over the same layout without DCP",
    ),
)
METRIC = {metric.name: metric for metric in METRICS}


def _statistics(latency: str, *wanted: str) -> tuple[str, ...]:
    return tuple(f"{latency}_{statistic}_ms" for statistic in wanted)


PAGE = (
    "output_tok_s",
    "output_tok_s_per_gpu",
    "tok_s_per_user",
    "dcp_ratio",
    "steady_tok_s",
    "step_ms",
    *_statistics("itl", *PERCENTILES),
    *_statistics("ttft", *PERCENTILES),
    *_statistics("tpot", "p50", "p99"),
    *_statistics("e2el", "p50", "p99"),
    "request_s",
    "goodput_s",
    "preemptions",
    "cached_share",
    "decode_batch",
    "kv_capacity_tokens",
    "kv_tokens_per_gib",
    "kv_pool_bytes_per_gpu",
    "memory_peak_bytes",
    "idle_fraction",
    "host_syncs_per_step",
    "kernels",
    "attention_error",
    "sm_clock_mhz_min",
    "temperature_c_max",
)
"""What the page of a report shows of the point under the pointer, and offers as an axis."""
PAGE_TABLE = (
    "output_tok_s",
    "output_tok_s_per_gpu",
    "tok_s_per_user",
    "step_ms",
    *_statistics("itl", "p50", "p99"),
    *_statistics("ttft", "p50", "p99"),
    "goodput_s",
    "preemptions",
    "kv_capacity_tokens",
)
"""Of these, what stands in its table of points."""
DECODE_TABLE = (
    "output_tok_s_per_gpu",
    "tok_s_per_user",
    *_statistics("itl", *PERCENTILES),
    *_statistics("ttft", "p50"),
)
"""Columns of a report's table of points of `decode`, between the throughput with its interval and the objectives."""
PROFILE_TABLE = ("idle_fraction", "host_syncs_per_step", "allocations_per_step", "kernels", "host_plan_us")
"""Columns of its table of steps, after the step time."""
KV_TABLE = ("kv_pool_bytes_per_gpu", "kv_bytes_per_token_per_gpu")
"""Columns of its table of KV caches, before what they hold."""
SERVED_TABLE = (
    "output_tok_s",
    "steady_tok_s",
    "output_tok_s_per_gpu",
    "tok_s_per_user",
    *_statistics("ttft", "p50", "p99"),
    *_statistics("itl", "p50", "p99"),
)
"""Columns of its table of served points before the objectives."""
SERVED_COUNTS = ("goodput_s", "preemptions", "cached_share", "finished")
"""And after them."""
SERVED_DETAILS = (
    *_statistics("ttft", "mean", "p90", "p95"),
    *_statistics("itl", "mean", "p90", "p95"),
    *_statistics("tpot", "p50"),
    *_statistics("e2el", "p50"),
    "total_tok_s",
    "wall_s",
    "steps",
    "decode_steps",
    "decode_batch",
    "eager_decode_steps",
    "idle_fraction",
    "host_syncs_per_step",
    "rejected",
    "cancelled",
)
"""Columns of its second table of served points."""
REPLAYED = ("output_tok_s", *_statistics("ttft", "p50", "p99"), *_statistics("itl", "p50", "p99"))
"""What a replay is held against the live run of the same load by."""
DEFINED = (
    "step_ms",
    *LATENCIES,
    "output_tok_s",
    "steady_tok_s",
    "goodput_s",
    "output_tok_s_per_gpu",
    "tok_s_per_user",
)
"""Metrics and latencies that a report explains."""
DASHBOARD = (
    "output_tok_s_per_gpu",
    "output_tok_s",
    "tok_s_per_user",
    "step_ms",
    *_statistics("itl", "p50", "p99"),
    *_statistics("ttft", "p50", "p99"),
    *_statistics("tpot", "p50"),
    *_statistics("e2el", "p50"),
    "steady_tok_s",
    "request_s",
    "goodput_s",
    "host_syncs_per_step",
    "host_plan_us",
    "kv_capacity_tokens",
    "memory_peak_bytes",
    "attention_error",
)
"""What the dashboard follows over runs; the first is what it shows before another is chosen."""
COUNTED = ("kv_capacity_tokens", "memory_peak_bytes", "host_syncs_per_step")
COMPARED = {
    DECODE: ("step_ms", *_statistics("itl", "p90", "p99"), *COUNTED),
    SERVE: (
        "output_tok_s",
        "steady_tok_s",
        *_statistics("ttft", "p50", "p99"),
        *_statistics("itl", "p50", "p99"),
        *_statistics("tpot", "p50"),
        *_statistics("e2el", "p50"),
        "goodput_s",
        *COUNTED,
    ),
}
"""What `compare` compares of a point, by workload. In `decode` throughput is concurrency / step time, and the median
ITL is the step time: one test, of which the other two are aliases."""
SWEPT = ("step_ms", "output_tok_s", "output_tok_s_per_gpu", "tok_s_per_user")
"""What --json of a measuring command says of a point of `decode`."""
TOP = {
    "tok_s": "output_tok_s",
    "tok_s_per_gpu": "output_tok_s_per_gpu",
    "ttft_ms": "ttft_p50_ms",
    "itl_ms": "itl_p50_ms",
}
"""What `top` shows of a finished point, by its own names."""


def compared(workload: str, options: Sequence[str] = ()) -> list[Metric]:
    """What `compare` compares of a point of this workload; with names of options only these."""
    wanted = {named(option, workload) for option in options}
    return [METRIC[name] for name in COMPARED[workload] if not wanted or METRIC[name] in wanted]


def named(option: str, workload: str) -> Metric | None:
    """The metric that an option of `compare` names in this workload, if there is one."""
    found = (METRIC[name] for name in COMPARED[workload])
    return next((metric for metric in found if option in metric.options), None)


_OF_COMPARE = [metric for workload in COMPARED for metric in compared(workload)]
OPTIONS = tuple(dict.fromkeys([*(a for m in _OF_COMPARE for a in m.aliases), *(m.option for m in _OF_COMPARE)]))
"""What options of `compare` name metrics by; their own names do as well."""


def is_option(name: str) -> bool:
    """Whether an option of `compare` may name a metric so."""
    return any(named(name, workload) for workload in COMPARED)


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A metric of a point over its repeats: their median, and how far they reach."""

    metric: Metric
    median: float
    low: float | None
    high: float | None
    """95 % interval of a single measurement, or the envelope of several; None where one number is all there is."""
    each: tuple[float, ...]
    """Of each repeat that has it."""

    def shown(self) -> Value:
        """The same in the unit that is shown."""
        scale = self.metric.scale
        low, high = (None if end is None else end * scale for end in (self.low, self.high))
        return Value(self.metric, self.median * scale, low, high, tuple(v * scale for v in self.each))


def exported() -> tuple[Metric, ...]:
    """Those that exports carry, in the order of their columns."""
    return tuple(metric for metric in METRICS if metric.exported)


def known(metric: Metric, record: Record) -> float | None:
    """The number, unless it was not measured or is none: a record may hold anything."""
    value = metric.value(record)
    return None if value is None or not math.isfinite(value) else float(value)


def values(records: Sequence[Record], metrics: Iterable[Metric], *, derived: bool = False) -> list[Value]:
    """What repeats of a point say together, in the order of `metrics`; what none of them knows is left out.

    `derived`: with intervals that follow from those of other metrics, beside those that records hold.
    """
    found = []
    for metric in metrics:
        each, ends = [], []
        for record in records:
            value = known(metric, record)
            if value is None:
                continue
            each.append(value)
            interval = metric.interval(record)
            if interval is None and derived and metric.derived is not None:
                interval = metric.derived(record)
            if interval is not None:
                ends.append(interval)
        if each:
            low, high = _reach(each, ends)
            found.append(Value(metric, statistics.median(each), low, high, tuple(each)))
    return found


def _reach(each: Sequence[float], ends: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    if len(each) == 1 and not ends:
        return None, None
    low, high = min([*each, *(low for low, _ in ends)]), max([*each, *(high for _, high in ends)])
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)
