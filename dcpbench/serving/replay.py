"""Serve in virtual time: the scheduler and the traffic of a live run, with step times instead of a device.

    host     decide k + 1 │ wait for k ············│ read k, decide k + 2 │ wait for k + 1 ···
    device   ··· step k ···························│ step k + 1 ······················

A live run launches step k + 1 while step k runs, and reads the tokens that k sampled. Clients learn of step k when it
ends, so requests that they send then join step k + 2 at the earliest. Replay follows the same order of events, one by
one; only the end of a step is computed: the end of the step before plus its duration, but not before the host has
launched all of it. Several instances (deployment.py) do this independently, on one clock.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import math
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.models import load_shape
from dcpbench.points import latency_bands
from dcpbench.points.budget import compute_page_bytes
from dcpbench.records.folder import CASES_SUFFIX, STEP_TIMES_FOLDER
from dcpbench.records.formulas import compute_forecast_error, summarize_latencies
from dcpbench.records.model_sizes import read_model_sizes
from dcpbench.records.record import InstanceMetrics, Kv, Record, Server
from dcpbench.serving.delivery import list_delays_s, scatter_tokens
from dcpbench.serving.deployment import Deployment, Disaggregated, Link
from dcpbench.serving.draft_steps import estimate_draft_steps
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.outcome import StepCounts, compute_serve_metrics, find_warnings, make_rows
from dcpbench.serving.policies import make_scheduler
from dcpbench.serving.samples import write_samples
from dcpbench.serving.scheduler import SchedulerConfig
from dcpbench.serving.stage_steps import StagedTimes, make_measured_point
from dcpbench.serving.step_model import DeviceHeat, compute_step_works
from dcpbench.serving.step_times import PATH_AXES, read_step_times
from dcpbench.serving.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.points.budget import EnginePlan
    from dcpbench.points.latency_bands import Metric
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import Emulated, Latencies, ServeMetrics, StageMetrics
    from dcpbench.serving.requests import ServeRequest, Step
    from dcpbench.serving.scheduler import Scheduler
    from dcpbench.serving.step_times import EnginePath, EngineServer, StepTimes


ENGINE_VOCAB = 1 << 30  # token ids of prompts that another engine's server does not read: they are only compared


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Result of a replay."""

    traffic: Traffic
    counts: StepCounts
    end_s: float
    deployed: Deployment
    busy_s: list[float]  # time in s during which each instance ran steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopTiming:
    """Times of an engine's loop and of its server around the steps."""

    request_s: float = 0.0  # time from sending a request until the scheduler sees it, with a server's way back
    asynchronous: bool = True  # True if a step is decided while the one before it runs, False if after it is read
    first_token_s: float = 0.0  # for which a server sends no tokens with a prompt's first token, per prompt token


OWN_LOOP = LoopTiming()


def replay_requests(
    requests: Sequence[ServeRequest],
    scheduler: Scheduler | Deployment,
    concurrency: int | None,
    times: StepTimes | StagedTimes,
    limit_s: float = math.inf,
    loop: LoopTiming = OWN_LOOP,
) -> ReplayResult:
    """Serve `requests` from second 0 until `limit_s`, with one instance or several; other arguments as in Traffic.

    Raise UsageError for a step outside the measured times.
    """
    deployed = scheduler if isinstance(scheduler, Deployment) else Deployment([scheduler])
    traffic = Traffic(requests, deployed, concurrency, loop.request_s, loop.first_token_s)
    return _Clock(traffic, deployed, times, limit_s, asynchronous=loop.asynchronous).run()


@dataclasses.dataclass(slots=True)
class _Instance:
    """The host and the device of one instance."""

    scheduler: Scheduler
    heat: DeviceHeat
    now: float = 0.0  # time of the host's next decision, unless it waits or is idle
    free: float = 0.0  # time at which the device has finished all launched work
    launched: float = 0.0  # time at which the host has launched its last decision
    pending: tuple[Step, float] | None = None  # a step to be read, and its end
    behind: tuple[Step, float] | None = None  # the step after it
    reads: float | None = None  # time at which the host reads the pending step, if it waits for that
    idle: bool = False
    busy: float = 0.0


