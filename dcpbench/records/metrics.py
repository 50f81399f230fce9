"""Define the catalogue of metrics: name, unit, direction and texts of each, its place in a record, and its views.

All code that prints, draws, exports, compares or checks a number uses this catalogue. A new metric is a field of the
record, an entry of METRICS, and its name in the lists at the end of this file for the views that show it. Formulas are
in `formulas`; `compare` resamples the scatter of repeats and launches, by the kind of error given here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from dcpbench.points.memory import GIB
from dcpbench.records.record import Conditions, Floor, Gpu, Interval, Kv, Metrics, Phases, Record, ServeMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

DECODE, SERVE = "decode", "serve"
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
PERCENTILES = STATISTICS[1:]
Direction = Literal["higher", "lower", ""]
Error = Literal["steps", "requests", "gaps", "tokens", "steady tokens", "objectives"]
"""Repeated observations of one launch from which the uncertainty of a metric can be estimated: times of steps,
latencies of requests, gaps between tokens, tokens in windows of the run or of its steady part, and whether requests met
their objectives.
"""


RATES, TIMES = ("tok/s", "requests/s"), ("ms", "µs")  # prefixes of units: more is better for rates, less for times
PARTS = {  # parts of a record that hold numbers, and itself; those of `kv` are metrics with `kv_` before their names
    "serve": ServeMetrics,
    "metrics": Metrics,
    "phases": Phases,
    "floor": Floor,
    "kv": Kv,
    "conditions": Conditions,
    "gpu": Gpu,
    "": Record,
}


def _collect_places() -> dict[str, dict[str, bool]]:
    """Return, by metric name, the paths in a record that hold the metric, and True for each path that holds an integer."""
    found: dict[str, dict[str, bool]] = collections.defaultdict(dict)
    for part, struct in PARTS.items():
        for field, kind in get_type_hints(struct).items():
            name = f"kv_{field}" if part == "kv" else field
            found[name][f"{part}.{field}".lstrip(".")] = kind in (int, int | None)
    return found


PLACES = _collect_places()


@dataclasses.dataclass(frozen=True, eq=False)
class Metric:
    """Define one metric of a point."""

    name: str  # name including the unit, as in a record
    unit: str  # unit in words
    help: str  # description in one line, which exports carry
    better: Direction | Literal["by unit"] = "by unit"  # by default higher for rates, lower for times; empty: neither
    _: dataclasses.KW_ONLY

    at: tuple[str, ...] = ()  # paths in a record, the first with an existing outermost part counts; default: by name
    of: Callable[[Record], float | None] | None = None  # computes it from a record; none, and no `at`: of points only
    derived: Callable[[Record], tuple[float, float] | None] | None = None  # ends of the interval by another metric
    merged: Literal["median", "max", "min", "first", ""] = ""  # repeats in a report; default: median, KV: first
    ranged: bool = False  # true if tables also show both ends of the interval, as `…_low` and `…_high`
    positive: bool = False  # true if no record can hold 0 for this metric
    whole: bool | None = None  # true if the metric is shown without decimals; by default if records hold an integer
    exported: bool = True
    gauge: str = ""  # Prometheus name without `dcpbench_`, if it cannot be derived from the unit

    label: str = ""  # label shown next to the unit
    title: str = ""  # longer label
    brief: str = ""  # shorter label
    heading: str = ""  # heading of the column in the tables of a report
    shown_unit: str | None = None  # unit for display, if it differs from the recorded one or the label has it already
    brief_unit: str | None = None  # unit shown with `brief`
    scale: float = 1.0  # factor from the unit to the one that is shown
    digits: int = 4  # significant ones in a report's tables
    term: str = ""  # the word that a report explains
    defined: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the explanation, by workload

    latency: str = ""  # `ttft` of `ttft_p99_ms`
    statistic: str = ""  # statistic of the metric, such as `p99`

    option: str = ""  # name of the metric in the options and the output of `compare`
    aliases: tuple[str, ...] = ()  # other names that options of `compare` take for it
    errors: Mapping[str, Error] = dataclasses.field(default_factory=dict)  # resampled, by workload; empty: exact counts
    absolute: bool = False  # true for small integers, for which a ratio is not informative

    def __post_init__(self) -> None:
        """Derive all fields that were not given."""
        places = PLACES.get(self.name, {})
        direction = "higher" if self.unit.startswith(RATES) else "lower" if self.unit in TIMES else ""
        self._set("better", direction if self.better == "by unit" else self.better)
        self._set("at", self.at or tuple(places))
        self._set("merged", self.merged or ("first" if self.name.startswith("kv_") else "median"))
        self._set("whole", any(places.values()) if self.whole is None else self.whole)
        self._set("label", self.label or self.name.replace("_", " "))
        self._set("title", self.title or self.label)
        self._set("brief", self.brief or self.label)
        self._set("shown_unit", self.unit if self.shown_unit is None else self.shown_unit)
        self._set("brief_unit", self.shown_unit if self.brief_unit is None else self.brief_unit)
        self._set("heading", self.heading or self.in_brief)
        self._set("term", self.term or self.label)
        self._set("option", self.option or self.name.removesuffix(f"_{self.unit}"))

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    @property
    def in_brief(self) -> str:
        """Return `TTFT p50 ms`; labels that contain their unit already, such as `output tok/s`, are unchanged."""
        unit = self.brief_unit or ""
        return self.brief if unit in self.brief else f"{self.brief} {unit}"

    @functools.cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Return `at`, split into names from the outermost inwards."""
        return tuple(tuple(path.split(".")) for path in self.at)

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Return the outermost parts of a record that may hold the metric, such as `serve`."""
        return frozenset(path[0] for path in self.paths)

    @property
    def options(self) -> tuple[str, ...]:
        """Return all names of the metric in options of `compare`."""
        return self.option, *self.aliases, self.name

    @property
    def shown_name(self) -> str:
        """Return the name with the displayed unit: `memory_peak_gib`."""
        return self.name.replace("_bytes", "_gib") if self.shown_unit == "GiB" else self.name

    def get_recorded(self, record: Record) -> float | Interval | None:
        """Return the value or interval that a record holds; None if it was not measured."""
        if self.of is not None:
            return self.of(record)
        for path in self.paths:
            found: object = getattr(record, path[0])
            if found is not None:
                for name in path[1:]:
                    found = getattr(found, name, None)
                return found if isinstance(found, float | int | Interval) else None
        return None

    def get_value(self, record: Record) -> float | None:
        """Return the value that a record holds, or the median of its interval."""
        found = self.get_recorded(record)
        return found.median if isinstance(found, Interval) else found

    def get_interval(self, record: Record) -> tuple[float, float] | None:
        """Return the ends of the 95 % interval, if a record holds one."""
        found = self.get_recorded(record)
        return (found.low, found.high) if isinstance(found, Interval) else None

    def get_forecast_bounds(self, record: Record) -> tuple[float, float] | None:
        """Return the bounds (low, high) of a forecast record; None if the record has none.

        For a step they are the ends of its interval, which includes the error of the forecast.
        """
        low, high = (getattr(record.emulated, f"{self.name}_{end}", None) for end in ("low", "high"))
        return self.get_interval(record) if low is None or high is None else (low, high)


@dataclasses.dataclass(frozen=True)
class Latency:
    """Define a latency of requests, from which one metric per statistic is made."""

    name: str
    label: str
    help: str
    defined: Mapping[str, str]

    def make_metric(self, statistic: str) -> Metric:
        """Return the metric of a statistic, such as `ttft_p50_ms`."""
        in_decode = self.name in OF_STEPS and statistic in PERCENTILES
        errors: dict[str, Error] = {SERVE: "gaps" if self.name == "itl" else "requests"}
        return Metric(
            f"{self.name}_{statistic}_ms",
            "ms",
            f"{statistic} of the {self.help}; absent where samples are too few",
            at=tuple(
                f"{part}.{self.name}_ms.{statistic}" for part in (("serve", "metrics") if in_decode else ("serve",))
            ),
            label=f"{self.label} {statistic}",
            heading="" if statistic in STATISTICS[:2] else statistic,
            latency=self.name,
            statistic=statistic,
            errors=errors | ({DECODE: "steps"} if in_decode else {}),
        )


OF_STEPS = ("ttft", "itl")  # latencies that `decode` has as well
_OF_TTFT = "t1 - t0: first output token - submitted (open loop: due), queueing included"
_OF_ITL = {
    DECODE: "gap between two output tokens of a request: one step, one sample per step; 0 between tokens of a step with drafts",
    SERVE: "each gap between consecutive output tokens of a request, pooled over requests",
}
_OF_TPOT = "(tn - t1) / (n - 1), one per request, none if n < 2"
_OF_E2EL = "tn - t0: last output token - submitted"
LATENCIES = {  # latencies by their name in --slo (names.OBJECTIVES)
    "ttft": Latency("ttft", "TTFT", "time to first token, queueing included", {SERVE: _OF_TTFT}),
    "itl": Latency("itl", "ITL", "gap between two output tokens of a request", _OF_ITL),
    "tpot": Latency("tpot", "TPOT", "time per output token after the first, one per request", {SERVE: _OF_TPOT}),
    "e2el": Latency("e2el", "E2EL", "time from submission to the last token", {SERVE: _OF_E2EL}),
}


def _make_definitions(definition: str) -> dict[str, str]:
    return dict.fromkeys((DECODE, SERVE), definition)


def _compute_per_gpu_interval(record: Record) -> tuple[float, float] | None:
    """Return the interval of the output throughput divided by the number of GPUs."""
    if record.metrics is None:
        return None
    return record.metrics.output_tok_s.low / record.point.tp, record.metrics.output_tok_s.high / record.point.tp


def _compute_per_user_interval(record: Record) -> tuple[float, float] | None:
    """Return the inverted interval of the step time, times the tokens of a step. Unit: tok/s/user."""
    if record.metrics is None:
        return None
    tokens, step = record.point.tokens_per_step, record.metrics.step_ms
    return 1000 * tokens / step.high, 1000 * tokens / step.low


def _compute_kv_tokens_per_gib(record: Record) -> float | None:
    kv = record.kv
    return kv.capacity_tokens / (kv.pool_bytes_per_gpu / GIB) if kv and kv.pool_bytes_per_gpu else None


def _compute_cached_share(record: Record) -> float | None:
    serve = record.serve
    if serve is None or serve.cached_tokens is None or not serve.input_tokens:
        return None
    return serve.cached_tokens / serve.input_tokens


def _get_tokens_per_step(record: Record) -> float | None:
    return record.serve.speculation.tokens_per_step if record.serve and record.serve.speculation else None


def _make_busy_share(kind: str) -> Callable[[Record], float | None]:
    """Return a function for the share of the run in which instances of a kind ran steps."""

    def get_share(record: Record) -> float | None:
        found = record.serve.instances if record.serve else None
        return found.busy_share.get(kind, found.busy_share.get("both")) if found else None

    return get_share


def _compute_floor_share(record: Record) -> float | None:
    """Return the floor over the measured step time; None for a floor of 0."""
    floor, measured = record.floor, record.metrics
    return floor.floor_ms / measured.step_ms.median if measured and floor and floor.floor_ms else None


def _compute_joules_per_token(record: Record) -> float | None:
    """Return the energy per output token in J: power of all GPUs over output throughput; None for emulation and replay."""
    power_w = record.gpu.power_w_all if record.gpu and not record.point.emulate else None
    found = record.metrics.output_tok_s.median if record.metrics else record.serve and record.serve.output_tok_s
    return power_w / found if power_w and found else None


IN_GIB: dict[str, Any] = {"shown_unit": "GiB", "scale": 1 / GIB}
IN_PERCENT: dict[str, Any] = {"shown_unit": "%", "scale": 100.0}
METRICS: tuple[Metric, ...] = (
    Metric(
        "output_tok_s",
        "tok/s",
        "output tokens per second of the whole layout",
        ranged=True,
        positive=True,
        gauge="output_tokens_per_second",
        label="output",
        title="output throughput",
        brief="output tok/s",
        term="output throughput",
        defined={
            DECODE: "concurrency / step time, of the whole layout; times the tokens of a step with drafts",
            SERVE: "output tokens / wall time (first submission to last token), ramp and drain included",
        },
        option="tok_s",
        aliases=("slower",),
        errors={SERVE: "tokens"},
    ),
    Metric(
        "output_tok_s_per_gpu",
        "tok/s/GPU",
        "output tokens per second and GPU",
        derived=_compute_per_gpu_interval,
        positive=True,
        gauge="output_tokens_per_second_per_gpu",
        label="output per GPU",
        title="output throughput per GPU",
        heading="tok/s/GPU",
        term="per GPU",
        defined={
            DECODE: "output throughput / tp; neither dp nor dcp adds GPUs",
            SERVE: "output throughput / GPUs of all instances and stages; neither dp nor dcp adds GPUs",
        },
    ),
    Metric(
        "tok_s_per_user",
        "tok/s/user",
        "1000 over the median TPOT in ms",
        derived=_compute_per_user_interval,
        positive=True,
        gauge="output_tokens_per_second_per_user",
        label="speed for one user",
        heading="tok/s/user",
        digits=3,
        term="per user",
        defined={
            DECODE: "1000 / step time in ms; times the tokens of a step with drafts",
            SERVE: "1000 / median TPOT in ms",
        },
    ),
    Metric(
        "total_tok_s",
        "tok/s",
        "input and output tokens per second of the whole layout",
        gauge="input_and_output_tokens_per_second",
        label="input + output",
    ),
    Metric(
        "steady_tok_s",
        "tok/s",
        "output tokens per second while the target concurrency is held",
        gauge="steady_output_tokens_per_second",
        label="steady output",
        title="steady output throughput",
        brief="steady tok/s",
        heading="steady",
        term="steady",
        defined={SERVE: "the same over the longest time with at least 95 % of a closed loop's clients in flight"},
        errors={SERVE: "steady tokens"},
    ),
    Metric("steady_s", "s", "how long the target concurrency is held", exported=False),
    Metric(
        "request_throughput",
        "requests/s",
        "finished requests per second",
        gauge="requests_per_second",
        label="finished requests",
    ),
    Metric(
        "request_goodput",
        "requests/s",
        "requests per second that meet every objective",
        gauge="goodput_requests_per_second",
        label="goodput",
        title="goodput under the line's objectives",
        brief_unit="req/s",
        digits=3,
        defined={SERVE: "finished requests that meet every objective / wall time; ITL in 99 of 100 gaps"},
        option="goodput",
        errors={SERVE: "objectives"},
    ),
    Metric(
        "step_ms",
        "ms",
        "median time of a decode step, slowest rank",
        ranged=True,
        positive=True,
        label="step time",
        defined={DECODE: "slowest rank's time from graph launch to the step's end; median with its 95 % interval"},
        option="step_time",
        aliases=("slower", "tok_s", "itl_p50", "output_tok_s", "itl_p50_ms"),
        errors={DECODE: "steps"},
    ),
    Metric(
        "floor_ms",
        "ms",
        "time below which a decode step cannot be at the machine's measured rates",
        "",
        label="floor of a step",
        brief="floor",
        term="floor",
        defined={
            DECODE: "sum over a step's operators of max(bytes / read rate, operations / matrix rate, what ranks send)"
        },
    ),
    Metric(
        "joules_per_token",
        "J/token",
        "energy of all GPUs for an output token: their mean power while measured, by NVML's counters, over the output throughput",
        "lower",
        of=_compute_joules_per_token,
        label="energy",
        brief="J/token",
        defined=_make_definitions(
            "mean power of all GPUs while the point was measured (NVML's energy counters) / output throughput"
        ),
    ),
    Metric(
        "floor_share",
        "share",
        "floor of a decode step over its time: 1 where the machine allows no faster step",
        "higher",
        of=_compute_floor_share,
        label="share of the machine's limit",
        brief="of the limit",
        **IN_PERCENT,
    ),
    *(latency.make_metric(statistic) for latency in LATENCIES.values() for statistic in STATISTICS),
    Metric(
        "host_syncs_per_step",
        "syncs/step",
        "calls in one step that make the host wait for the GPU",
        "lower",
        merged="max",
        shown_unit="",
        brief="host syncs",
        brief_unit="/step",
        heading="host syncs",
        digits=3,
        option="syncs",
        absolute=True,
    ),
    Metric(
        "allocations_per_step",
        "allocations/step",
        "calls to CUDA's allocator in one timed step",
        "lower",
        merged="max",
        exported=False,
        heading="allocations",
        digits=3,
    ),
    Metric(
        "host_plan_us",
        "µs",
        "host time to plan one step",
        label="host time to plan a step",
        brief="host plan",
        digits=3,
    ),
    Metric(
        "idle_fraction",
        "share",
        "share of a step in which no kernel runs",
        "lower",
        gauge="gpu_idle_ratio",
        label="GPU idle",
        **IN_PERCENT,
    ),
    Metric(
        "kv_capacity_tokens",
        "tokens",
        "tokens that the KV pools hold, each counted once",
        "higher",
        label="KV capacity",
    ),
    Metric(
        "prefill_floor_share",
        "share",
        "floors of steps with chunks of prompts over their times",
        "higher",
        label="steps with prompts: share of the machine's limit",
        heading="prefill steps, of the limit",
        **IN_PERCENT,
    ),
    Metric(
        "prefill_matmul_share",
        "share",
        "operations of steps with chunks of prompts over what the matrix rate would do in their time",
        "higher",
        label="steps with prompts: share of the matrix rate",
        heading="prefill steps, of the matrix rate",
        **IN_PERCENT,
    ),
    Metric(
        "decode_floor_share",
        "share",
        "floors of steps without prefill over their times",
        "higher",
        label="steps without prefill: share of the machine's limit",
        heading="decode steps, of the limit",
        **IN_PERCENT,
    ),
    Metric("kv_capacity_requests", "requests", "requests of the point's context that fit at once", "higher"),
    Metric(
        "kv_pool_bytes_per_gpu",
        "bytes",
        "size of one GPU's KV pool",
        label="KV pool per GPU",
        heading="pool GiB per GPU",
        **IN_GIB,
    ),
    Metric(
        "kv_bytes_per_token_per_gpu",
        "bytes",
        "KV bytes of a token, averaged over the layout's GPUs",
        "lower",
        brief="bytes per token per GPU",
        digits=5,
    ),
    Metric(
        "kv_tokens_per_gib",
        "tokens/GiB",
        "tokens that the KV pools hold, over the GiB of one GPU's pool",
        "higher",
        of=_compute_kv_tokens_per_gib,
        exported=False,
        label="KV tokens per GiB on each GPU",
        shown_unit="tokens",
        term="KV tokens per GiB",
        defined=_make_definitions("tokens that the layout's pools hold, each counted once / GiB of one GPU's pool"),
    ),
    Metric(
        "memory_peak_bytes",
        "bytes",
        "peak memory of a GPU",
        "lower",
        merged="max",
        label="memory peak per GPU",
        title="peak memory",
        brief="memory peak",
        option="memory",
        **IN_GIB,
    ),
    Metric("wall_s", "s", "time from the first submission to the last token", label="wall"),
    Metric("submitted", "requests", "requests that were submitted"),
    Metric("finished", "requests", "requests that got all their tokens"),
    Metric("rejected", "requests", "requests that can never fit", heading="requests rejected"),
    Metric("cancelled", "requests", "requests that the end of the run cut off", heading="requests cut off"),
    Metric("failed", "requests", "requests that a real server did not answer to their end", heading="requests failed"),
    Metric("input_tokens", "tokens", "prompt tokens of requests that got a token"),
    Metric("output_tokens", "tokens", "output tokens that came"),
    Metric("cached_tokens", "tokens", "prompt tokens that the prefix cache had"),
    Metric(
        "preemptions",
        "preemptions",
        "how often a request lost its KV cache to others",
        "lower",
        shown_unit="",
        heading="preempted",
    ),
    Metric("steps", "steps", "steps of the run", at=("serve.steps",)),
    Metric("decode_steps", "steps", "steps without prefill"),
    Metric(
        "eager_decode_steps",
        "steps",
        "steps without prefill past the largest captured graph",
        exported=False,
    ),
    Metric(
        "decode_batch",
        "requests",
        "mean requests in a step without prefill",
        label="requests in a decode step",
        digits=3,
    ),
    Metric(
        "tokens_per_step",
        "tokens/step",
        "mean tokens of a request and step that verifies drafts, the sampled one included",
        of=_get_tokens_per_step,
        shown_unit="",
        digits=3,
    ),
    Metric(
        "cached_share",
        "share",
        "prompt tokens that the prefix cache had, as a share of all",
        of=_compute_cached_share,
        exported=False,
        label="prompt tokens from the prefix cache",
        heading="cached",
        **IN_PERCENT,
    ),
    Metric(
        "prefill_busy_share",
        "share",
        "share of the run in which instances that prefill ran steps, where several instances serve",
        of=_make_busy_share("prefill"),
        label="prefill instances busy",
        heading="prefill busy",
        **IN_PERCENT,
    ),
    Metric(
        "decode_busy_share",
        "share",
        "share of the run in which instances that decode ran steps, where several instances serve",
        of=_make_busy_share("decode"),
        label="decode instances busy",
        heading="decode busy",
        **IN_PERCENT,
    ),
    Metric(
        "link_busy_share",
        "share",
        "share of the run in which the links of instances that prefill sent KV",
        at=("serve.instances.link_busy_share",),
        label="KV links busy",
        heading="links busy",
        **IN_PERCENT,
    ),
    Metric(
        "transfer_p50_ms",
        "ms",
        "p50 of the time from a request's first token to the end of its KV's transfer, waiting included",
        at=("serve.instances.transfer_ms.p50",),
        label="KV transfer p50",
        heading="transfer p50 ms",
    ),
    Metric(
        "transfer_wait_p50_ms",
        "ms",
        "p50 of its part before the transfer began: waiting for links and for KV capacity",
        at=("serve.instances.transfer_wait_ms.p50",),
        label="KV transfer p50, waiting",
        heading="transfer waiting p50 ms",
    ),
    Metric(
        "kernels",
        "kernels/step",
        "kernels in one profiled step",
        whole=False,
        exported=False,
        label="kernels per step",
        shown_unit="",
        heading="kernels",
    ),
    Metric(
        "attention_error",
        "",
        "relative error of the merged attention output against fp64, worst rank",
        "lower",
        merged="max",
        exported=False,
        title="attention error against fp64",
    ),
    Metric(
        "sm_clock_mhz_min",
        "MHz",
        "lowest clock of any GPU while the point was measured",
        merged="min",
        exported=False,
        label="lowest SM clock",
    ),
    Metric(
        "temperature_c_max",
        "°C",
        "highest temperature of any GPU while the point was measured",
        merged="max",
        exported=False,
        label="highest temperature",
    ),
    Metric("layers", "layers", "layers of the model", merged="first", gauge="model_layers"),
    Metric(
        "layers_held",
        "layers",
        "distinct layers in memory; where they are fewer than the model's, they were cycled through",
        merged="min",
        gauge="held_layers",
    ),
    Metric(
        "dcp_ratio",
        "×",
        "output throughput over that of the same layout, load and settings with dcp 1",
        "higher",
        ranged=True,
        exported=False,
        label="output over the same layout without DCP",
    ),
)
METRIC = {metric.name: metric for metric in METRICS}


def _list_metrics(names: str) -> tuple[Metric, ...]:
    return tuple(METRIC[name] for name in names.split())


PAGE = _list_metrics(  # metrics that the HTML report shows for the point under the pointer, and offers as an axis
    """
    output_tok_s output_tok_s_per_gpu tok_s_per_user dcp_ratio steady_tok_s
    step_ms floor_ms floor_share itl_p50_ms itl_p90_ms itl_p95_ms itl_p99_ms ttft_p50_ms ttft_p90_ms ttft_p95_ms ttft_p99_ms
    tpot_p50_ms tpot_p99_ms e2el_p50_ms e2el_p99_ms
    request_throughput request_goodput preemptions cached_share decode_batch tokens_per_step
    prefill_busy_share decode_busy_share link_busy_share transfer_p50_ms transfer_wait_p50_ms
    kv_capacity_tokens kv_tokens_per_gib kv_pool_bytes_per_gpu memory_peak_bytes joules_per_token
    prefill_floor_share prefill_matmul_share decode_floor_share
    idle_fraction host_syncs_per_step kernels attention_error sm_clock_mhz_min temperature_c_max
    """
)
PAGE_TABLE = _list_metrics(  # metrics of PAGE that are columns in the table of points
    """
    output_tok_s output_tok_s_per_gpu tok_s_per_user step_ms itl_p50_ms itl_p99_ms ttft_p50_ms ttft_p99_ms
    request_goodput preemptions kv_capacity_tokens
    """
)
DECODE_TABLE = _list_metrics(  # columns of a report's table of `decode`, between throughput and objectives
    "output_tok_s_per_gpu tok_s_per_user itl_p50_ms itl_p90_ms itl_p95_ms itl_p99_ms ttft_p50_ms"
)
PROFILE_TABLE = _list_metrics(  # columns of a report's table of steps, after the step time
    "idle_fraction host_syncs_per_step allocations_per_step kernels host_plan_us"
)
KV_TABLE = _list_metrics("kv_pool_bytes_per_gpu kv_bytes_per_token_per_gpu")  # first columns of the table of KV caches
SERVED_TABLE = _list_metrics(  # columns of its table of served points before the objectives
    """
    output_tok_s steady_tok_s output_tok_s_per_gpu tok_s_per_user ttft_p50_ms ttft_p99_ms itl_p50_ms itl_p99_ms
    kv_capacity_tokens
    """
)
SERVED_COUNTS = _list_metrics(  # last columns of a report's table of served points
    "request_goodput preemptions cached_share finished"
)
SERVED_DETAILS = _list_metrics(  # columns of its second table of served points
    """
    ttft_mean_ms ttft_p90_ms ttft_p95_ms itl_mean_ms itl_p90_ms itl_p95_ms tpot_p50_ms e2el_p50_ms total_tok_s wall_s
    steps decode_steps decode_batch eager_decode_steps prefill_floor_share prefill_matmul_share decode_floor_share
    idle_fraction host_syncs_per_step rejected cancelled
    """
)
INSTANCES = _list_metrics(  # division of work between instances that serve together, and transfers
    "prefill_busy_share decode_busy_share link_busy_share transfer_p50_ms transfer_wait_p50_ms"
)
DRAFTED = _list_metrics("tpot_p50_ms tokens_per_step")  # further columns if steps verify drafts, as most gaps are 0
FLOORS = ("floor_ms", "floor_share", "prefill_floor_share", "prefill_matmul_share", "decode_floor_share")
"""Metrics derived from measured rates of the machine; tables leave them out if no point has them."""
REPLAYED = _list_metrics("output_tok_s ttft_p50_ms ttft_p99_ms itl_p50_ms itl_p99_ms")  # compare replay and live run
DASHBOARD = _list_metrics(  # metrics that the dashboard follows over runs; the first one is shown by default
    """
    output_tok_s_per_gpu output_tok_s tok_s_per_user
    step_ms floor_share itl_p50_ms itl_p99_ms ttft_p50_ms ttft_p99_ms tpot_p50_ms e2el_p50_ms steady_tok_s request_throughput request_goodput
    host_syncs_per_step host_plan_us kv_capacity_tokens memory_peak_bytes joules_per_token attention_error
    """
)
_COUNTED = "kv_capacity_tokens memory_peak_bytes host_syncs_per_step"
COMPARED = {  # metrics that `compare` tests, by workload; throughput and median ITL of `decode` are its step time
    DECODE: _list_metrics(f"step_ms itl_p90_ms itl_p99_ms {_COUNTED}"),
    SERVE: _list_metrics(
        "output_tok_s steady_tok_s ttft_p50_ms ttft_p99_ms itl_p50_ms itl_p99_ms tpot_p50_ms e2el_p50_ms request_goodput "
        f"{_COUNTED}"
    ),
}
SWEPT = _list_metrics("step_ms output_tok_s output_tok_s_per_gpu tok_s_per_user")  # printed for `decode` with --json
TOP = {  # metrics that `top` shows for a finished point, by the names that it uses
    "tok_s": METRIC["output_tok_s"],
    "tok_s_per_gpu": METRIC["output_tok_s_per_gpu"],
    "ttft_ms": METRIC["ttft_p50_ms"],
    "itl_ms": METRIC["itl_p50_ms"],
}


def get_definitions(workload: str) -> dict[str, tuple[str, str]]:
    """Return the terms that a report explains for this workload, each with its explanation and unit."""
    latencies = [(latency.label, latency.defined, "ms") for latency in LATENCIES.values()]
    step, *others = (
        (metric.term, metric.defined, metric.unit)
        for metric in _list_metrics(
            "step_ms output_tok_s steady_tok_s request_goodput output_tok_s_per_gpu tok_s_per_user"
        )
    )
    return {
        term: (explanations[workload], unit)
        for term, explanations, unit in (step, *latencies, *others)
        if workload in explanations
    }


def list_compared_metrics(workload: str, options: Sequence[str] = ()) -> list[Metric]:
    """Return the metrics that `compare` tests for a point of this workload, of `options` only the named ones."""
    wanted = {find_compared_metric(option, workload) for option in options}
    return [metric for metric in COMPARED[workload] if not wanted or metric in wanted]


def find_compared_metric(option: str, workload: str) -> Metric | None:
    """Return the metric with this option name of `compare` for the workload, or None."""
    return next((metric for metric in COMPARED[workload] if option in metric.options), None)


_OF_COMPARE = sorted((metric for found in COMPARED.values() for metric in found), key=lambda metric: not metric.errors)
OPTIONS = tuple(  # names of metrics in options of `compare`; the names of the metrics themselves are accepted as well
    dict.fromkeys([*(a for m in _OF_COMPARE for a in m.aliases if a not in METRIC), *(m.option for m in _OF_COMPARE)])
)


def is_option(name: str) -> bool:
    """Return True if an option of `compare` may use this name for a metric."""
    return any(find_compared_metric(name, workload) for workload in COMPARED)


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """Hold a metric of a point over its repeats: their median and their range."""

    metric: Metric
    median: float
    low: float | None  # lower end of the 95 % interval, or of the envelope of several; None for a single number
    high: float | None  # upper end
    each: tuple[float, ...]  # value of each repeat that has one

    def convert_to_shown_unit(self) -> Value:
        """Return the value in the displayed unit."""
        scale = self.metric.scale
        low, high = (None if end is None else end * scale for end in (self.low, self.high))
        return Value(self.metric, self.median * scale, low, high, tuple(v * scale for v in self.each))


def list_exported_metrics() -> tuple[Metric, ...]:
    """Return the exported metrics, in the order of their columns."""
    return tuple(metric for metric in METRICS if metric.exported)


def get_finite_value(metric: Metric, record: Record) -> float | None:
    """Return the number, or None if it was not measured or is not a valid number."""
    value = metric.get_value(record)
    return None if value is None or not math.isfinite(value) else float(value)


def merge_values(records: Sequence[Record], metrics: Iterable[Metric], *, derived: bool = False) -> list[Value]:
    """Return the merged value of repeats of a point for each metric, in the order of `metrics`; leave out unknown ones.

    With `derived`, also use intervals that are derived from those of other metrics, in addition to recorded ones.
    """
    found = []
    for metric in metrics:
        each, ends = [], []
        for record in records:
            value = get_finite_value(metric, record)
            if value is None:
                continue
            each.append(value)
            interval = metric.get_interval(record)
            if interval is None and derived and metric.derived is not None:
                interval = metric.derived(record)
            if interval is not None:
                ends.append(interval)
        if each:
            low, high = _compute_range(each, ends)
            found.append(Value(metric, statistics.median(each), low, high, tuple(each)))
    return found


def _compute_range(each: Sequence[float], ends: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    if len(each) == 1 and not ends:
        return None, None
    low, high = min([*each, *(low for low, _ in ends)]), max([*each, *(high for _, high in ends)])
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)
