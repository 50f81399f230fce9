"""Measure points on servers that dcpbench starts: one server for each layout and combination of flags. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError
from dcpbench.launch.jobs import Progress
from dcpbench.points import redaction
from dcpbench.records.file import RecordFile
from dcpbench.records.record import CPU, Record, omitted_note
from dcpbench.servers.kv_capacity import find_pcp
from dcpbench.servers.launch import Server, free_port
from dcpbench.servers.measure import look, manner_of, measure
from dcpbench.servers.profile import FOLDERS
from dcpbench.serving.outcome import in_short
from dcpbench.show.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.servers.measure import Asked
    from dcpbench.servers.presets import Engine

LOGS = "servers"  # folder of a run with the logs of its servers


def server_of(point: Point) -> tuple[object, ...]:
    """Return a key that is equal for points that one server can serve."""
    return point.tp, point.dp, point.dcp, point.ep, point.exchange, point.settings


def measure_started(
    points: Sequence[Point],
    engine: Engine,
    model: str,
    asked: Asked,
    settings: Settings,
    folder: Path,
    watch: Callable[[Progress], None],
    *,
    limit_s: float,
) -> None:
    """Measure all points; each leaves a record in the folder. A server that refuses or dies fails only its own points.

    An interruption ends the server with all its child processes, and is raised again.
    """
    out, places = RecordFile(folder), {point.key(): i for i, point in enumerate(points)}

    def told(point: Point, stage: str) -> Callable[[str], None]:
        return lambda note: tell(point, stage, note)

    def tell(point: Point, stage: str, note: str = "") -> None:
        key = point.key()
        watch(Progress(stage=stage, key=key, index=places[key], of=len(points), note=note, at=time.time()))

    ordered = sorted(points, key=lambda p: list(map(str, server_of(p))))
    for _, group in itertools.groupby(ordered, key=server_of):
        left = list(group)
        port = free_port()
        traces = str(asked.traces.absolute()) if asked.traces else ""
        words = engine.words(left[0], engine.settings_of(left[0]), model, port, traces=traces)
        log = _log(folder, engine, left[0])
        one = dataclasses.replace(
            asked,
            target=dataclasses.replace(asked.target, port=port),
            device_count=left[0].tp,
            facts={"command": redaction.command_line(words), "log": str(log.relative_to(folder))},
        )
        profiling = dict.fromkeys(FOLDERS, traces) if traces else {}
        with Server(words, log, profiling | engine.env, port, engine.ready) as server:
            why = ""
            try:
                waited = server.wait(limit_s, told(left[0], "build"))
                one = dataclasses.replace(one, facts=one.facts | {"start_s": f"{waited:.1f}"})
                info = look(one.target, one.retries).with_kv_capacity(
                    dp=left[0].dp, dcp=left[0].dcp, pcp=find_pcp(words), log=server.read_log()
                )
                for note in info.notes:
                    say(note)
                manner = manner_of(one, info.model(None).id)
            except DcpbenchError as e:
                why = f"{str(e).rstrip('.')}{server.cause(str(e))}"
            for point in left:
                why = why or (f"the server died: {dead}" if (dead := server.dead) else "")
                if why:
                    out.append(_failed(point, why, one))
                    tell(point, "failed", why)
                    continue
                record, stopped = measure(point, one, info, manner, settings, folder, told(point, "measure"))
                if record.outcome != "ok" and (dead := server.dead):
                    record = msgspec.structs.replace(record, reason=f"the server died: {dead}")
                record = out.append(record)
                if stopped is not None:
                    raise stopped
                note = record.reason or (in_short(record.serve) if record.serve else "")
                tell(point, "done" if record.outcome == "ok" else "failed", note + omitted_note(record))


def _log(folder: Path, engine: Engine, point: Point) -> Path:
    """Return a new log file for a server of the run."""
    ep = f"ep{point.ep_degree}" if point.dp > 1 and point.ep_degree else ""
    degrees = f"tp{point.tp}-dp{point.dp}-dcp{point.dcp}"
    name = "-".join(filter(None, (engine.name, degrees, ep, point.settings)))
    plain = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in name)[:120]
    names = (folder / LOGS / f"{plain}{f'-{n}' if n else ''}.log" for n in itertools.count())
    return next(path for path in names if not path.exists())


def _failed(point: Point, why: str, asked: Asked) -> Record:
    return Record(
        point=point,
        outcome="failed",
        reason=f"{why.rstrip('.')}. Read {asked.facts['log']} in the run's folder",
        detail=dict(asked.facts),
        marks=["cpu"] if asked.device == CPU else [],
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