READ, CROSSED, DECIDE = range(3)  # priority of events at the same time, first to last


class _Clock:
    """Clock that all instances share; events happen one after the other."""

    def __init__(
        self,
        traffic: Traffic,
        deployed: Deployment,
        times: StepTimes | StagedTimes,
        limit_s: float,
        *,
        asynchronous: bool = True,
    ) -> None:
        self.asynchronous = asynchronous
        self.traffic, self.deployed, self.times, self.limit_s = traffic, deployed, times, limit_s
        self.counts = StepCounts()
        self.instances = [
            _Instance(scheduler, DeviceHeat(times.slowdown.settle_s)) for scheduler in deployed.schedulers
        ]

    def run(self) -> ReplayResult:
        """Run to the end of all requests, or of the time limit."""
        while True:
            now, what, which = self._find_next_event()
            assert now < math.inf, "requests wait, and nothing will happen"
            if what == READ:
                self._read_step(which, now)
            elif what == CROSSED:
                self.deployed.update_transfers(now)
            elif self.traffic.is_done:
                break
            elif now >= self.limit_s:
                now = self._stop_all(now)
                break
            else:
                self._launch_step(which, now)
            for index in self.deployed.collect_woken():
                instance = self.instances[index]
                if instance.idle:
                    instance.idle, instance.now = False, max(instance.now, now)
        return ReplayResult(self.traffic, self.counts, now, self.deployed, [i.busy for i in self.instances])

    def _find_next_event(self) -> tuple[float, int, int]:
        """Return the next event: (time, kind, instance)."""
        arrival = self.traffic.find_next_arrival_s() if any(i.idle for i in self.instances) else None
        found = [(self.deployed.get_next_end_s(), CROSSED, 0)]
        for index, instance in enumerate(self.instances):
            if instance.reads is not None:
                found.append((instance.reads, READ, index))
            elif not instance.idle:
                found.append((instance.now, DECIDE, index))
            elif arrival is not None:
                found.append((max(instance.now, arrival), DECIDE, index))
        return min(found)

    def _launch_step(self, which: int, now: float) -> None:
        """Submit the due requests, decide a step of the instance and launch it."""
        instance, times = self.instances[which], self.times
        instance.now, instance.idle = now, False
        self.traffic.submit(*self.traffic.count_due(now), now)
        step = instance.scheduler.plan_step()
        self.deployed.handle_decision(which, now)
        instance.launched, instance.behind = now, None
        if step is not None:
            begin = max(now + times.get_begin_ms(step) / 1e3, instance.free)
            duration = times.predict_duration_ms(step, instance.heat.compute_share(begin)) / 1e3
            instance.heat.add_step(
                duration, times.slowdown.compute_final_heat(compute_step_works(step)) if step.has_chunks else 0.0
            )
            end = begin + duration
            instance.launched = end if times.is_blocking else now + times.predict_host_ms(step) / 1e3
            instance.free = max(end, instance.launched)
            instance.behind = step, instance.free
            instance.busy += duration
            self.counts.add_step(step)
        if not self.asynchronous and instance.behind is not None:
            instance.pending, instance.behind = instance.behind, None
            instance.reads = instance.pending[1]
        elif instance.pending is not None:
            # With an asynchronous device, tokens are read as soon as they arrive, between two layers of a launch.
            instance.reads = max(instance.launched if times.is_blocking else now, instance.pending[1])
        elif instance.behind is None:
            # All due requests were rejected: decide again, so that the next one can come.
            rejected = self.traffic.is_done or any(self.traffic.count_due(now))
            instance.idle = not rejected
        else:
            instance.now, instance.pending = instance.launched, instance.behind

    def _read_step(self, which: int, now: float) -> None:
        """Read the tokens of the step before the one that the instance launched last."""
        instance = self.instances[which]
        assert instance.pending is not None
        self.traffic.record_tokens(instance.pending[0], now)
        self.deployed.handle_read(which, instance.pending[0], now)
        instance.now = max(instance.launched, now)
        instance.pending, instance.reads = instance.behind, None

    def _stop_all(self, now: float) -> float:
        """Read the launched steps and cancel all other requests; return the time at which the last step was read."""
        launched = [
            (one[1], index, one[0])
            for index, i in enumerate(self.instances)
            for one in (i.pending, i.behind if i.reads is not None else None)
            if one is not None
        ]
        for end, index, step in sorted(launched, key=lambda one: one[0]):
            now = max(now, end)
            self.traffic.record_tokens(step, now)
            self.deployed.handle_end(index, step)
        self.traffic.stop()
        return now


