"""Measure points on servers that dcpbench starts: one server for each layout and combination of flags. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError
from dcpbench.launch.jobs import Progress
from dcpbench.measuring.gpu_state import find_visible_gpus
from dcpbench.points import redaction
from dcpbench.records.file import RecordFile
from dcpbench.records.record import CPU, Record, format_omitted_note
from dcpbench.servers.engine_log import read_started_settings
from dcpbench.servers.kv_capacity import find_pcp
from dcpbench.servers.launch import Server, choose_log_path, find_free_port
from dcpbench.servers.measure import fetch_server_info, measure_point, resolve_prompt_format
from dcpbench.servers.presets import make_environment
from dcpbench.servers.profile import FOLDERS
from dcpbench.serving.outcome import format_summary
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import StartPhase
    from dcpbench.servers.info import ServerInfo
    from dcpbench.servers.measure import ClientConfig
    from dcpbench.servers.presets import Engine
    from dcpbench.servers.prompts import PromptFormat

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
) -> None:
    """Measure all points; each leaves a record in the folder. A server that refuses or dies fails only its own points.

    `measure` measures one point on a server, as measure.measure_point does. An interruption ends the server with all its
    child processes, and is raised again.
    """
    out, places = RecordFile(folder), {point.get_key(): i for i, point in enumerate(points)}

    def make_reporter(point: Point, stage: str) -> Callable[[str], None]:
        return lambda note: report_progress(point, stage, note)

    def report_progress(point: Point, stage: str, note: str = "") -> None:
        key = point.get_key()
        watch(Progress(stage=stage, key=key, index=places[key], of=len(points), note=note, at=time.time()))

    ordered = sorted(points, key=lambda p: list(map(str, make_server_key(p))))
    for _, group in itertools.groupby(ordered, key=make_server_key):
        left = list(group)
        port = find_free_port()
        traces = str(config.traces.absolute()) if config.traces else ""
        words = engine.make_command(left[0], engine.find_settings(left[0]), model, port, traces=traces)
        log = _make_log_path(folder, engine, left[0])
        one = dataclasses.replace(
            config,
            target=dataclasses.replace(config.target, port=port),
            device_count=left[0].tp,
            gpus=None if config.device == CPU else find_visible_gpus(left[0].tp),
            facts={"command": redaction.format_command_line(words), "log": str(log.relative_to(folder))},
        )
        env = make_environment(engine, left[0], dict.fromkeys(FOLDERS, traces) if traces else None)
        with Server(words, log, env, port, engine.ready) as server:
            why = ""
            try:
                start = server.wait_until_ready(limit_s, make_reporter(left[0], "build"))
                info = fetch_server_info(one.target, one.retries).with_kv_capacity(
                    dp=left[0].dp, dcp=left[0].dcp, pcp=find_pcp(words), log=(text := server.read_log())
                )
                one = _add_start(one, start, text, env, left[0])
                for note in info.notes:
                    print_stderr(note)
                prompt_format = resolve_prompt_format(one, info.find_model(None).id)
            except DcpbenchError as e:
                why = f"{str(e).rstrip('.')}{server.find_cause(str(e))}"
            for point in left:
                why = why or (f"the server died: {dead}" if (dead := server.exit_reason) else "")
                if why:
                    out.append(_make_failed_record(point, why, one))
                    report_progress(point, "failed", why)
                    continue
                record, stopped = measure(
                    point, one, info, prompt_format, settings, folder, make_reporter(point, "measure")
                )
                if record.outcome != "ok" and (dead := server.exit_reason):
                    record = msgspec.structs.replace(record, reason=f"the server died: {dead}")
                record = out.append(record)
                if stopped is not None:
                    raise stopped
                report_progress(point, "done" if record.outcome == "ok" else "failed", _format_note(record))


def _format_note(record: Record) -> str:
    """Return the text of a finished point's progress line."""
    numbers = format_summary(record.serve) if record.serve else ""
    if record.metrics:
        numbers = f"step {record.metrics.step_ms.median:.2f} ms, {record.metrics.output_tok_s.median:,.0f} tok/s"
    return (record.reason or numbers) + format_omitted_note(record)


def _add_start(
    config: ClientConfig, start: Sequence[StartPhase], log: str, env: Mapping[str, str], point: Point
) -> ClientConfig:
    """Return the configuration with the phases of the server's start and the settings in its log.

    Raises WorkerError if the server should have synthetic weights and no rank reports them.
    """
    found, dummy = read_started_settings(log, point.weights, env)
    if found is not None and point.dcp <= 1:
        found = msgspec.structs.replace(found, exchange=None)
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
