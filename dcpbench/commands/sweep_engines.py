"""Measure the decode steps of an engine that is started: `dcpbench sweep --engine`."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dcpbench.commands import point_runner
from dcpbench.commands.started_servers import (
    check_options,
    check_programs,
    check_server_limits,
    get_request_s,
    get_start_s,
    list_commands,
    print_commands,
)
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.launch import folders
from dcpbench.measuring.gpu_state import find_visible_gpus
from dcpbench.plan import option_parsers as read
from dcpbench.plan.command_line import get_typed_command
from dcpbench.plan.grid import Candidate
from dcpbench.plan.spec import DEVICES, PARSERS, get_defaults
from dcpbench.points.device_probe import Probe
from dcpbench.points.settings import Settings
from dcpbench.records.record import CPU
from dcpbench.servers.client import KEY_VARIABLE, Target, load_api_key
from dcpbench.servers.engine_flags import read_limits
from dcpbench.servers.engine_settings import ENGINE_OPTIONS, list_decode_points, parse_grid, parse_layouts
from dcpbench.servers.measure import ClientConfig
from dcpbench.servers.presets import check_commands_differ, resolve_engine, use_step_profiler
from dcpbench.servers.profile import make_traces_folder
from dcpbench.servers.server_sweep import ServerSweep
from dcpbench.servers.step_floors import read_rates
from dcpbench.servers.step_points import StepPoints, make_case
from dcpbench.servers.step_probe import UnsupportedCaseError, check_case

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.commands.options import Run, RunOnMachines
    from dcpbench.commands.sweep import Engines
    from dcpbench.launch.launcher import JobOptions
    from dcpbench.points.point import Point
    from dcpbench.records.record import Rates
    from dcpbench.servers.presets import Engine
    from dcpbench.servers.step_probe import ServerLimits

TAKEN = (*ENGINE_OPTIONS, "weights", "routing", "seconds", "repeats", "profile", "baseline")  # other engines have them


def measure_engine(engines: Engines, given: Mapping[str, object], run: RunOnMachines) -> int:
    """Start a server for each layout, measure its points, write the report, and return the exit code."""
    _check_options(engines, given, run)
    engine = use_step_profiler(resolve_engine(engines.engine, None, engines.engine_args))
    model = _parse_model(given)
    cpu = run.device == "cpu"
    candidates = _list_candidates(engine, model, given, cpu=cpu)
    check_commands_differ(engine, [c.point for c in candidates if c.error is None], model)
    if point_runner.is_values_only(run, ()):
        return 0
    tps = tuple(dict.fromkeys(c.point.tp for c in candidates))
    probe = Probe(device="cpu" if cpu else "cuda", count=max(tps), name="")
    point_runner.record_device(run, probe)
    settings = _parse_settings(given)
    rates = {} if run.caller.elsewhere is not None else _read_rates(engines, max(tps), cpu=cpu)
    if point_runner.finish_if_planned(candidates, probe, run):
        if not run.as_json:
            print_commands(list_commands(candidates, engine, model, "TRACES" if settings.profile else ""))
        return 0
    check_programs(engine, list_commands(candidates, engine, model))
    folder = run.output or folders.choose_folder(f"{engine.name}-{Path(model).name}", tps)
    config = _make_client_config(run, cpu=cpu)

    def run_all(points: Sequence[Point], options: JobOptions, run: Run) -> None:
        with tempfile.TemporaryDirectory(prefix="dcpbench-traces-") as temporary:
            traces = (engines.traces or Path(temporary)) if options.settings.profile else None
            measure = StepPoints(
                limits=lambda point: _read_limits(engine, point, model),
                rates=rates,
                keep_traces=engines.traces is not None,
            )
            with point_runner.show_progress(run, points, options) as bar:
                servers = ServerSweep(
                    engine=engine,
                    model=model,
                    config=dataclasses.replace(config, traces=traces),
                    settings=options.settings,
                    folder=options.folder,
                    limit_s=get_start_s(run.limits),
                    measure_point=measure,
                )
                servers.measure(points, bar)

    if engines.traces is not None:
        make_traces_folder(engines.traces)
    options = point_runner.make_work(folder, settings, probe, run)
    return point_runner.run_candidates(candidates, folder, options, probe, run, run_all, given=given)


def _check_options(engines: Engines, given: Mapping[str, object], run: RunOnMachines) -> None:
    """Raise UsageError for options that only dcpbench's own engine has, and for invalid times."""
    check_options(given, TAKEN, "--engine")
    if given.get("baseline"):
        most = max(layout.attn_tp for layout in parse_layouts({k: v for k, v in given.items() if k in ("tp", "dp")}))
        instead = f"name the degrees, for example --dcp 1,{most}" if most > 1 else "leave it out"
        raise UsageError(f"--baseline adds no layouts with --engine; {instead}.")
    machine = {"--gpu": run.gpu, "--timeout point": run.limits.point, "--nodes": run.nodes}
    machine |= {"--timeout retries": run.limits.retries or None}
    if wrong := [name for name, value in machine.items() if value is not None]:
        raise UsageError(f"{wrong[0]} is for jobs of dcpbench's own engine; leave it out with --engine.")
    read.check_known("device", run.device, DEVICES)
    check_server_limits(run.limits)
    if engines.traces is not None and given.get("profile") is False:
        raise UsageError(
            "--traces keeps the traces of the profile, and --no-profile records none; leave one of them out."
        )