def make_step_times_name(path: EnginePath, settings: str = "") -> str:
    """Return the file's path below the run's folder: `step-times/deepseek-v3-tp4-dp1-dcp4-ag_rs-0123456789ab.json`.

    `settings`: flags by which the servers of another engine differ.
    """
    named = {axis.name: path[axis.name] for axis in PATH_AXES} | {"settings": settings}
    words = "{0}-tp{tp}-dp{dp}-dcp{dcp}-{exchange}".format(Path(str(path["model"])).name, **path)
    return f"{STEP_TIMES_FOLDER}/{words}-{hashlib.sha256(msgspec.json.encode(named)).hexdigest()[:12]}.json"


def make_case_file_name(path: EnginePath, settings: str = "") -> str:
    """Return the path of the file of measured cases (servers/stored_cases.py), next to the step times that are made from it."""
    return make_step_times_name(path, settings).removesuffix(".json") + CASES_SUFFIX


def replay_point(
    point: Point,
    plan: EnginePlan | None,
    requests: Sequence[ServeRequest],
    times: StepTimes,
    settings: Settings,
    folder: Path,
    *,
    file: str = "",
    command: str = "",
    policy: str = "",
) -> Record:
    """Serve the requests in virtual time; write their samples to the run's folder and return the record.

    `plan` is that of the engine that would serve the point; None if the step times are of another engine's server.
    `file` names the step times for the record: a path below the folder, or the given file. `command` is the command
    line; the rest of the record's environment is that of the step times. `policy` replaces that of another engine.

    Raise UsageError if the times belong to another engine than the point's, or do not cover its load.
    """
    measured = make_measured_point(point)
    times, estimated = estimate_draft_steps(times, measured)
    times.check_point(measured, file or "the step times")
    policy = (policy or times.engine.policy) if times.engine is not None else ""
    limit_s = math.inf if settings.limit_seconds is None else settings.limit_seconds

    def replay_load(times: StepTimes) -> tuple[ReplayResult, StageMetrics | None]:
        assert point.load is not None
        deployment = _make_deployment(point, plan, times.engine, policy)
        loop = get_loop_timing(times.engine)
        staged = StagedTimes(times, point, settings.micro_batches) if point.layout.gpus > point.tp else None
        found = replay_requests(requests, deployment, point.clients, staged or times, limit_s, loop)
        return found, staged.summarize() if staged else None

    def compute_metrics(found: ReplayResult, stages: StageMetrics | None, file: str = "") -> ServeMetrics:
        return compute_serve_metrics(
            found.traffic.samples,
            gpus=point.gpus,
            concurrency=point.clients,
            slo=settings.slo,
            steps=found.counts,
            speculation=found.counts.summarize_speculation(point.speculation, estimated),
            instances=_compute_instance_metrics(found) if point.disaggregate else None,
            stages=stages,
            samples_file=file,
            limit_s=settings.limit_seconds,
        )

    found, stages = replay_load(times)
    if times.engine is not None:
        scatter_tokens(found.traffic.samples, list_delays_s(times))
    metrics = compute_metrics(found, stages, write_samples(folder, point, make_rows(found.traffic.samples)))
    emulated = times.emulated
    if emulated is not None:
        ends = [
            compute_metrics(*replay_load(times.apply_factors(*factors))) for factors in _compute_forecast_factors(times)
        ]
        spans = _compute_spans([metrics, *ends])
        if not times.is_blocking:
            spans |= _widen_spans(spans, metrics, emulated, point)
        emulated = msgspec.structs.replace(emulated, **spans)
    error = max((abs(error) for _, error in times.check_errors()), default=None)
    return Record(
        point=point,
        outcome="ok",
        warnings=[*times.warnings, *find_warnings(metrics, cut_off=found.traffic.cut_off)],
        serve=metrics,
        emulated=emulated,
        kv=Kv.from_plan(plan, point.context) if plan is not None else None,
        origin=times.engine.origin if times.engine is not None else msgspec.UNSET,
        server=_make_server(times.engine) if times.engine is not None else msgspec.UNSET,
        conditions=msgspec.structs.replace(
            times.conditions,
            step_times=file,
            step_error=error,
            policy=policy,
        ),
        environment=msgspec.structs.replace(times.environment, command=command or times.environment.command),
        model_sizes=read_model_sizes(point.model),
    )


