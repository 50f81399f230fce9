"""Forecast a load from a record, from measured step times in virtual time, or from an estimate of its steps. No torch."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.points import latency_bands
from dcpbench.points.batches import find_smaller_batch
from dcpbench.points.cluster_specs import get_limits
from dcpbench.points.gpus import GPUS
from dcpbench.points.names import OBJECTIVES
from dcpbench.points.pipeline import (
    Round,
    check_hosts,
    compute_round,
    count_micro_batches,
    make_stages,
    predict_hops_us,
    split_chunks,
)
from dcpbench.points.roofline import Sharding, StepRows
from dcpbench.points.step_calls import predict_calls
from dcpbench.recommend import estimate
from dcpbench.records.metrics import METRIC
from dcpbench.records.objectives import JudgedObjective, judge_latencies
from dcpbench.records.record import Percentiles, get_origin, parse_origin
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.serving import gain_split, step_cases
from dcpbench.serving.draft_steps import estimate_draft_steps
from dcpbench.serving.gain_split import Side
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.policies import make_scheduler
from dcpbench.serving.replay import get_loop_timing, make_engine_config, replay_requests
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.step_model import Slowdown, StepModel, compute_step_works
from dcpbench.serving.step_times import MODELLED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcpbench.points.budget import EnginePlan
    from dcpbench.points.cluster_specs import Machine
    from dcpbench.points.latency_bands import Metric
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.recommend.estimate import Steps
    from dcpbench.records.record import Conditions, Record, ServeMetrics
    from dcpbench.serving.gain_split import GainSplit
    from dcpbench.serving.replay import ReplayResult
    from dcpbench.serving.requests import Step
    from dcpbench.serving.step_times import EngineServer, StepTimes

    Watch = Callable[[str], None]

ROUNDS = 4  # requests of each client of an estimate: more change the result by less than its band
WATCHED_STEPS = 250  # number of steps between progress reports: about a second with a thousand requests in flight
MEASURED, REPLAYED, EMULATED, ESTIMATED = SOURCES = ("measured", "replayed", "emulated", "estimated")  # the best first
PERCENTILES = ("p50", "p90", "p95", "p99")

NONE = Percentiles()  # of a latency that is not known
Bounds = tuple[float, float]  # low and high, in ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """Hold the forecast of a layout under a load, and its source."""

    point: Point
    source: str  # source of the figure, one of SOURCES
    basis: str  # name of the run, the file, or the inputs of the estimate
    engine: str = ""  # kernels and scheduling policy, such as `vLLM 0.26.0`; empty for dcpbench's own
    tok_s: float
    low: float
    high: float  # upper end of output tok/s: the interval of a record, the band of an estimate
    comm_errors: dict[str, float] = dataclasses.field(default_factory=dict)  # band's part from links, by kind of call
    ratio_error: float = 0.0  # remaining relative error of the ratio of two such figures
    factor: float | None = None  # correction of an estimate: records of other layouts over their estimates
    ttft_ms: Percentiles = NONE
    itl_ms: Percentiles = NONE
    tpot_ms: Percentiles = NONE
    e2el_ms: Percentiles = NONE
    preemptions: int | None = None
    joules_per_token: float | None = None  # energy per token of a record, if it has any
    launch_spread: float | None = REPEATS_AGREE_WITHIN  # share by which another launch may differ; None if not known
    ttft_bounds_ms: Bounds | None = None  # bounds of the TTFT p50; None if measured, or of unknown error
    itl_bounds_ms: Bounds | None = None  # bounds of the ITL p50
    bubble_share: float | None = None  # share of a decode round that the mean pipeline stage waits; None without stages
    mixed_share: float | None = None  # share of an estimate's gaps between tokens with prompts in their step
    layers_held: tuple[int, int] | None = (
        None  # (layers in memory, layers of the model) if the whole model does not fit
    )

    @property
    def output_bounds_tok_s(self) -> tuple[float, float]:
        """Return the ends of the output: its own interval, widened to the difference between launches if that is known."""
        repeats = 1 + (self.launch_spread or 0.0)
        return min(self.low, self.tok_s / repeats), max(self.high, self.tok_s * repeats)

    @property
    def origin(self) -> str:
        """Return `replayed`, `estimated, corrected`, or `replayed, vLLM 0.26.0` for another engine."""
        return ", ".join(filter(None, (self.source, "" if self.factor is None else "corrected", self.engine)))

    @property
    def label(self) -> str:
        """Return the name of the point, as format_point formats it."""
        return format_point(self.point)

    def judge(self, slo: Mapping[str, float]) -> list[JudgedObjective]:
        """Return each objective with the latency that it was compared with."""
        return judge_latencies(self, slo)

    def list_missed(self, slo: Mapping[str, float]) -> list[str]:
        """Return each objective that is not met, such as `ITL p99 414 ms`, or `ITL, which is not known`."""
        return [judged.format() for judged in self.judge(slo) if not judged.met]


def format_point(point: Point) -> str:
    """Return a layout with its exchange and placement of experts: `tp8·dcp8 (a2a)`, `tp8·dcp8 (a2a, ep8)`, `tp8·dp8·ep1`."""
    exchange = point.format_exchange_label() if point.dcp > 1 else ""
    details = ", ".join(filter(None, (exchange, point.ep_label)))
    return point.layout_name + (f" ({details})" if details else "")


def from_record(record: Record, run: str, launch_spread: float | None = REPEATS_AGREE_WITHIN) -> Forecast:
    """Return the forecast of a point that ran; raise UsageError for one without an output rate."""
    point = record.point
    ends = {f"{name}_bounds_ms": _find_emulated_ends(record, name) for name in ("ttft", "itl")}
    common: dict[str, Any] = {
        "point": point,
        "source": EMULATED if point.emulate else REPLAYED if point.load and point.load.mode == "replay" else MEASURED,
        "basis": run,
        "engine": _find_engine(record),
        "launch_spread": launch_spread,
        "joules_per_token": METRIC["joules_per_token"].get_value(record),
        "layers_held": _find_layers_held(record.conditions),
    }
    if record.metrics is not None:
        rate = record.metrics.output_tok_s
        latencies: dict[str, Any] = {"itl_ms": record.metrics.itl_ms}
        if point.mtp:
            latencies = _make_step_latencies(record.metrics.step_ms.median, point.tokens_per_step)
        return Forecast(tok_s=rate.median, low=rate.low, high=rate.high, **latencies, **common)
    if record.serve is None:
        raise UsageError(f"{run}: a point of {point.layout_name} has no figures.")
    return _make_served_forecast(record.serve, **common, **ends)


def _make_served_forecast(serve: ServeMetrics, **more: Any) -> Forecast:  # noqa: ANN401 - fields of a forecast
    """Return a forecast with the figures of a served load, of which the output has no interval of its own."""
    tok_s = serve.output_tok_s
    return Forecast(tok_s=tok_s, low=tok_s, high=tok_s, preemptions=serve.preemptions, **_make_latencies(serve), **more)


def _find_engine(record: Record) -> str:
    """Return the name of the engine that a record is of; empty for dcpbench's own."""
    origin = parse_origin(get_origin(record))
    return origin.label if origin.engine else ""


