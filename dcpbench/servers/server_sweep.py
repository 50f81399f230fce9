"""Measure points on servers that dcpbench starts: one server for each layout and combination of flags. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError
from dcpbench.measuring.gpu_state import find_visible_gpus
from dcpbench.points import redaction
from dcpbench.records.file import RecordFile
from dcpbench.records.record import CPU, Record
from dcpbench.servers.engine_log import complete_settings, read_started_settings
from dcpbench.servers.engine_replay import ReplayOptions, replay_on_server
from dcpbench.servers.kv_capacity import find_pcp
from dcpbench.servers.launch import Server, choose_log_path, find_free_port
from dcpbench.servers.measure import (
    Place,
    fetch_server_info,
    is_replay,
    list_places,
    measure_point,
    resolve_prompt_format,
)
from dcpbench.servers.presets import make_environment
from dcpbench.servers.profile import FOLDERS
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dcpbench.launch.jobs import Progress
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import StartPhase
    from dcpbench.servers.info import ServerInfo
    from dcpbench.servers.measure import ClientConfig
    from dcpbench.servers.presets import Engine
    from dcpbench.servers.prompt_format import PromptFormat

    MeasurePoint = Callable[
        [Point, ClientConfig, ServerInfo, PromptFormat, Settings, Path, Callable[[str], None]],
        tuple[Record, BaseException | None],
    ]


def make_server_key(point: Point) -> tuple[object, ...]:
    """Return a key that is equal for points that one server can serve."""
    layout = point.tp, point.dp, point.dcp, point.ep, point.exchange, point.q_replicate, point.interleave
    return *layout, point.kv_dtype, point.weights, point.settings


def measure_started(
    points: Sequence[Point],
    engine: Engine,
    model: str,
    config: ClientConfig,
    settings: Settings,
    folder: Path,
    watch: Callable[[Progress], None],
    *,
    limit_s: float,
    measure: MeasurePoint = measure_point,
    replay: ReplayOptions | None = None,
) -> None:
    """Measure all points; each leaves a record in the folder. A server that refuses or dies fails only its own points.

    `measure` measures one point on a server, as measure.measure_point does. The steps of a server are measured once for all
    of its points that are replayed, before it serves others. An interruption ends the server with all its child processes,
    and is raised again.
    """
    sweep = _Sweep(engine, model, config, settings, folder, limit_s, measure, replay or ReplayOptions())
    ordered = sorted(list_places(points, watch), key=lambda place: list(map(str, make_server_key(place.point))))
    for _, group in itertools.groupby(ordered, key=lambda place: make_server_key(place.point)):
        sweep.measure_group(list(group))


@dataclasses.dataclass(frozen=True)
class _Running:
    """A server that takes requests, with all that is known of it."""

    server: Server
    config: ClientConfig
    info: ServerInfo
    prompt_format: PromptFormat
    words: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """What the servers of a run have in common; see measure_started."""

    engine: Engine
    model: str
    config: ClientConfig
    settings: Settings
    folder: Path
    limit_s: float
    measure: MeasurePoint
    replay: ReplayOptions

    def measure_group(self, group: Sequence[Place]) -> None:
        """Start the server of these points, measure them, and end it."""
        first, port = group[0].point, find_free_port()
        traces = str(self.config.traces.absolute()) if self.config.traces else ""
        words = self.engine.make_command(first, self.engine.find_settings(first), self.model, port, traces=traces)
        log = _make_log_path(self.folder, self.engine, first)
        config = dataclasses.replace(
            self.config,
            target=dataclasses.replace(self.config.target, port=port),
            device_count=first.tp,
            gpus=None if self.config.device == CPU else find_visible_gpus(first.tp),
            facts={"command": redaction.format_command_line(words), "log": str(log.relative_to(self.folder))},
        )
        env = make_environment(self.engine, first, dict.fromkeys(FOLDERS, traces) if traces else None)
        with Server(words, log, env, port, self.engine.ready) as server:
            try:
                running = self._wait_until_running(server, config, group[0], words, env)
            except DcpbenchError as e:
                self._fail_points(group, f"{str(e).rstrip('.')}{server.find_cause(str(e))}", config)
                return
            self._replay_points([place for place in group if is_replay(place.point)], running)
            self._serve_points([place for place in group if not is_replay(place.point)], running)

    def _wait_until_running(
        self, server: Server, config: ClientConfig, place: Place, words: Sequence[str], env: Mapping[str, str]
    ) -> _Running:
        """Return the server once it takes requests. Raise DcpbenchError if it does not, or cannot be measured."""
        first = place.point
        start = server.wait_until_ready(self.limit_s, lambda note: place.show(note, "build"))
        text = server.read_log()
        info = fetch_server_info(config.target, config.retries).with_kv_capacity(
            dp=first.dp, dcp=first.dcp, pcp=find_pcp(words), log=text
        )
        config = _add_start(config, start, text, env, first, info.facts)
        for note in info.notes:
            print_stderr(note)
        return _Running(server, config, info, resolve_prompt_format(config, info.find_model(None).id), words)

    def _fail_points(self, places: Sequence[Place], why: str, config: ClientConfig) -> None:
        for place in places:
            self._store(place, _make_failed_record(place.point, why, config))

    def _replay_points(self, places: Sequence[Place], running: _Running) -> None:
        """Measure the steps of the server, and replay the points."""
        if not places:
            return
        records = replay_on_server(
            [place.point for place in places],
            running.config,
            running.info,
            running.prompt_format,
            self.settings,
            self.folder,
            self.replay,
            words=running.words,
            tell=places[0].show,
        )
        for place, record in zip(places, records, strict=True):
            self._store(place, _add_end(record, running))

    def _serve_points(self, places: Sequence[Place], running: _Running) -> None:
        """Serve the loads of the points. A server that dies fails those that are left."""
        for number, place in enumerate(places):
            if dead := running.server.exit_reason:
                self._fail_points(places[number:], f"the server died: {dead}", running.config)
                return
            record, stopped = self.measure(
                place.point,
                running.config,
                running.info,
                running.prompt_format,
                self.settings,
                self.folder,
                place.show,
            )
            record = RecordFile(self.folder).append(_add_end(record, running))
            if stopped is not None:
                raise stopped
            place.show_record(record)

    def _store(self, place: Place, record: Record) -> None:
        """Write a record, and show it on the progress line."""
        place.show_record(RecordFile(self.folder).append(record))


def _add_end(record: Record, running: _Running) -> Record:
    """Return a record, with the end of the server as its reason if it has failed because the server ended."""
    if record.outcome == "ok" or not (dead := running.server.exit_reason):
        return record
    detail = record.detail or dict(running.config.facts)
    return msgspec.structs.replace(record, reason=f"the server died: {dead}", detail=detail)


def _add_start(
    config: ClientConfig,
    start: Sequence[StartPhase],
    log: str,
    env: Mapping[str, str],
    point: Point,
    facts: Mapping[str, str],
) -> ClientConfig:
    """Return the configuration with the phases of the server's start and the settings in its log and its reports.

    Raises WorkerError if the server should have synthetic weights and no rank reports them.
    """
    found, dummy = read_started_settings(log, point.weights, env)
    if found is not None:
        found = complete_settings(found, facts)
        found = msgspec.structs.replace(found, exchange=found.exchange if point.dcp > 1 else None)
    return dataclasses.replace(config, start=start, engine_settings=found, dummy_weights=dummy)


def _make_log_path(folder: Path, engine: Engine, point: Point) -> Path:
    """Return a new log file for a server of the run."""
    ep = f"ep{point.ep_degree}" if point.dp > 1 and point.ep_degree else ""
    degrees = f"tp{point.tp}-dp{point.dp}-dcp{point.dcp}"
    name = "-".join(filter(None, (engine.name, degrees, ep, point.settings)))
    return choose_log_path(folder, name)


def _make_failed_record(point: Point, why: str, config: ClientConfig) -> Record:
    return Record(
        point=point,
        outcome="failed",
        reason=f"{why.rstrip('.')}. Read {config.facts['log']} in the run's folder",
        detail=dict(config.facts),
        marks=["cpu"] if config.device == CPU else [],
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