def get_loop_timing(engine: EngineServer | None) -> LoopTiming:
    """Return the times of a loop: those of another engine's server, or of dcpbench's own engine."""
    if engine is None:
        return OWN_LOOP
    return LoopTiming(
        request_s=engine.request_ms / 1e3,
        asynchronous=engine.asynchronous,
        first_token_s=engine.first_token_us / 1e6,
    )


def _make_server(engine: EngineServer) -> Server:
    """Return the description of the server that the steps were measured on."""
    return Server(
        engine=engine.engine,
        version=engine.version,
        kv_capacity_tokens=engine.kv_tokens,
        max_model_len=engine.max_model_len,
    )


def make_engine_config(point: Point, engine: EngineServer, policy: str) -> SchedulerConfig:
    """Return the configuration of a scheduler with the limits and the KV cache of another engine's server.

    A KV cache of unknown size holds all requests.
    """
    each = -(-point.context // engine.block_tokens) + 1
    in_flight = min(engine.max_requests, point.max_requests)
    return SchedulerConfig(
        replicas=point.dp,
        pages=engine.kv_blocks or each * (in_flight + 1) + 1,
        page_size=engine.block_tokens,
        dcp=1,  # block_tokens counts those of all ranks
        max_requests=in_flight,
        chunk=engine.token_budget,
        max_chunk=engine.max_chunk,
        policy=policy,
        prefix_cache=engine.prefix_cache,
        max_context=min(engine.max_model_len or point.context, point.context),
    )


def _make_deployment(
    point: Point, plan: EnginePlan | None, engine: EngineServer | None = None, policy: str = ""
) -> Deployment:
    """Return the instances of a point, each with the memory of the plan, or the server of another engine."""
    if engine is not None:
        return Deployment([make_scheduler(make_engine_config(point, engine, policy))])
    assert plan is not None
    config, wanted = SchedulerConfig.from_point(point, pages=plan.pages, max_context=plan.max_context), point.instances
    if not wanted.disaggregated:
        return Deployment([make_scheduler(config) for _ in range(wanted.both)])
    link = Link(
        bytes_s=1e9 * point.transfer_gb_s,
        latency_s=point.transfer_ms / 1e3,
        page_bytes=compute_page_bytes(point, load_shape(point.model)),
    )
    return Disaggregated(config, wanted.prefill, wanted.decode, link)


def _compute_instance_metrics(found: ReplayResult) -> InstanceMetrics:
    """Return the busy share of each kind of instance, and the metrics of their transfers."""
    deployed, end_s = found.deployed, found.end_s
    shares = [busy / end_s for busy in found.busy_s]
    if not isinstance(deployed, Disaggregated):
        return InstanceMetrics(busy_share={"both": statistics.fmean(shares)})
    prefill, transfers = len(deployed.prefills), deployed.transfers
    busy = {"prefill": statistics.fmean(shares[:prefill]), "decode": statistics.fmean(shares[prefill:])}
    return InstanceMetrics(
        busy_share=busy,
        link_busy_share=sum(t.end_s - t.begin_s for t in transfers) / (deployed.links * end_s),
        transfers=len(transfers),
        sent_bytes=sum(t.sent_bytes for t in transfers),
        transfer_ms=_compute_latencies(t.end_s - t.ready_s for t in transfers),
        transfer_wait_ms=_compute_latencies(t.begin_s - t.ready_s for t in transfers),
    )


def _compute_latencies(seconds: Iterable[float]) -> Latencies:
    """Return latencies in ms; rounding errors around 0 become 0."""
    return summarize_latencies([round(1e3 * s, 6) for s in seconds])


def _compute_spans(found: Sequence[ServeMetrics]) -> dict[str, float]:
    """Return the minimum and maximum of a metric over a forecast's replays, as longer steps can make a queued request
    faster.
    """
    values: dict[str, list[float | None]] = {
        "output_tok_s": [m.output_tok_s for m in found],
        "ttft_p50_ms": [m.ttft_ms.p50 for m in found],
        "itl_p50_ms": [m.itl_ms.p50 for m in found],
    }
    known = {name: [v for v in of if v is not None] for name, of in values.items()}
    return {
        f"{name}_{end}": pick(of) for name, of in known.items() if of for end, pick in (("low", min), ("high", max))
    }


def _widen_spans(spans: dict[str, float], found: ServeMetrics, emulated: Emulated, point: Point) -> dict[str, float]:
    """Return the ends of TTFT and ITL p50 so far apart that every published forecast of loads like this one would be inside."""
    assert point.load is not None
    kind = latency_bands.TOGETHER if emulated.prompts else latency_bands.EMULATED
    wider: dict[str, float] = {}
    metrics: tuple[tuple[Metric, Latencies], ...] = (("ttft", found.ttft_ms), ("itl", found.itl_ms))
    for metric, latencies_ms in metrics:
        ms = latencies_ms.p50
        band = latency_bands.find_band(kind, metric, point.load.arrival, latency_bands.load_published())
        if ms is not None and band is not None:
            low, high = band.compute_ends(ms)
            wider[f"{metric}_p50_ms_low"] = min(low, spans[f"{metric}_p50_ms_low"])
            wider[f"{metric}_p50_ms_high"] = max(high, spans[f"{metric}_p50_ms_high"])
    return wider


def _compute_forecast_factors(times: StepTimes) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the factors on step times without and with prompts, at the slow and at the fast end of a forecast's error.

    On the CPU they are 1, as no communication is modelled.
    """
    emulated = times.emulated
    assert emulated is not None
    if times.is_blocking:
        return (1.0, 1.0), (1.0, 1.0)
    decodes = [m for m in times.cases if m.case.decodes and not m.case.chunks]
    step_us = 1e3 * max(decodes, key=lambda m: m.case.requests).median_ms
    shorter, longer = compute_forecast_error(emulated, step_us)
    return (
        (1 + longer, 1 + max(longer, emulated.chunks_high)),
        (1 - shorter, 1 - max(shorter, emulated.chunks_low)),
    )


def replay_from_file(
    point: Point, plan: EnginePlan, path: Path, settings: Settings, folder: Path, command: str = ""
) -> Record:
    """Return the record of a point from existing step times: without GPU, torch or another process.

    `plan` is that of the engine that would serve it live. Raise RecordsError for a file that cannot be read, UsageError
    if it does not belong to this point or does not cover its load.
    """
    started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
    times = read_step_times(path)
    requests = make_point_requests(point, settings, load_shape(point.model).vocab)
    record = replay_point(point, plan, requests, times, settings, folder, file=str(path), command=command)
    return msgspec.structs.replace(
        record,
        measured_with=msgspec.to_builtins(settings),
        started_at=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - begin, 3),
    )
