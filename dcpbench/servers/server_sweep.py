"""Measure points on servers that dcpbench starts: one server for each layout and combination of flags. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Self

import msgspec

from dcpbench.errors import DcpbenchError
from dcpbench.measuring.gpu_state import find_visible_gpus
from dcpbench.points import redaction
from dcpbench.records.record import CPU
from dcpbench.servers.engine_flags import PCP_FLAGS, find_count
from dcpbench.servers.engine_log import complete_settings, read_started_settings
from dcpbench.servers.engine_replay import ReplayOptions, replay_on_server
from dcpbench.servers.launch import Server, choose_log_path, find_free_port
from dcpbench.servers.measure import (
    MeasuredServer,
    PointProgress,
    fail_points,
    fetch_server_info,
    list_point_progress,
    measure_points,
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
    from dcpbench.servers.measure import ClientConfig, MeasurePoint
    from dcpbench.servers.presets import Engine


def make_server_key(point: Point) -> tuple[object, ...]:
    """Return a key that is equal for points that one server can serve."""
    layout = point.tp, point.dp, point.dcp, point.ep, point.exchange, point.q_replicate, point.interleave
    return *layout, point.kv_dtype, point.weights, point.settings


class KeptServer:
    """Keep the last server of a sweep between its calls, for loads that a search chooses one after the other."""

    def __init__(self) -> None:
        """Begin without a server."""
        self._stack = contextlib.ExitStack()
        self._key: tuple[object, ...] = ()
        self._running: MeasuredServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def get(self, point: Point) -> MeasuredServer | None:
        """Return the server if it runs and can serve the point."""
        alive = self._running is not None and not self._running.exit_reason
        return self._running if alive and self._key == make_server_key(point) else None

    def keep(self, point: Point, running: MeasuredServer, stack: contextlib.ExitStack) -> None:
        """Take over a server, which ends with `stack`."""
        self._key, self._running, self._stack = make_server_key(point), running, stack

    def end(self) -> None:
        """End the server."""
        self._running = None
        self._stack.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSweep:
    """Measure points on the servers of an engine, each of which is started for the points that it can serve."""

    engine: Engine
    model: str
    config: ClientConfig
    settings: Settings
    folder: Path
    limit_s: float  # for the start of a server
    measure_point: MeasurePoint | None = None  # None: as measure.measure_point
    replay: ReplayOptions = dataclasses.field(default_factory=ReplayOptions)
    kept: KeptServer | None = None  # None: a server ends with its points

    def measure(self, points: Sequence[Point], watch: Callable[[Progress], None]) -> None:
        """Measure all points; each leaves a record in the folder. A server that refuses or dies fails only its own points.

        The steps of a server are measured once for all of its points that are replayed, before it serves others. An interruption ends
        the server with all its child processes, and is raised again.
        """
        ordered = sorted(
            list_point_progress(points, watch), key=lambda progress: list(map(str, make_server_key(progress.point)))
        )
        for _, group in itertools.groupby(ordered, key=lambda progress: make_server_key(progress.point)):
            self.measure_group(list(group))

    def measure_group(self, group: Sequence[PointProgress]) -> None:
        """Start the server of these points, measure them, and end it, unless it is kept."""
        first = group[0].point
        with contextlib.ExitStack() as stack:
            running = self.kept.get(first) if self.kept else None
            if running is None:
                if self.kept:
                    self.kept.end()
                running = self._start_server(group, stack)
                if running is None:
                    return
                if self.kept:
                    self.kept.keep(first, running, stack.pop_all())
            measure_points(group, running, self.measure_point, functools.partial(replay_on_server, options=self.replay))

    def _start_server(self, group: Sequence[PointProgress], stack: contextlib.ExitStack) -> MeasuredServer | None:
        """Return the server of these points once it takes requests; `stack` ends it. If it fails, the points fail."""
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
        server = stack.enter_context(Server(words, log, env, port, self.engine.ready))
        try:
            return self._wait_until_running(server, config, group[0], env)
        except DcpbenchError as e:
            fail_points(group, f"{str(e).rstrip('.')}{server.find_cause(str(e))}", config, self.folder)
            return None

    def _wait_until_running(
        self, server: Server, config: ClientConfig, progress: PointProgress, env: Mapping[str, str]
    ) -> MeasuredServer:
        """Return the server once it takes requests, with the settings in its log and its reports.

        Raise DcpbenchError if it does not take any, cannot be measured, or lacks the synthetic weights that it should have.
        """
        first = progress.point
        start = server.wait_until_ready(self.limit_s, lambda note: progress.show(note, "build"))
        text = server.read_log()
        info = fetch_server_info(config.target, config.retries).with_kv_capacity(
            dp=first.dp, dcp=first.dcp, pcp=find_count(server.words, PCP_FLAGS) or 1, log=text
        )
        found, dummy = read_started_settings(text, first.weights, env)
        if found is not None:
            found = complete_settings(found, info.facts)
            found = msgspec.structs.replace(found, exchange=found.exchange if first.dcp > 1 else None)
        config = dataclasses.replace(config, start=start, engine_settings=found, dummy_weights=dummy)
        for note in info.notes:
            print_stderr(note)
        return MeasuredServer(
            config=config,
            info=info,
            prompt_format=resolve_prompt_format(config, info.find_model(None).id),
            settings=self.settings,
            folder=self.folder,
            process=server,
        )


def _make_log_path(folder: Path, engine: Engine, point: Point) -> Path:
    """Return a new log file for a server of the run."""
    ep = f"ep{point.ep_degree}" if point.dp > 1 and point.ep_degree else ""
    degrees = f"tp{point.tp}-dp{point.dp}-dcp{point.dcp}"
    name = "-".join(filter(None, (engine.name, degrees, ep, point.settings)))
    return choose_log_path(folder, name)
