"""One point of `--mode replay`, from its step times to its record; by a worker that measured them, or without one."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.points import budget, memory
from dcpbench.points.shapes import load_shape
from dcpbench.records.record import Kv, Record
from dcpbench.serving.loads import requests_of
from dcpbench.serving.outcome import marks, rows, serve_metrics
from dcpbench.serving.replay import replay
from dcpbench.serving.samples import write_samples
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.step_times import read_step_times

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.points.shapes import ModelShape
    from dcpbench.serving.requests import ServeRequest
    from dcpbench.serving.step_times import EnginePath, StepTimes

FOLDER = "step-times"
"""Below the run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The KV cache that a replay schedules for."""

    pages: int
    """Of each rank, the padding page included."""
    max_context: int
    """Tokens of a request at most."""
    bounded_by: str
    """See records.Kv."""


def step_times_name(path: EnginePath) -> str:
    """The file's place below the run's folder: `step-times/deepseek-v3-tp4-dp1-dcp4-ag_rs-0123456789ab.json`."""
    words = "{0}-tp{tp}-dp{dp}-dcp{dcp}-{exchange}".format(Path(str(path["model"])).name, **path)
    return f"{FOLDER}/{words}-{hashlib.sha256(msgspec.json.encode(path)).hexdigest()[:12]}.json"


def replay_point(
    point: Point,
    requests: Sequence[ServeRequest],
    times: StepTimes,
    settings: Settings,
    folder: Path,
    *,
    shape: ModelShape,
    pool: Pool,
    file: str = "",
    command: str = "",
) -> Record:
    """Serve the requests in virtual time; leaves their samples in the run's folder and returns the record.

    `file` names the step times for the record: a path below the folder, or the file that was given. `command` is what
    was typed; the rest of the record's environment is that in which the step times were taken.

    Raises UsageError where the times are not those of the point's engine, or do not reach as far as its load.
    """
    times.must_be_of(point, file or "the step times")
    limit_s = math.inf if settings.limit_seconds is None else settings.limit_seconds
    found = replay(
        requests,
        Scheduler(SchedulerConfig.of(point, pages=pool.pages, max_context=pool.max_context)),
        point.clients,
        times,
        limit_s,
    )
    name = write_samples(folder, point, rows(found.traffic.samples))
    metrics = serve_metrics(
        found.traffic, tp=point.tp, concurrency=point.clients, slo=settings.slo, steps=found.counts, samples_file=name
    )
    error = max((abs(error) for _, error in times.check_errors()), default=None)
    return Record(
        point=point,
        outcome="ok",
        marks=[*times.marks, *marks(metrics)],
        serve=metrics,
        kv=_kv(point, shape, pool),
        honesty=msgspec.structs.replace(times.honesty, step_times=file, step_error=error),
        environment=msgspec.structs.replace(times.environment, command=command or times.environment.command),
    )


def replay_from_file(
    point: Point, all_points: Iterable[Point], path: Path, settings: Settings, folder: Path, command: str = ""
) -> Record:
    """The record of a point by step times that were measured before: no GPU, no torch, no other process.

    `all_points`: those of the whole run, for which a live engine would size its KV cache. Raises RecordsError for a
    file that cannot be read, UsageError where it is not of this point or does not reach as far as its load.
    """
    started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
    times, shape = read_step_times(path), load_shape(point.model)
    times.must_be_of(point, str(path))
    sharing = [p for p in all_points if budget.same_engine(p, point)] or [point]
    probe = times.probe()
    pages = budget.kv_pages(point, sharing, settings, shape, probe)
    plan = budget.memory_plan(point, pages, shape, probe)
    pool = Pool(
        pages=pages,
        max_context=max(p.context for p in sharing) + memory.HEADROOM_TOKENS,
        bounded_by=budget.bounded_by(plan, settings, probe),
    )
    requests = requests_of(point, settings, shape.vocab)
    record = replay_point(
        point, requests, times, settings, folder, shape=shape, pool=pool, file=str(path), command=command
    )
    return msgspec.structs.replace(
        record,
        measured_with=msgspec.to_builtins(settings),
        started_at=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - begin, 3),
    )


def _kv(point: Point, shape: ModelShape, pool: Pool) -> Kv:
    """As point_facts.kv_facts has it of a live engine."""
    itemsize = budget.ITEMSIZE[point.dtype]
    pages = pool.pages - memory.PAGES_OF_PADDING
    one = memory.pages_for(point.context, point.layout, point.page_size)
    return Kv(
        pool_bytes_per_gpu=pool.pages * memory.page_bytes(shape, point.page_size, itemsize),
        bytes_per_token_per_gpu=shape.kv_bytes_per_token(itemsize) / (point.dp * point.dcp),
        capacity_tokens=pages * point.page_size * point.dcp * point.dp,
        capacity_requests=pages // one * point.dp,
        bounded_by=pool.bounded_by,
        fragmentation=0.0,
    )
