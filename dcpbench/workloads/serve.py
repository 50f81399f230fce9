"""Workload `serve`: requests that arrive, wait, are prefilled, decode in a batch with others, and finish."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.serve_engine import LaunchedStep, ServeEngine
from dcpbench.exchange.torch_collectives import gather_objects, is_first
from dcpbench.measuring.environment import get_gpu_uuid
from dcpbench.measuring.gpu_state import GpuSampler, is_throttled, merge_states
from dcpbench.measuring.profiling import record_steps
from dcpbench.measuring.timing import collect_compiled_kernels
from dcpbench.points.roofline import Sharding
from dcpbench.records.model_sizes import read_model_sizes
from dcpbench.records.record import Kv, Record
from dcpbench.serving import outcome
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.samples import write_samples
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.traffic import Traffic
from dcpbench.show.terminal import make_rate_limited
from dcpbench.show.text import format_count
from dcpbench.syncs.recorded import MAX_RECORD_SITES, build_sync_sites
from dcpbench.workloads.decode import MAX_IDLE_SHARE
from dcpbench.workloads.point_facts import (
    count_device_allocations,
    describe_weights,
    get_memory_in_use,
    list_device_warnings,
    list_warnings,
)
from dcpbench.workloads.served_floors import Shares, compute_shares
from dcpbench.workloads.serving_loop import Loop, RankZeroBroadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import Environment, Rates, ServeMetrics, SyncSite
    from dcpbench.workloads.session import Session

REPORT_INTERVAL_S = 1.0  # seconds between two signs of life
PROFILED_STEPS = 8
SHORT_PROMPT = 16  # tokens of the prompts of a profiled pass, which looks at decode steps
WARM_UP_OUTPUT = 4
WARM_UP_REQUESTS = 8  # number of warm-up requests per replica, from the beginning of the load
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


class Serving:
    """State shared by the runs of one engine path: captured graphs, prefill buffers, and the agreement of ranks."""

    def __init__(self, session: Session, prefill: str) -> None:
        """Create the state; collective."""
        engine, layout = session.engine, session.point.layout
        replica_chunk = session.plan.chunk // layout.dp
        direct = session.point.exchange == "symm" and session.emulation is None
        gather = "direct" if direct else "nccl"
        rows = replica_chunk + engine.largest * engine.query_length
        prefiller = Prefiller(engine.model, backend=prefill, tokens=replica_chunk, rows=rows, gather=gather)
        inputs = None
        if session.point.weights == "synthetic":
            # One draw for each row of a step, for all layers: their routers differ. Which experts work never depends on
            # how a layout rounds.
            inputs = session.make_router_inputs(list(range(layout.dp * prefiller.rows)), layers=1, seed=0)
        self.session, self.prefill = session, prefill
        self.engine = ServeEngine(engine, prefiller, inputs)
        self.broadcast = RankZeroBroadcast()

    def make_loop(
        self,
        point: Point,
        requests: Sequence[ServeRequest],
        concurrency: int | None,
        ends: Callable[[float], bool] = lambda _: False,
    ) -> Loop:
        """Return a run from an empty cache."""
        scheduler = Scheduler(make_scheduler_config(point, self.session))
        self.engine.reset_slots()
        assert point.load is not None
        traffic = Traffic(requests, scheduler, concurrency)
        return Loop(self.engine, scheduler, traffic, self.broadcast, ends=ends)

    def warm_up(self, point: Point, requests: Sequence[ServeRequest], alive: Callable[[], None]) -> None:
        """Run every kind of step behind captured graphs: chunks of every size with and without a prefix, full ones of many
        prompts, one that cuts a prompt, a cached prefix, and the load's beginning.

        What is compiled or loaded on first use must not be part of somebody's latency.
        """
        first = [
            ServeRequest(number=one.number, prompt=one.prompt, output_tokens=min(one.output_tokens, WARM_UP_OUTPUT))
            for one in requests[: min(point.concurrency, WARM_UP_REQUESTS * point.dp)]
        ]
        self.make_loop(point, first, concurrency=len(first)).run(alive)
        config = make_scheduler_config(point, self.session)
        vocab = self.session.shape.vocab
        for lengths, at_once in (
            (_warm_up_lengths(config), point.dp),
            (_list_full_step_lengths(config), point.max_requests),
            (_list_cut_step_lengths(config), point.max_requests),
        ):
            if lengths:
                self.make_loop(point, _make_requests(lengths, 1, vocab), concurrency=at_once).run(alive)
        self.make_loop(point, _make_repeated_requests(config, vocab), concurrency=point.dp).run(alive)


def get_serving(session: Session, point: Point) -> Serving:
    """Return the state that runs of a point share with earlier ones; create it if needed. Collective; see Serving."""
    load, old = point.load, session.serving
    assert load is not None
    if old is None or old.prefill != load.prefill:
        session.serving = old = None
        session.serving = Serving(session, load.prefill)
    assert session.serving is not None
    return session.serving


def make_scheduler_config(point: Point, session: Session) -> SchedulerConfig:
    """Return the scheduler configuration of a point on a built engine."""
    return SchedulerConfig.from_point(point, pages=session.plan.pages, max_context=session.plan.max_context)


def run(
    serving: Serving,
    point: Point,
    settings: Settings,
    environment: Environment,
    folder: Path,
    *,
    rates: Rates | None = None,
    tell: Callable[..., None],
) -> Record:
    """Serve one point's load on a built engine. Collective; every rank returns a record, rank 0's is complete.

    An interruption ends the run: finished requests are kept, and the outcome records it.
    """
    session, device = serving.session, serving.session.engine.device
    requests = make_point_requests(point, settings, session.shape.vocab)
    tell("capture")
    alive = make_rate_limited(lambda: tell("capture"), REPORT_INTERVAL_S)
    serving.engine.capture_steps(alive, lambda: tell("compile"))
    tell("warm up")
    serving.warm_up(point, requests, make_rate_limited(lambda: tell("warm up"), REPORT_INTERVAL_S))
    with _collect_interruptions() as interrupted:
        loop = serving.make_loop(
            point,
            requests,
            point.clients,
            lambda now: bool(interrupted) or (settings.limit_seconds is not None and now >= settings.limit_seconds),
        )
        tell("measure")
        allocated = count_device_allocations(device)
        with GpuSampler(get_gpu_uuid(device)) as sampler, collect_compiled_kernels() as compiled:
            loop.run(make_rate_limited(lambda: tell("measure", _format_progress(loop)), REPORT_INTERVAL_S))
        gpu = merge_states(gather_objects(sampler.get_state()))
    allocated = count_device_allocations(device) - allocated
    late = sorted({name for names in gather_objects(compiled) for name in names})
    _add_tokens_of_other_replicas(loop.traffic)
    cut = bool(loop.broadcast(len(interrupted))[0])  # rank 0 decides, as its signal ended the loop
    found = compute_shares(Sharding.from_point(point, session.shape), loop.timed, rates) if is_first() else Shares()
    metrics = _compute_metrics(loop, point, settings, folder, found, interrupted=cut)
    cut_reason = (
        f"interrupted with {metrics.finished} of {format_count(len(requests), 'request')} finished; they are in "
        f"{metrics.samples_file}. Serve the load again with --resume."
    )
    sites = None
    if settings.profile and device.type == "cuda" and not cut:
        tell("profile")
        sites = _find_sync_sites(serving, point)
    return Record(
        point=point,
        outcome="failed" if cut else "ok",
        reason=cut_reason if cut else None,
        detail={"compiled": ", ".join(late)} if late else {},
        warnings=list_device_warnings(point, device)
        + list_warnings(
            compiled=bool(late),
            throttled=is_throttled(gpu),
            gpu_idle=(metrics.idle_fraction or 0.0) > MAX_IDLE_SHARE,
            host_sync=any(not _is_token_read(site) for site in sites or []),
        )
        + outcome.find_warnings(metrics, cut_off=loop.traffic.cut_off),
        serve=metrics,
        rates=rates,
        host_syncs_per_step=None if sites is None else sum(s.per_step for s in sites),
        sync_sites=(sites or [])[:MAX_RECORD_SITES],
        allocations_per_step=allocated / loop.counts.steps if device.type == "cuda" else None,
        kv=Kv.from_plan(session.plan, point.context, session.engine.allocator.compute_fragmentation()),
        memory_peak_bytes=get_memory_in_use(device),
        conditions=describe_weights(session, kv="served", cuda_graph=device.type == "cuda"),
        gpu=gpu,
        environment=environment,
        model_sizes=read_model_sizes(point.model),
    )


def _compute_metrics(
    loop: Loop, point: Point, settings: Settings, folder: Path, found: Shares, *, interrupted: bool
) -> ServeMetrics:
    """Return the metrics of a run that has ended; rank 0 writes its samples to the folder."""
    idle = [share for share in gather_objects(loop.gaps.idle_fraction) if share is not None]
    name = ""
    if is_first():
        name = write_samples(folder, point, outcome.make_rows(loop.traffic.samples))
    return outcome.compute_serve_metrics(
        loop.traffic.samples,
        gpus=point.tp,
        concurrency=point.clients,
        slo=settings.slo,
        steps=loop.counts,
        idle_fraction=max(idle, default=None),
        floor_shares=dataclasses.asdict(found),
        speculation=loop.counts.summarize_speculation(point.speculation),
        samples_file=name,
        interrupted=interrupted,
        limit_s=settings.limit_seconds,
    )


def _add_tokens_of_other_replicas(traffic: Traffic) -> None:
    """Exchange the sampled tokens, so that all ranks have those of all replicas."""
    mine = {s.request.number: s.tokens for s in traffic.samples if s.tokens}
    for others in gather_objects(mine):
        for number, tokens in others.items():
            traffic.sample_of[number].tokens = tokens


def _is_token_read(site: SyncSite) -> bool:
    """Return True if a wait is for the tokens of the preceding step."""
    return site.file.endswith("engine/serve_engine.py") and site.function.endswith(LaunchedStep.wait_tokens.__name__)


def _find_sync_sites(serving: Serving, point: Point) -> list[SyncSite] | None:
    """Return the source lines where the host waits in an iteration, from a separate pass of decode steps; None if none
    fits.
    """
    output = 2 * PROFILED_STEPS + 2 * (point.concurrency * SHORT_PROMPT // serving.session.plan.chunk + 1)
    allocator = serving.session.engine.allocator
    fit = point.dp * ((allocator.pages - 1) // allocator.count_pages(SHORT_PROMPT + output))
    count = min(point.concurrency, fit)
    if not count or SHORT_PROMPT + output > serving.session.engine.max_context:
        return None
    loop = serving.make_loop(
        point, _make_requests([SHORT_PROMPT] * count, output, serving.session.shape.vocab), concurrency=count
    )
    while not loop.counts.decode_steps:
        loop.iterate()
    found = record_steps(loop.iterate, PROFILED_STEPS, enabled=is_first(), stacks=True)
    loop.stop_early()
    return None if found is None else build_sync_sites(found.sites, "serve")


def _warm_up_lengths(config: SchedulerConfig) -> list[int]:
    """Return the lengths of prompts, one after the other in each replica: a chunk of each power of two, minus a token,
    and one of several chunks.
    """
    most = _compute_max_prompt(config)
    sizes = {min(2**k, config.chunk) - 1 for k in range(1, config.chunk.bit_length() + 1)}
    sizes |= {config.chunk, 2 * config.chunk + 1}
    return [size for size in sorted({max(min(size, most), 1) for size in sizes}) for _ in range(config.replicas)]


def _list_full_step_lengths(config: SchedulerConfig) -> list[int]:
    """Return the lengths of prompts of whole pages that fill two steps if they arrive at once, for any limit of the
    request length.
    """
    page = config.virtual_page
    most = _compute_max_prompt(config)
    longest, step = most // page * page, config.chunk // page * page
    if not longest:
        return []
    return 2 * config.replicas * [*[longest] * (step // longest), *([step % longest] if step % longest else [])]


def _list_cut_step_lengths(config: SchedulerConfig) -> list[int]:
    """Return the lengths of as few simultaneous prompts as overfill a step, so that the last one is split between two
    steps.

    The list is empty if no prompt exceeds a page. Longer prompts are limited to two steps.
    """
    page = config.virtual_page
    most = min(_compute_max_prompt(config), 2 * config.chunk)
    if most <= page:
        return []
    whole, rest = divmod(config.chunk, most)
    lengths = [most] * whole
    if rest < page:
        lengths[-1] -= page - rest
    return config.replicas * [*lengths, most]


def _make_repeated_requests(config: SchedulerConfig, vocab: int) -> list[ServeRequest]:
    """Return two requests per replica with the same prompt, so that the second one hits the prefix cache except for its
    end.
    """
    (first,) = _make_requests([_compute_max_prompt(config)], 1, vocab)
    return [dataclasses.replace(first, number=number) for number in range(2 * config.replicas)]


def _compute_max_prompt(config: SchedulerConfig) -> int:
    """Return the maximum number of tokens of a prompt that is answered with one token."""
    return max(min(config.max_context, (config.pages - 1) * config.virtual_page) - 1, 1)


def _make_requests(lengths: Sequence[int], output: int, vocab: int) -> list[ServeRequest]:
    """Return requests with unrelated prompts."""
    generator = np.random.Generator(np.random.PCG64(0))
    return [
        ServeRequest(number=i, prompt=generator.integers(0, vocab, n, dtype=np.int32), output_tokens=output)
        for i, n in enumerate(lengths)
    ]


def _format_progress(loop: Loop) -> str:
    """Return the latest numbers, for the progress line."""
    samples = loop.traffic.samples
    tokens = sum(len(s.token_s) for s in samples)
    finished = sum(s.is_finished for s in samples)
    return f"{finished}/{len(loop.traffic.requests)} requests, {tokens / max(loop.now_s, 1e-9):,.0f} tok/s"


@contextlib.contextmanager
def _collect_interruptions() -> Iterator[list[int]]:
    """Collect signals within the block; they end the run, not the process."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in INTERRUPTIONS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
