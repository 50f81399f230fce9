"""Measure decode points on engines that are started: the step of the server, as a client sees it, and a profile of it. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import statistics
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError, UsageError, WorkerError
from dcpbench.measuring.gpu_state import sample_gpus
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import MAX_DISTURBANCE, ClientLoad, Phases
from dcpbench.records.stats import StopRule
from dcpbench.servers.client import Client
from dcpbench.servers.measure import (
    CLIENT_BOUND,
    GAPS_DIVIDED,
    NEAR,
    NOMINAL,
    NOT_PROFILED,
    describe_server,
    is_client_bound,
    list_point_warnings,
    start_record,
)
from dcpbench.servers.profile import find_traces, find_waits, run_profiler, wait_for_traces
from dcpbench.servers.step_floors import compute_engine_floor
from dcpbench.servers.step_probe import ServerLimits, StepProbe, measure_case
from dcpbench.serving.step_times import Case, Decodes
from dcpbench.show.numbers import format_percent
from dcpbench.show.terminal import print_stderr
from dcpbench.syncs.kernel_time import COMMUNICATION_PARTS, measure_steps
from dcpbench.syncs.trace_ranks import is_front_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dcpbench.measuring.gpu_state import VisibleGpus
    from dcpbench.points.point import Point
    from dcpbench.records.record import Gpu, Rates, Record, SyncSite
    from dcpbench.servers.decode_streams import DecodeStreams
    from dcpbench.servers.measure import MeasuredServer
    from dcpbench.servers.step_probe import CaseSamples
    from dcpbench.syncs.kernel_time import StepTime

NOISY = "noisy"  # warning: measuring ended before the interval was narrow enough
WAITS_UNKNOWN = "waits_unknown"  # fact: why the waits of the host were not counted, although the step was profiled
MEASURED_CONTEXT = "measured_context"  # fact: KV tokens of a request while its steps were timed
DIVIDED_TOKENS = "divided_tokens"  # fact: share of tokens that the client read together with others of their request
END_S = 1.0  # in which a server that has closed its connections ends
NEAR_TOKENS = 16  # deviation of the mean context that matters to no step
PROFILED_STEPS = 14  # steps of all requests while the profiler runs
DECODE_KINDS = ("decode", "")  # kinds of the steps of a trace that are decode steps


def make_case(point: Point) -> Case:
    """Return the step of a decode point, of all replicas together: the server distributes the requests."""
    return Case(decodes=(Decodes(point.concurrency, point.context),))


@dataclasses.dataclass
class _Measured:
    """State of a measured point at its end, for any outcome."""

    samples: CaseSamples | None = None
    gpu: Gpu | None = None
    phases: Phases | None = None
    waits: tuple[float, list[SyncSite]] | None = None
    unprofiled: str = ""  # why the parts of a step are unknown, if a profile was requested
    uncounted: str = ""  # why the waits of the host are unknown, if the parts of a step are known


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPoints:
    """Measure decode points, as servers.server_sweep.ServerSweep takes it."""

    limits: Callable[[Point], ServerLimits]  # limits that the command line of a point's server states
    rates: Mapping[int, Rates] = dataclasses.field(default_factory=dict)  # by number of GPUs, for floors
    keep_traces: bool = False  # True if traces stay in their folder after they have been scanned

    def __call__(
        self, point: Point, server: MeasuredServer, tell: Callable[[str], None]
    ) -> tuple[Record, BaseException | None]:
        """Return a point's record, and the interruption that ended its measurement."""
        started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
        measured, failed = _Measured(), ""
        stopped: BaseException | None = None
        try:
            asyncio.run(self._measure(point, server, measured, tell))
        except (KeyboardInterrupt, SystemExit) as e:
            stopped = e
        except UsageError as e:
            failed = str(e)
        except WorkerError as e:
            failed = str(e)
            time.sleep(END_S)  # a server that dies closes its connections before its process ends, a better reason
        if stopped is not None and measured.samples is None:
            failed = "interrupted before its steps had been measured."
        record, config = _make_record(point, server, measured, failed), server.config
        if record.outcome == "ok" and not config.dummy_weights:  # with those fewer experts are read than expected
            rates, floor = compute_engine_floor(point, config.engine_settings, self.rates) or (None, None)
            record = msgspec.structs.replace(record, rates=rates, floor=floor)
        seconds = round(time.perf_counter() - begin, 3)
        return msgspec.structs.replace(
            record, started_at=started.isoformat(timespec="seconds"), seconds=seconds
        ), stopped

    async def _measure(
        self, point: Point, server: MeasuredServer, measured: _Measured, tell: Callable[[str], None]
    ) -> None:
        config, settings = server.config, server.settings
        traces = config.traces if settings.profile else None
        before = find_traces(traces) if traces is not None else {}
        async with Client(config.target) as client:
            probe = StepProbe(
                client=client,
                prompt_format=server.prompt_format,
                limits=_complete_limits(self.limits(point), server),
                rule=StopRule(precision=settings.precision, seconds=settings.seconds),
                realtime=config.realtime,
            )

            async def profile(streams: DecodeStreams) -> None:
                tell("profiling")
                try:
                    async with run_profiler(client):
                        await streams.wait_for_chunks(PROFILED_STEPS)
                except DcpbenchError as e:
                    measured.unprofiled = str(e)

            measured.samples = await measure_case(
                probe,
                make_case(point),
                during_window=_sample_into(config.gpus, measured),
                while_running=profile if traces is not None else None,
                tell=tell,
            )
        if traces is not None and not measured.unprofiled:
            timed_ms = statistics.median(measured.samples.samples_ms)
            await self._read_profile(traces, before, config.traces_wait_s, timed_ms, measured, tell)
        if measured.unprofiled:
            print_stderr(f"{config.target.url} was not profiled: {measured.unprofiled}")
        if measured.uncounted:
            print_stderr(f"{config.target.url}: waits of the host are not counted: {measured.uncounted}")

    async def _read_profile(
        self,
        folder: Path,
        before: dict[Path, int],
        wait_s: float,
        timed_ms: float,
        measured: _Measured,
        tell: Callable[[str], None],
    ) -> None:
        """Wait for the traces of all ranks, and read phases and waits from them."""
        paths: list[Path] = []
        try:
            paths = await wait_for_traces(folder, before, wait_s, tell)
            tell("reading the traces")
            measured.phases = await asyncio.to_thread(read_phases, paths, timed_ms)
            measured.waits = await asyncio.to_thread(find_waits, paths)
        except DcpbenchError as e:
            if measured.phases is None:
                measured.unprofiled = str(e)
            else:
                measured.uncounted = str(e)
        finally:
            for path in () if self.keep_traces else paths:
                path.unlink(missing_ok=True)


