"""Measure points on a running server: send the load of each, and make a record from the results."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime as dt
import functools
import math
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec
import numpy as np

import dcpbench
from dcpbench.errors import CapacityError, DcpbenchError, OutputError, UsageError, WorkerError
from dcpbench.launch.jobs import Progress
from dcpbench.measuring.gpu_state import is_throttled, sample_gpus
from dcpbench.plan.grid import Candidate
from dcpbench.points.names import CLOSED
from dcpbench.records import formulas
from dcpbench.records.file import RecordFile
from dcpbench.records.model_sizes import read_model_sizes
from dcpbench.records.record import (
    CPU,
    DUMMY_WEIGHTS,
    ClientLoad,
    Environment,
    FailedRequests,
    Record,
    Server,
    format_omitted_note,
    format_reason,
)
from dcpbench.servers import info as server_info
from dcpbench.servers import sessions
from dcpbench.servers.answers import BY_CHUNKS
from dcpbench.servers.client import Client, Target
from dcpbench.servers.client_pool import open_load
from dcpbench.servers.descriptors import OPEN_FILES, raise_open_file_limit
from dcpbench.servers.draft_counters import summarize_drafts
from dcpbench.servers.load import LoadOptions, Run
from dcpbench.servers.profile import find_waits, record_traces
from dcpbench.servers.prompt_format import COMPLETIONS, PromptFormat, find_prompt_format
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.outcome import StepCounts, compute_serve_metrics, find_warnings, format_summary, make_rows
from dcpbench.serving.request_files import read_requests
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.samples import write_samples
from dcpbench.serving.trace_formats import Reading
from dcpbench.serving.traffic import RequestResult
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from dcpbench.measuring.gpu_state import VisibleGpus
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import EngineSettings, Gpu, ServeMetrics, StartPhase, SyncSite
    from dcpbench.servers.client import RequestError
    from dcpbench.servers.client_pool import ClientPool
    from dcpbench.servers.events import Fault
    from dcpbench.servers.info import Counters, ServerInfo
    from dcpbench.servers.launch import Server as StartedServer
    from dcpbench.servers.load import Call, Outcome, Pace

# Names of warnings; reports/explain.py has a sentence for each.
CLIENT_BOUND, GAPS_DIVIDED, NOMINAL = "client_bound", "gaps_divided", "nominal_lengths"
KV_SOURCES_DIFFER, THROTTLED = "kv_sources_differ", "throttled"
MAX_CPU_SHARE = 0.9  # of a process of the client; above it the process was the bottleneck
MAX_LAG_MS, MAX_LAG_SHARE = 3.0, 0.1  # the same for its lateness at p99, which may also be a share of the median ITL
NEAR = 0.05  # relative deviation of answer lengths from the requested ones above which a warning is given
WARM_UP, WARM_UP_OUTPUT = 8, 16
NOT_PROFILED = "not_profiled"  # name of the fact: why the server was not profiled
NO_METRICS = "no_metrics"  # name of the fact: how the counters of the server are turned on
INTERRUPTED = "interrupted after all requests had ended"
HIDDEN_TOKENS = "hidden_reasoning_tokens"  # name of the fact: tokens that the server counted and did not send
PROFILED = 8  # number of requests served while the server is profiled
MAX_INITIAL_CONNECTIONS = 256  # made before an open loop begins; others are made when they are needed
CHUNKS_EACH = 8_000  # chunks a second for which a process of the client is taken: about a third of a core
PROGRESS_INTERVAL_S = 1.0
P99 = 99
ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Options for measuring servers."""

    target: Target
    endpoint: str = COMPLETIONS
    tokenizer: Path | None = None
    extra_body: Mapping[str, object] = dataclasses.field(default_factory=dict)  # sent with every request
    warm_up: int = WARM_UP  # requests before the clock starts
    retries: int = 0  # retries of each request that a busy server rejects
    processes: int | None = None  # client processes; None: as many as the load is expected to need
    realtime: bool = True  # True if the client gets real-time priority on its cores, if the kernel allows it
    traces: Path | None = None  # folder for traces of the server, which is profiled after each load
    traces_wait_s: float = 120.0
    command: str = ""  # command line as typed
    device: str = ""  # hardware of the server, as specified by the user; CPU marks its points as functional runs
    device_count: int = 0
    facts: dict[str, str] = dataclasses.field(default_factory=dict)  # for records: how the server was started
    gpus: VisibleGpus | None = None  # of a server that was started here; sampled while a load is sent
    start: Sequence[StartPhase] = ()  # phases of the start of such a server
    engine_settings: EngineSettings | None = None  # settings in the log of such a server
    dummy_weights: bool = False  # True if such a server has dummy weights (engine_log.has_dummy_weights)

    @property
    def request_facts(self) -> dict[str, str]:
        """Return the recorded parts of --header and --extra-body: names of headers, and the fields."""
        names = ", ".join(name for name, _ in self.target.headers)
        body = msgspec.json.encode(self.extra_body, order="sorted").decode() if self.extra_body else ""
        return {name: text for name, text in (("headers", names), ("extra_body", body)) if text}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredServer:
    """Hold a running server with all that is needed to measure points on it."""

    config: ClientConfig
    info: ServerInfo
    prompt_format: PromptFormat
    settings: Settings
    folder: Path  # of the run
    process: StartedServer | None = None  # the server if dcpbench started it

    @property
    def exit_reason(self) -> str:
        """Return why a server that dcpbench started has ended; empty for others, and while it runs."""
        return self.process.exit_reason if self.process is not None else ""