def _parse_model(given: Mapping[str, object]) -> str:
    names = read.parse_names("model", given["model"]) if "model" in given else ()
    if not names:
        raise UsageError("--engine needs --model: a folder, or a name that the engine knows.")
    if len(names) > 1:
        raise UsageError(
            f"--model {','.join(names)}: with --engine it is one model; measure the others by further commands."
        )
    return names[0]


def _parse_settings(given: Mapping[str, object]) -> Settings:
    found = {name: PARSERS[name](name, given[name]) for name in ("seconds", "profile") if name in given}
    settings = Settings(**found)  # type: ignore[arg-type]
    read.check_seconds("--seconds", settings.seconds, 10)
    return settings


def _list_candidates(engine: Engine, model: str, given: Mapping[str, object], *, cpu: bool) -> list[Candidate]:
    """Return all points; those that the engine or the limits of its command exclude have the error."""
    defaults = get_defaults(Probe(device="cpu" if cpu else "cuda", count=1, name=""))
    counts = {
        name: read.parse_positive_ints(name, given[name]) if name in given else cast("tuple[int, ...]", defaults[name])
        for name in ("concurrency", "context")
    }
    repeats = cast("int", PARSERS["repeats"]("repeats", given.get("repeats", 1)))
    read.check_positive("repeats", repeats)
    layouts = parse_layouts(given)
    if given.get("baseline") is False and "dcp" not in given:
        layouts = [layout for layout in layouts if layout.dcp == layout.attn_tp]
    points = list_decode_points(
        engine, parse_grid(given, model, layouts), counts["concurrency"], counts["context"], repeats
    )
    return [Candidate(point=point, error=_find_error(engine, point, model)) for point in points]


def _find_error(engine: Engine, point: Point, model: str) -> DcpbenchError | None:
    """Return why a point cannot be measured on the engine; None if nothing is known against it."""
    try:
        check_case(_read_limits(engine, point, model), make_case(point))
    except UnsupportedCaseError as e:
        return UsageError(e.sentence)
    except UsageError as e:
        return e
    return None


def _read_limits(engine: Engine, point: Point, model: str) -> ServerLimits:
    """Return the limits that the command of a point's server states. Raise UsageError if the engine cannot run it."""
    return read_limits(engine.make_command(point, engine.find_settings(point), model, 0), point.dp, point.dcp)


def _read_rates(engines: Engines, gpus: int, *, cpu: bool) -> dict[int, Rates]:
    """Return the rates of the run that --rates names; none without it."""
    if engines.rates is None:
        return {}
    found = None if cpu else find_visible_gpus(gpus)
    return read_rates(engines.rates, found.name if found else "")


def _make_client_config(run: RunOnMachines, *, cpu: bool) -> ClientConfig:
    """Return the settings of the client; the port of its server follows later."""
    return ClientConfig(
        target=Target.from_url(
            "http://127.0.0.1:1", key=load_api_key(KEY_VARIABLE), timeout_s=get_request_s(run.limits)
        ),
        command=get_typed_command(),
        device=CPU if cpu else "",
    )