def _find_emulated_ends(record: Record, metric: str) -> Bounds | None:
    """Return the ends of a p50 that one rank was emulated for; None if it was measured, and in records without ends."""
    low, high = (getattr(record.emulated, f"{metric}_p50_ms_{end}", None) for end in ("low", "high"))
    return None if low is None or high is None else (low, high)


def _find_layers_held(conditions: Conditions | None) -> tuple[int, int] | None:
    """Return (layers in memory, layers of the model) of what was measured; None if all were held, or if unknown."""
    if conditions is None or conditions.layers_held >= conditions.layers:
        return None
    return conditions.layers_held, conditions.layers


def _make_latencies(of: ServeMetrics | Forecast, scale: float = 1.0) -> dict[str, Any]:
    """Return the latencies of OBJECTIVES, each multiplied by `scale`."""
    return {f"{name}_ms": _make_percentiles(getattr(of, f"{name}_ms"), scale) for name in OBJECTIVES}


def _make_percentiles(of: Percentiles, scale: float) -> Percentiles:
    known = {name: getattr(of, name) for name in PERCENTILES}
    return Percentiles(samples=of.samples, **{name: None if ms is None else ms * scale for name, ms in known.items()})


def estimate_point(
    point: Point,
    plan: EnginePlan,
    machine: Machine,
    settings: Settings,
    steps: Steps,
    fitted: Mapping[str, float],
    watch: Watch = lambda _: None,
    *,
    micro_batches: int = 0,
) -> Forecast:
    """Estimate a point from the floors of its steps.

    `fitted` are terms of `steps`; `watch` is called with the number of steps served; `micro_batches` as of Estimator. Raise UsageError if a rate or a
    call of the machine is unknown.
    """
    point = limit_requests(point)
    estimator = Estimator(point, machine, fitted, micro_batches)
    error = steps.band + _compute_scale_error(machine, steps)
    basis = f"floors of {machine.gpu}, shares of {len(steps.sources)} published runs on {steps.machine}"
    held = (plan.layers_held, plan.layers) if plan.layers_held < plan.layers else None
    rows = estimator.make_decode_rows(point.concurrency, point.context)
    own = estimator.compute_comm_errors(rows)
    bubble = estimator.estimate_round(rows).bubble_share if point.pp > 1 else None
    make = functools.partial(
        _make_estimate, point, basis, error=error, own=own, steps=steps, layers_held=held, bubble_share=bubble
    )
    if point.load is None:
        ms, tokens = estimator.estimate_ms(rows), point.tokens_per_step
        return make(tok_s=tokens * point.concurrency / ms * 1e3, **_make_step_latencies(ms, tokens))
    found = replay_estimated(estimator, point, plan, settings, watch)
    beyond = _compute_scale_error(machine, steps) + sum(own.values())
    ttft_bounds_ms, itl_bounds_ms = _find_ends("ttft", point, found, beyond), _find_ends("itl", point, found, beyond)
    return make(
        tok_s=found.serve.output_tok_s,
        **_make_latencies(found.serve) | ({} if itl_bounds_ms else {"itl_ms": NONE}),
        ttft_bounds_ms=ttft_bounds_ms,
        itl_bounds_ms=itl_bounds_ms,
        mixed_share=found.mixed_share,
        preemptions=found.serve.preemptions,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedEstimate:
    """Hold a load that was served in virtual time, with estimated steps."""

    serve: ServeMetrics
    mixed_share: float  # share of the gaps between tokens that have prompts in their step


def replay_estimated(
    estimator: Estimator, point: Point, plan: EnginePlan, settings: Settings, watch: Watch = lambda _: None
) -> ServedEstimate:
    """Serve the requests of a point with estimated step times; `watch` is called with the number of steps served."""
    scheduler = Scheduler(SchedulerConfig.from_point(point, pages=plan.pages, max_context=plan.max_context))
    found, serve = _serve_load(point, scheduler, Watched(EstimatedTimes(estimator, point, plan), watch), settings)
    gaps = sum(max(len(sample.token_s) - 1, 0) for sample in found.traffic.samples)
    return ServedEstimate(serve=serve, mixed_share=1 - found.counts.decoded_tokens / gaps if gaps else 0.0)


def split_gain(
    point: Point,
    baseline: Point,
    plans: Mapping[str, EnginePlan],
    machine: Machine,
    settings: Settings,
    fitted: Mapping[str, float],
) -> GainSplit:
    """Split the gain of a served point with DCP over its baseline by cause, with estimated step times.

    `plans` by layout name, `fitted` as in `estimate_point`. Raise its errors.
    """
    point, baseline = limit_requests(point), limit_requests(baseline)
    sides = {}
    for one in (point, baseline):
        plan = plans[one.layout_name]
        config = SchedulerConfig.from_point(one, pages=plan.pages, max_context=plan.max_context)
        times = EstimatedTimes(Estimator(one, machine, fitted), one, plan)
        sides[one.layout_name] = Side(config=config, times=times)  # type: ignore[arg-type]
    requests = make_point_requests(point, settings, load_shape(point.model).vocab)
    return gain_split.split_gain(point, baseline, requests, sides)


def _serve_load(
    point: Point, scheduler: Scheduler, times: Watched, settings: Settings, engine: EngineServer | None = None
) -> tuple[ReplayResult, ServeMetrics]:
    """Serve the requests of a point in virtual time; `engine` is that of the step times, None for dcpbench's."""
    requests = make_point_requests(point, settings, load_shape(point.model).vocab)
    found = replay_requests(requests, scheduler, point.clients, times, loop=get_loop_timing(engine))  # type: ignore[arg-type]
    return found, compute_serve_metrics(
        found.traffic.samples,
        gpus=point.gpus,
        concurrency=point.clients,
        slo=settings.slo,
        steps=found.counts,
        speculation=found.counts.summarize_speculation(point.speculation),
    )


def _make_step_latencies(ms: float, tokens: float) -> dict[str, Any]:
    """Return the latencies of equal steps that yield so many tokens of a request: a gap of `ms`, and gaps of 0 between the others."""
    if tokens == 1:
        return {"itl_ms": Percentiles(p50=ms)}
    median = ms if tokens <= 2 else 0.0  # noqa: PLR2004 - half of the gaps
    return {"itl_ms": Percentiles(p50=median, p90=ms, p95=ms, p99=ms), "tpot_ms": Percentiles(p50=ms / tokens)}


def _find_ends(metric: Metric, point: Point, found: ServedEstimate, beyond: float) -> Bounds | None:
    """Return the ends of an estimated p50 by what published estimates missed; `beyond` is a further share of error."""
    assert point.load is not None
    ms = getattr(found.serve, f"{metric}_ms").p50
    band = latency_bands.find_band(
        latency_bands.ESTIMATED, metric, point.load.arrival, latency_bands.load_published(), found.mixed_share
    )
    return None if band is None or ms is None else band.compute_ends(ms, beyond)


def apply_factor(found: Forecast, factor: float) -> Forecast:
    """Return the estimate as if its steps ran `factor` times as fast, which is measured / estimated of other layouts.

    All latencies and their ends are divided by it. The band of the output is then that of ratios.
    """
    tok_s, high = found.tok_s * factor, 1 + found.ratio_error + sum(found.comm_errors.values())
    return dataclasses.replace(
        found,
        tok_s=tok_s,
        low=tok_s / high,
        high=tok_s * high,
        factor=factor,
        basis=f"{found.basis}, corrected by records of other layouts",
        ttft_bounds_ms=_divide(found.ttft_bounds_ms, factor),
        itl_bounds_ms=_divide(found.itl_bounds_ms, factor),
        **_make_latencies(found, 1 / factor),
    )


def _divide(ends: Bounds | None, factor: float) -> Bounds | None:
    return None if ends is None else (ends[0] / factor, ends[1] / factor)


def replay_point(
    point: Point,
    plan: EnginePlan | None,
    times: StepTimes,
    settings: Settings,
    basis: str,
    watch: Watch = lambda _: None,
) -> Forecast:
    """Forecast a point from measured step times; `watch` is called with the number of steps served.

    `plan` is that of dcpbench's engine; None for step times of another engine. Raise UsageError if the step times do not cover
    the load.
    """
    times, _ = estimate_draft_steps(times, point)
    if times.engine is not None:
        scheduler = make_scheduler(make_engine_config(point, times.engine, times.engine.policy))
    else:
        assert plan is not None
        scheduler = Scheduler(SchedulerConfig.from_point(point, pages=plan.pages, max_context=plan.max_context))
    _, serve = _serve_load(point, scheduler, Watched(times, watch), settings, times.engine)
    return _make_served_forecast(
        serve,
        point=point,
        source=REPLAYED,
        basis=basis,
        engine=parse_origin(times.engine.origin).label if times.engine is not None else "",
        layers_held=_find_layers_held(times.conditions),
    )


def _make_estimate(
    point: Point,
    basis: str,
    *,
    tok_s: float,
    error: float,
    own: dict[str, float],
    steps: Steps,
    **more: Any,  # noqa: ANN401 - fields of a forecast
) -> Forecast:
    high = 1 + error + sum(own.values())
    if point.load is None:  # gaps are times of steps and have the error of the output
        ms = more["itl_ms"].p50
        more["itl_bounds_ms"] = ms / high, ms * high
    return Forecast(
        point=point,
        source=ESTIMATED,
        basis=basis,
        tok_s=tok_s,
        low=tok_s / high,
        high=tok_s * high,
        comm_errors=own,
        ratio_error=steps.ratio_band,
        **more,
    )


def limit_requests(point: Point) -> Point:
    """Return the point with ROUNDS requests of each client at most; an open loop stays as it is."""
    if point.load is None or point.clients is None:
        return point
    few = min(point.load.requests, ROUNDS * point.concurrency)
    return msgspec.structs.replace(point, load=msgspec.structs.replace(point.load, requests=few))


def _compute_scale_error(machine: Machine, steps: Steps) -> float:
    """Return the additional relative error on another GPU than the one of the shares: the largest error of its rates."""
    there = next(gpu for gpu in GPUS if gpu.name == steps.machine)
    if machine.gpu == there.name:
        return 0.0
    known = get_limits(machine)
    return max(machine.compute_scale(rate, there)[1] for rate in ("read", "matmul", "matmul_fp8") if rate in known)


class Estimator:
    """Estimate steps of one layout on one machine."""

    def __init__(self, point: Point, machine: Machine, fitted: Mapping[str, float], micro_batches: int = 0) -> None:
        """Create the estimator; `micro_batches` are in flight over pipeline stages, 0: as many as there are stages."""
        self.point, self.machine, self.fitted = point, machine, fitted
        self.rates, self.comm_model = get_limits(machine), machine.comm_model
        check_hosts(point.layout, machine)
        shape = load_shape(point.model)
        self.sharding = Sharding.from_point(point, shape)
        self.stages = [dataclasses.replace(self.sharding, shape=stage) for stage in make_stages(shape, point.pp)]
        self.micro_batches = (micro_batches or point.pp) if point.pp > 1 else 1
        self.draft_layer = self.sharding.make_draft_layer() if point.mtp else None
        self._rounds: dict[object, Round] = {}  # of steps of decodes

    def make_decode_rows(self, requests: int, context: int) -> StepRows:
        """Return a step of requests with this many tokens each, for the fullest replica."""
        each, queries = -(-requests // self.point.dp), self.point.mtp + 1
        return StepRows(
            decodes=(context + self.point.mtp,) * each,
            sampled=each * queries,
            tokens=requests * queries,
            queries=queries,
        )

    def _make_micro_batch(self, rows: StepRows) -> StepRows:
        parts = self.count_micro_batches(rows)
        if parts == 1:
            return rows
        return dataclasses.replace(
            rows,
            decodes=rows.decodes[: -(-len(rows.decodes) // parts)],
            chunks=split_chunks(rows.chunks, parts),
            sampled=-(-rows.sampled // parts),
            tokens=-(-rows.tokens // parts),
        )

    def _pad_rows(self, rows: StepRows) -> StepRows:
        padded = estimate.pad_step(rows, self.point.dp)
        return dataclasses.replace(padded, chunks=split_chunks(padded.chunks, self.point.pcp))

    def compute_terms(self, rows: StepRows) -> dict[str, float] | None:
        """Return the terms of a padded step, as estimate.compute_terms does; of a micro-batch in all stages together."""
        return self._compute_terms(self.sharding, self._make_micro_batch(rows))

    def _compute_terms(self, sharding: Sharding, rows: StepRows) -> dict[str, float] | None:
        return estimate.compute_terms(sharding, self._pad_rows(rows), self.rates, self.comm_model, self.point.exchange)

    def estimate_ms(self, rows: StepRows) -> float:
        """Return the time of a padded step in ms, or of a round of micro-batches, with the passes that draft tokens.

        Raise UsageError if it is unknown.
        """
        return self.estimate_round(rows).us / 1e3

    def estimate_round(self, rows: StepRows) -> Round:
        """Return the round of a padded step, which without pipeline stages has one micro-batch and no bubble.

        A step of decodes takes at least as long as one of fewer of them: some collectives were measured faster with more bytes, and
        experts of a rank are rounded to whole ones.
        """
        key = (rows.decodes, rows.queries, rows.routing)
        if rows.chunks or not rows.decodes:
            return self._estimate_round(rows)
        if key not in self._rounds:
            found, fewer = [self._estimate_round(rows)], find_smaller_batch(len(rows.decodes))
            if fewer:
                part = dataclasses.replace(
                    rows,
                    decodes=rows.decodes[:fewer],
                    sampled=fewer * rows.queries,
                    tokens=self.point.dp * fewer * rows.queries,
                )
                found.append(self.estimate_round(part))
            self._rounds[key] = max(found, key=lambda one: one.us)
        return self._rounds[key]

    def _estimate_round(self, rows: StepRows) -> Round:
        part = self._make_micro_batch(rows)
        return compute_round(
            self._estimate_stages_us(part), self.estimate_hops_us(self._pad_rows(part)), self.count_micro_batches(rows)
        )

    def count_micro_batches(self, rows: StepRows) -> int:
        """Return the number of micro-batches of a step."""
        return count_micro_batches(self.micro_batches, len(rows.decodes), chunks=bool(rows.chunks))

    def _list_draft_passes(self, rows: StepRows) -> list[tuple[Sharding, StepRows]]:
        """Return the passes that draft the tokens of the next step, in the last stage."""
        return [(self.draft_layer, of) for of in rows.make_draft_passes()] if self.draft_layer else []

    def _estimate_stages_us(self, part: StepRows) -> list[float]:
        """Return the time of a micro-batch in each stage."""
        *others, last = [self._estimate_pass_us(stage, part) for stage in self.stages]
        return [*others, last + sum(self._estimate_pass_us(*one) for one in self._list_draft_passes(part))]

    def _estimate_pass_us(self, sharding: Sharding, rows: StepRows) -> float:
        found = self._compute_terms(sharding, rows)
        if found is None:
            precision = self.point.precision
            raise UsageError(
                f"{self.machine.gpu} has no rate for {precision} in the table of GPUs, so nothing says how long a step takes there; "
                "use --weights-dtype bf16, or another machine."
            )
        return estimate.compute_us(found, self.fitted)

    def estimate_hops_us(self, padded: StepRows) -> list[float]:
        """Return the time that a micro-batch takes from each stage to the next."""
        hops = predict_hops_us(self.comm_model, self.sharding, padded.rows, self.point.pp)
        return [us * self.fitted[estimate.COLLECTIVES] for us in hops]

    def compute_comm_errors(self, rows: StepRows) -> dict[str, float]:
        """Return the error of the step for each kind of call between ranks, as a share of the step."""
        part, found = self._make_micro_batch(rows), dict[str, float]()
        step_us = sum(self._estimate_stages_us(part))
        for sharding, of in [(self.sharding, part), *self._list_draft_passes(part)]:
            calls = predict_calls(sharding, self._pad_rows(of), self.comm_model, self.point.exchange)
            for what, each in calls.items():
                error = (each.high - each.mean) * 1e6 * self.fitted[estimate.get_call_term(what)] / step_us
                found[what] = found.get(what, 0.0) + error
        return found


class Watched:
    """Wrap step times in a replay, and report from time to time how many steps were served."""

    def __init__(self, times: StepTimes | EstimatedTimes, watch: Watch) -> None:
        self.times, self.watch, self.steps = times, watch, 0
        self.is_blocking, self.slowdown = times.is_blocking, times.slowdown
        self.get_begin_ms, self.predict_host_ms = times.get_begin_ms, times.predict_host_ms

    def predict_duration_ms(self, step: Step, heat: float = 0.0) -> float:
        """Return the duration of a step, as StepTimes does."""
        self.steps += 1
        if self.steps % WATCHED_STEPS == 0:
            self.watch(f"step {self.steps:,}")
        return self.times.predict_duration_ms(step, heat)


class EstimatedTimes:
    """Replace serving.step_times.StepTimes in a replay: the same cases, each estimated."""

    is_blocking = False
    slowdown = Slowdown([])

    def __init__(self, estimator: Estimator, point: Point, plan: EnginePlan) -> None:
        extent = step_cases.Extent.from_points([point], pages=plan.pages, max_context=plan.max_context)
        cases, queries = step_cases.make_cases(extent), point.mtp + 1

        def samples(use: str) -> list[tuple[object, float]]:
            return [
                (case.compute_work(queries), estimator.estimate_ms(case.compute_rows(point.dp, queries)))
                for case in cases
                if case.use == use
            ]

        self.model = StepModel(*map(samples, MODELLED))  # type: ignore[arg-type]

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        """Return the duration of a step, as StepTimes does."""
        return self.model.predict_step_ms(compute_step_works(step))

    def get_begin_ms(self, _step: Step) -> float:
        """Return 0: an idle device is assumed to begin a step when it is decided."""
        return 0.0

    def predict_host_ms(self, _step: Step) -> float:
        """Return 0: launching a step is assumed to take the host less time than the device needs for it.

        With several ranks and chunks that does not hold (StepTimes.host_model): an open loop's request waits for up to
        one step more here.
        """
        return 0.0