MeasurePoint: TypeAlias = "Callable[[Point, MeasuredServer, Callable[[str], None]], tuple[Record, BaseException | None]]"  # a function such as measure_point
ReplayPoints: TypeAlias = "Callable[[Sequence[Point], MeasuredServer, Callable[[str], None]], Iterable[Record]]"


def fetch_server_info(target: Target, retries: int = 0) -> ServerInfo:
    """Return a server's reports about itself. Raise WorkerError if it cannot be measured."""
    return asyncio.run(_ask_server(target, lambda client: server_info.fetch_info(client, retries)))


def resolve_prompt_format(config: ClientConfig, model: str) -> PromptFormat:
    """Return how requests to the server are written. Raise WorkerError or UsageError if it accepts none."""
    find_format = functools.partial(
        find_prompt_format,
        model=model,
        endpoint=config.endpoint,
        tokenizer=config.tokenizer,
        extra_body=config.extra_body,
        retries=config.retries,
    )
    return asyncio.run(_ask_server(config.target, find_format))


async def _ask_server(target: Target, ask: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
    async with Client(target) as client:
        return await ask(client)


def make_candidates(points: Sequence[Point], max_model_len: int | None) -> list[Candidate]:
    """Return the points as candidates, with an error for those with requests longer than the server accepts."""
    found = []
    for point in points:
        assert point.load is not None
        error = None
        if max_model_len is not None and point.load.trace == "" and point.context > max_model_len:
            error = CapacityError(
                f"the requests have up to {point.context:,} tokens, and the server accepts {max_model_len:,} "
                "(max_model_len); lower --input-tokens or --output-tokens, or start it with a longer maximum context."
            )
        found.append(Candidate(point=point, error=error))
    return found


def measure_points(
    places: Sequence[PointProgress],
    server: MeasuredServer,
    measure: MeasurePoint | None = None,
    replay: ReplayPoints | None = None,
) -> None:
    """Measure points on a server, one after the other; each leaves a record in the folder. An interruption is raised again.

    `measure` measures one point, by default as measure_point does. `replay` measures the steps of the server once and replays the points
    of mode REPLAY; it comes first, before the server has seen the loads. A server that dies fails the points that are left.
    """
    out = RecordFile(server.folder)
    replayed = [progress for progress in places if progress.point.replayed]
    if replay is not None and replayed:
        records = replay([progress.point for progress in replayed], server, replayed[0].show)
        for progress, record in zip(replayed, records, strict=True):
            progress.show_record(out.append(_add_exit_reason(record, server)))
    served = [progress for progress in places if not progress.point.replayed]
    for number, progress in enumerate(served):
        if ended := server.exit_reason:
            fail_points(served[number:], f"the server died: {ended}", server.config, server.folder)
            return
        record, stopped = (measure or measure_point)(progress.point, server, progress.show)
        record = out.append(_add_exit_reason(record, server))
        if stopped is not None:
            raise stopped
        progress.show_record(record)


def fail_points(places: Sequence[PointProgress], reason: str, config: ClientConfig, folder: Path) -> None:
    """Write the records of points that a server that dcpbench started cannot serve."""
    for progress in places:
        record = Record(
            point=progress.point,
            outcome="failed",
            reason=reason,
            advice=f"Read {config.facts['log']} in the run's folder",
            detail=dict(config.facts),
            warnings=["cpu"] if config.device == CPU else [],
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        progress.show_record(RecordFile(folder).append(record))


def _add_exit_reason(record: Record, server: MeasuredServer) -> Record:
    """Return a record, with the end of the server as its reason if it has failed because the server ended."""
    if record.outcome == "ok" or not (ended := server.exit_reason):
        return record
    detail = record.detail or dict(server.config.facts)
    return msgspec.structs.replace(record, reason=f"the server died: {ended}", detail=detail)


@dataclasses.dataclass(frozen=True)
class PointProgress:
    """Show the progress of a point, with its index among the points of a run."""

    point: Point
    index: int
    of: int
    watch: Callable[[Progress], None]

    def show(self, note: str, stage: str = "measure") -> None:
        """Show a note next to the point."""
        self.watch(
            Progress(stage=stage, key=self.point.get_key(), index=self.index, of=self.of, note=note, at=time.time())
        )

    def show_record(self, record: Record) -> None:
        """Show that the point has its record."""
        numbers = format_summary(record.serve) if record.serve else ""
        if record.metrics:
            numbers = f"step {record.metrics.step_ms.median:.2f} ms, {record.metrics.output_tok_s.median:,.0f} tok/s"
        stage = "done" if record.outcome == "ok" else record.outcome
        self.show((format_reason(record) or numbers) + format_omitted_note(record), stage)


def list_point_progress(points: Sequence[Point], watch: Callable[[Progress], None]) -> list[PointProgress]:
    """Return the progress of each point of a run."""
    return [PointProgress(point, index, len(points), watch) for index, point in enumerate(points)]


@dataclasses.dataclass
class _LoadState:
    """State of a sent load at its end, for any outcome."""

    requests: Sequence[ServeRequest]
    run: Run | ClientPool | None = None
    before: Counters | None = None
    after: Counters | None = None
    gpu: Gpu | None = None  # state of the server's GPUs while the load was sent
    waits: tuple[float, list[SyncSite]] | None = None  # host-blocking calls of a step, and their source lines
    unprofiled: str = ""  # why the server was not profiled, if a profile was requested
    complete: bool = False  # True once all requests have ended: an interruption then loses only later work


def measure_point(
    point: Point, server: MeasuredServer, tell: Callable[[str], None] = lambda _: None
) -> tuple[Record, BaseException | None]:
    """Send a point's load; write its samples below the run's folder, and return its record.

    An interruption ends the run and is returned with the record, which keeps the requests that have finished. The point
    has failed then, unless all requests had ended and only the client's check or the server's profile were cut short.
    `tell` gets the last numbers about once a second.
    """
    started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
    sent = _LoadState(_make_requests(point, server.settings, server.prompt_format.vocab))
    stopped: BaseException | None = None
    failed = ""
    try:
        asyncio.run(_send_load(point, server, sent, tell))
    except (KeyboardInterrupt, SystemExit) as e:
        stopped = e
    except (WorkerError, UsageError) as e:
        failed = str(e)
    cut_short = stopped is not None and not sent.complete
    if stopped is not None and sent.complete and server.config.traces is not None and sent.waits is None:
        sent.unprofiled = INTERRUPTED
        print_stderr(
            f"{server.config.target.url} was not profiled: {INTERRUPTED}. The point is kept, without its profile."
        )
    record = _make_record(point, server, sent, failed=failed, stopped=cut_short)
    record = msgspec.structs.replace(
        record, started_at=started.isoformat(timespec="seconds"), seconds=round(time.perf_counter() - begin, 3)
    )
    return record, stopped


async def _send_load(point: Point, server: MeasuredServer, sent: _LoadState, tell: Callable[[str], None]) -> None:
    load, config, prompt_format = point.load, server.config, server.prompt_format
    assert load is not None
    async with Client(config.target) as client:
        warm = await _warm_up(client, config, prompt_format, sent.requests)
        calls = sessions.make_calls(client.target, prompt_format, sent.requests)
        processes = config.processes or choose_processes(point, sent.requests, warm)
        bound = point.concurrency if load.arrival != CLOSED and point.concurrency < load.requests else None
        with raise_open_file_limit(
            -(-point.max_requests // processes), certain=load.arrival == CLOSED, processes=processes
        ):
            options = LoadOptions(
                clients=point.clients,
                at_once=bound,
                limit_s=server.settings.limit_seconds,
                retries=config.retries,
                realtime=config.realtime,
            )
            async with open_load(config.target, calls, options, processes) as run:
                sent.run = run
                await run.prepare(min(point.max_requests, MAX_INITIAL_CONNECTIONS))
                sent.before = await server_info.fetch_counters(client) if server.info.answers_metrics else None
                reporting = asyncio.get_running_loop().create_task(_report_progress(run, tell))
                with sample_gpus(config.gpus.uuids if config.gpus else ()) as get_state:
                    try:
                        await run.send_load()
                        sent.complete = True
                    finally:
                        reporting.cancel()
                        sent.gpu = get_state()
            sent.after = await server_info.fetch_counters(client) if server.info.answers_metrics else None
    if config.traces is not None:
        await _profile_point(point, server, sent, config.traces, tell)


async def _profile_point(
    point: Point, server: MeasuredServer, sent: _LoadState, folder: Path, tell: Callable[[str], None]
) -> None:
    """Send a few requests of the load again, with the server's profiler on; their times are not part of the
    measurement.
    """
    try:
        async with Client(server.config.target) as client:
            calls = _make_short_calls(client.target, server.prompt_format, sent.requests[:PROFILED])
            paths = await record_traces(
                client, calls, min(point.concurrency, PROFILED), folder, server.config.traces_wait_s, tell
            )
        sent.waits = await asyncio.to_thread(find_waits, paths)
    except DcpbenchError as e:
        sent.unprofiled = str(e)
        print_stderr(f"{server.config.target.url} was not profiled: {e}")


def choose_processes(point: Point, requests: Sequence[ServeRequest], warm_itl_s: float | None) -> int:
    """Return the number of client processes for the expected rate of chunks, leaving one core free.

    The rate of an open loop follows from its requests; that of a closed loop from the ITL of the warm-up, which a
    loaded server does not undercut.
    """
    if point.clients is not None:
        rate = point.clients / warm_itl_s if warm_itl_s else 0.0
    else:
        due = [r.arrival_s or 0.0 for r in requests]
        span = max(due) - min(due)
        rate = sum(r.output_tokens for r in requests) / span if span else 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(math.ceil(rate / CHUNKS_EACH), cores - 1), 1)


async def _warm_up(
    client: Client, config: ClientConfig, prompt_format: PromptFormat, requests: Sequence[ServeRequest]
) -> float | None:
    """Send requests with the load's prompt lengths and short answers, all at once; return the median gap of their
    chunks in s.

    Raise WorkerError if all of them fail.
    """
    if not config.warm_up:
        return None
    calls = _make_short_calls(client.target, prompt_format, requests[: config.warm_up])
    run = Run(client, calls, LoadOptions(clients=len(calls), retries=config.retries))
    await run.send_load()
    errors = [outcome.error for outcome in run.outcomes if outcome.error is not None]
    if len(errors) == len(calls):
        raise WorkerError(f"every request of the warm-up failed; the first one: {errors[0].sentence}")
    gaps = [gap for o in run.outcomes if o.answer is not None for gap in np.diff(o.answer.chunk_s)]
    return float(np.median(gaps)) if gaps else None


def _make_short_calls(target: Target, prompt_format: PromptFormat, requests: Sequence[ServeRequest]) -> list[Call]:
    """Return requests of the same lengths, with other tokens and short answers."""
    generator = np.random.Generator(np.random.PCG64(secrets.randbits(64)))
    short = [
        ServeRequest(
            number=request.number,
            prompt=generator.integers(0, prompt_format.vocab, request.prompt_tokens, dtype=np.int32),
            output_tokens=min(request.output_tokens, WARM_UP_OUTPUT),
        )
        for request in requests
    ]
    return sessions.make_calls(target, prompt_format, short)


async def _report_progress(run: Run | ClientPool, tell: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        progress = run.get_progress()
        rate = progress.chunks / max(time.perf_counter() - run.start_s, 1e-9)
        lost = f", {progress.failed} failed" if progress.failed else ""
        tell(f"{progress.ended - progress.failed}/{run.requests} requests{lost}, {rate:,.0f} chunks/s")


def _make_requests(point: Point, settings: Settings, vocab: int) -> list[ServeRequest]:
    """Return the requests of the load with different tokens each time, because a server's prefix cache keeps earlier
    ones.

    All ids are shifted by the same amount, so that shared prefixes stay shared. Prompts from a file are sent unchanged.
    """
    largest = -1
    if settings.trace_path and point.load is not None:
        largest = read_requests(Path(settings.trace_path), Reading.of_load(point.load)).largest_id
    found = make_point_requests(point, settings, max(vocab, largest + 1))
    if largest >= 0:
        return found
    salt = secrets.randbelow(vocab)

    def shift_ids(ids: np.ndarray) -> np.ndarray:
        return ((ids.astype(np.int64) + salt) % vocab).astype(np.int32)

    return [
        dataclasses.replace(r, prompt=shift_ids(r.prompt), answer=None if r.answer is None else shift_ids(r.answer))
        for r in found
    ]


def make_environment(config: ClientConfig) -> Environment:
    """Return the environment of a server's records, as far as it is known."""
    return Environment(
        device=config.gpus.name if config.gpus else config.device,
        device_count=config.device_count,
        device_memory_bytes=config.gpus.memory_bytes if config.gpus else None,
        driver=config.gpus.driver if config.gpus else None,
        dcpbench=dcpbench.__version__,
        command=config.command,
    )


def start_record(point: Point, server: MeasuredServer, described: Server) -> Record:
    """Return the record of a point without measurements: a failed one, with the facts about the server and the machine."""
    return Record(
        point=point,
        outcome="failed",
        warnings=["cpu"] if server.config.device == CPU else [],
        environment=make_environment(server.config),
        measured_with=msgspec.to_builtins(server.settings),
        origin=server.info.origin,
        model_sizes=read_model_sizes(point.model),
        server=described,
    )


def list_point_warnings(server: MeasuredServer, gpu: Gpu | None, found: Mapping[str, bool]) -> list[str]:
    """Return the warnings that hold: those of `found`, and those of any point on the server."""
    conflicts = bool(server.info.kv_sources and server.info.kv_sources.conflicts)
    found = {**found, KV_SOURCES_DIFFER: conflicts, DUMMY_WEIGHTS: server.config.dummy_weights}
    return [warning for warning, holds in {**found, THROTTLED: is_throttled(gpu)}.items() if holds]


def describe_server(server: MeasuredServer) -> Server:
    """Return what is known about a server before a point is measured on it."""
    info, config = server.info, server.config
    return Server(
        engine=info.engine,
        version=info.version,
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_sources=info.kv_sources,
        max_model_len=info.find_model(server.prompt_format.model).max_model_len if info.models else None,
        prompts=server.prompt_format.prompts,
        settings=config.engine_settings,
        start=list(config.start),
        facts={**info.facts, **config.facts, **config.request_facts},
    )


def _make_record(point: Point, server: MeasuredServer, sent: _LoadState, *, failed: str, stopped: bool) -> Record:
    outcomes = sent.run.outcomes if sent.run else []
    record = start_record(point, server, _make_server(server, outcomes, sent))
    shortage = next((o.error for o in outcomes if o.error is not None and o.error.kind == OPEN_FILES), None)
    failed = failed or (shortage.sentence if shortage is not None else "")
    if sent.run is None or (stopped and not outcomes):
        return msgspec.structs.replace(record, reason=failed or "interrupted before any request was sent.")
    drafts = summarize_drafts(sent.before.drafts, sent.after.drafts) if sent.before and sent.after else None
    samples = [_make_sample(o, sent, together=drafts is not None) for o in outcomes]
    try:
        name = write_samples(server.folder, point, make_rows(samples))
        metrics = compute_serve_metrics(
            samples,
            gpus=point.tp,
            concurrency=point.clients,
            slo=server.settings.slo,
            steps=StepCounts(),
            speculation=drafts,
            samples_file=name,
            interrupted=stopped,
            limit_s=server.settings.limit_seconds,
        )
    except OutputError:
        raise  # the disk is at fault, not the point
    except UsageError as e:
        return msgspec.structs.replace(record, reason=failed or str(e))
    since: Mapping[str, int | None] = (
        sent.after.compute_increase(sent.before)
        if sent.after and sent.before
        else {"preemptions": None, "cached_tokens": None}
    )
    if since["cached_tokens"] is None and all(s.cached is not None for s in samples if s.token_s):
        since = {**since, "cached_tokens": sum(s.cached or 0 for s in samples)}
    metrics = msgspec.structs.replace(
        metrics, steps=None, decode_steps=None, eager_decode_steps=None, decode_batch=None, **since
    )
    assert isinstance(record.server, Server)
    found_warnings = {
        CLIENT_BOUND: is_client_bound(record.server.client, metrics.itl_ms.p50),
        GAPS_DIVIDED: drafts is None and any(s.chunk_tokens for s in samples),
        NOMINAL: _has_other_lengths(samples, sent.requests),
    }
    cut_off = server.settings.limit_seconds is not None and len(outcomes) < len(sent.requests)
    reason = failed or _describe_none_finished(metrics, outcomes)
    if stopped:
        reason = (
            f"interrupted with {metrics.finished} of {format_count(len(sent.requests), 'request')} finished; they are in {name}. Send the "
            "load again with --resume."
        )
    return msgspec.structs.replace(
        record,
        outcome="failed" if reason else "ok",
        reason=reason,
        warnings=[
            *record.warnings,
            *list_point_warnings(server, sent.gpu, found_warnings),
            *find_warnings(metrics, cut_off=cut_off),
        ],
        host_syncs_per_step=sent.waits[0] if sent.waits else None,
        sync_sites=sent.waits[1] if sent.waits else [],
        serve=metrics,
        gpu=sent.gpu,
    )


def _describe_none_finished(metrics: ServeMetrics, outcomes: Sequence[Outcome]) -> str | None:
    """Return why a point without a finished request has failed; None if a request finished, or if none failed."""
    if metrics.finished or not metrics.failed:
        return None
    first = next(o.error for o in outcomes if o.error is not None)
    cut_off = f", {metrics.cancelled:,} were cut off" if metrics.cancelled else ""
    return f"no request finished: {metrics.failed:,} failed{cut_off}; the first one: {first.sentence}"


def _make_sample(outcome: Outcome, sent: _LoadState, *, together: bool) -> RequestResult:
    """Return a request as a RequestResult; times after the start of the run.

    The gap before a chunk is divided over its tokens. With `together` they come at once, as those of a step with drafts do.
    """
    assert sent.run is not None
    start, answer = sent.run.start_s, outcome.answer
    request = sent.requests[outcome.call.number]
    sample = RequestResult(request, outcome.submitted_s - start)
    if outcome.error is not None:
        sample.failed = outcome.error.sentence
    if answer is None or not answer.chunk_s:
        return sample
    counts = answer.list_chunk_tokens()
    times = formulas.compute_token_times(answer.chunk_s, counts)
    if together:
        times = [t for t, count in zip(answer.chunk_s, counts, strict=True) for _ in range(count)]
    sample.token_s = [t - start for t in times]
    sample.tokens = answer.tokens if len(answer.tokens) == len(sample.token_s) else []
    sample.chunk_tokens = counts if max(counts) > 1 else []
    length = answer.usage.prompt_tokens if answer.usage and answer.usage.prompt_tokens else request.prompt_tokens
    finished = outcome.ended and outcome.error is None
    sample.request = ServeRequest(
        number=request.number,
        prompt=np.broadcast_to(np.int32(0), length),  # takes no memory: only the length of a sent prompt is kept
        output_tokens=len(sample.token_s) if finished else max(request.output_tokens, len(sample.token_s) + 1),
        arrival_s=request.arrival_s,
        session=request.session,
        turn=request.turn,
    )
    sample.cached_tokens = answer.usage.cached_tokens if answer.usage else None
    return sample


def _make_server(server: MeasuredServer, outcomes: Sequence[Outcome], sent: _LoadState) -> Server:
    errors = [o.error for o in outcomes if o.error is not None]
    kinds = collections.Counter(map(_get_failure_kind, errors))
    first = {_get_failure_kind(error): error.sentence for error in reversed(errors)}
    hidden = sum(o.answer.hidden_tokens for o in outcomes if o.answer is not None)
    answered = next((o.answer for o in outcomes if o.answer is not None and o.answer.chunk_s), None)
    known = describe_server(server)
    return msgspec.structs.replace(
        known,
        counted=answered.counted_by if answered else BY_CHUNKS,
        retries=sum(o.retries for o in outcomes),
        failures=[
            FailedRequests(kind=kind[0], requests=count, first=first[kind]) for kind, count in kinds.most_common()
        ],
        client=_make_client_load(outcomes, sent.run.paces) if sent.run and sent.run.paces else None,
        facts={
            **known.facts,
            **({NOT_PROFILED: sent.unprofiled} if sent.unprofiled else {}),
            **({NO_METRICS: server.info.metrics_hint} if server.info.metrics_hint else {}),
            **({HIDDEN_TOKENS: f"{hidden:,}"} if hidden else {}),
        },
    )


def _get_failure_kind(error: RequestError) -> tuple[str, Fault | None]:
    """Return the kind of a failed request, and the fault of its stream."""
    return error.kind, error.bad.fault if error.bad is not None else None


def _make_client_load(outcomes: Sequence[Outcome], paces: Sequence[Pace]) -> ClientLoad:
    late = [(o.sent_s - o.submitted_s) * 1e3 for o in outcomes if o.sent_s is not None]
    lags = [lag for pace in paces for lag in pace.lags_s]
    ages = [age for pace in paces for age in pace.ages_s]
    starved = [pace.starved_s / pace.wall_s for pace in paces if pace.starved_s is not None and pace.wall_s]
    return ClientLoad(
        processes=len(paces),
        cpu_share=max(pace.cpu_s / pace.wall_s if pace.wall_s else 0.0 for pace in paces),
        late_p99_ms=float(np.percentile(late, P99)) if late else None,
        lag_p99_ms=float(np.percentile(lags, P99)) * 1e3 if lags else None,
        read_late_p99_ms=float(np.percentile(ages, P99)) * 1e3 if ages else None,
        starved_share=max(starved, default=None),
        realtime=all(pace.realtime for pace in paces),
    )


def is_client_bound(client: ClientLoad | None, itl_ms: float | None) -> bool:
    """Return whether the client was too slow for the load that it sent."""
    if client is None:
        return False
    late = max(MAX_LAG_MS, MAX_LAG_SHARE * (itl_ms or 0.0))
    return client.cpu_share > MAX_CPU_SHARE or (client.lag_p99_ms or 0.0) > late


def _has_other_lengths(samples: Sequence[RequestResult], requests: Sequence[ServeRequest]) -> bool:
    """Return True if the mean lengths of finished requests differ from the requested ones."""
    done = [s for s in samples if s.is_finished]
    sent = [requests[s.request.number] for s in done]
    for came, wanted in (
        (sum(len(s.token_s) for s in done), sum(r.output_tokens for r in sent)),
        (sum(s.request.prompt_tokens for s in done), sum(r.prompt_tokens for r in sent)),
    ):
        if abs(came - wanted) > NEAR * wanted:
            return True
    return False