def _complete_limits(stated: ServerLimits, server: MeasuredServer) -> ServerLimits:
    """Return the limits of a running server: those that it reports, else those of its command line."""
    logged = server.config.engine_settings.max_batched_tokens if server.config.engine_settings else None
    return msgspec.structs.replace(
        stated,
        max_batched_tokens=logged or stated.max_batched_tokens,
        max_model_len=server.info.find_model(server.prompt_format.model).max_model_len or stated.max_model_len,
        kv_tokens=server.info.kv_capacity_tokens or stated.kv_tokens,
    )


@contextlib.contextmanager
def _sample_into(gpus: VisibleGpus | None, measured: _Measured) -> Iterator[None]:
    """Sample the GPUs of the server within the block, and keep their state."""
    with sample_gpus(gpus.uuids if gpus else ()) as get_state:
        yield
        measured.gpu = get_state()


def read_phases(paths: Sequence[Path], timed_ms: float) -> Phases:
    """Return the parts of a typical decode step from the traces of a server's ranks.

    Each moment counts for the kernel that began first, so that parts and idle time add up to the step. Of the ranks it is the one with
    the shortest communication: in the others, communication contains the wait for this one. `timed_ms` is the step that was timed
    without the profiler. Raise WorkerError if no trace has decode steps, TraceError if one cannot be read.
    """
    times = [time for path in paths if not is_front_end(path.name) for time in measure_steps(path)]
    found = [time for time in times if time.kind in DECODE_KINDS]
    if not found:
        raise WorkerError("its traces hold no step in which all requests decode; see `dcpbench syncs kernels`.")
    return make_phases(min(found, key=_get_communication_us), timed_ms)


def _get_communication_us(time: StepTime) -> float:
    return sum(time.typical.part_us.get(part, 0.0) for part in COMMUNICATION_PARTS)


def make_phases(found: StepTime, timed_ms: float) -> Phases:
    """Return the time of a typical step by part as a record has it.

    Waits for launches of the host count as idle time, unless the step with them is longer than the one that was timed without the
    profiler: then the profiler has prolonged them, and they are kept apart.
    """
    typical = found.typical
    idle_us, apart_us = typical.idle_us + typical.host_wait_us, 0.0
    if typical.step_us + typical.host_wait_us > (1 + MAX_DISTURBANCE) * timed_ms * 1e3:
        idle_us, apart_us = typical.idle_us, typical.host_wait_us
    step_us = sum(typical.part_us.values()) + idle_us
    return Phases(
        step_us=step_us,
        phase_us=typical.part_us,
        idle_us=idle_us,
        idle_fraction=idle_us / step_us if step_us else 0.0,
        kernels=round(sum(kernel.per_step for kernel in found.kernels)),
        steps=found.steps,
        host_wait_us=apart_us,
        disturbed=typical.count_disturbed(step_us),
    )


def _make_record(point: Point, server: MeasuredServer, measured: _Measured, failed: str) -> Record:
    described, samples = describe_server(server), measured.samples
    missing = {NOT_PROFILED: measured.unprofiled, WAITS_UNKNOWN: measured.uncounted}
    facts = {**described.facts, **{name: why for name, why in missing.items() if why}}
    described = msgspec.structs.replace(described, facts=facts)
    record = start_record(point, server, described)
    if samples is None:
        return msgspec.structs.replace(record, reason=failed)
    client = ClientLoad(processes=1, cpu_share=samples.client_cpu_share or 0.0)
    metrics = compute_decode_metrics(samples.samples_ms, point.concurrency, point.tp)
    mean = samples.context_mean or 0.0
    facts[MEASURED_CONTEXT] = f"{samples.context_min:,} to {samples.context_max:,}, mean {mean:,.0f}"
    if samples.divided_share > 0:
        facts[DIVIDED_TOKENS] = format_percent(samples.divided_share)
    warnings = {
        NOISY: not samples.precise,
        GAPS_DIVIDED: samples.divided_share > 0,
        NOMINAL: abs(mean - point.context) > max(NEAR * point.context, NEAR_TOKENS),
        CLIENT_BOUND: is_client_bound(client, metrics.step_ms.median),
    }
    return msgspec.structs.replace(
        record,
        outcome="ok",
        warnings=[*record.warnings, *list_point_warnings(server, measured.gpu, warnings)],
        metrics=metrics,
        phases=measured.phases,
        host_syncs_per_step=measured.waits[0] if measured.waits else None,
        sync_sites=measured.waits[1] if measured.waits else [],
        gpu=measured.gpu,
        server=msgspec.structs.replace(described, counted=samples.counted_by, client=client, facts=facts),
    )
