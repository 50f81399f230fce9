"""Implement `dcpbench serve`: serve requests over a grid of layouts and loads."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, collect_typed, make_panel, make_structured
from dcpbench.commands.load_options import FIND, SLO, Requests, print_load_notes, take_bounds
from dcpbench.points.structured_options import Disaggregate, Find, Mtp, Prefill, Stages, Timeout
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from dcpbench.launch.launcher import JobOptions
    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Load as PointLoad
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings

USUAL_STEP_S = 0.05  # order of magnitude of a step of a large model, to estimate how long a live run takes
LONG_S = 600.0

SERVED = make_panel("Scheduling")


class Layouts(opt.Layouts):
    """Hold the options of layouts, with fewer ranks on the CPU than for sweep."""

    tp: str | None = opt.LAYOUT(f"{opt.TP} Default: all GPUs of this machine; 4 on the CPU.")


class Load(Group):
    """Hold the options for the model."""

    model: str | None = opt.MODEL
    weights: str | None = opt.WEIGHTS


class Scheduler(Group):
    """Hold the options for the scheduler and the memory of dcpbench's engine."""

    mtp: Mtp | None = opt.MTP
    prefill: Prefill | None = make_structured(SERVED, Prefill)
    disaggregate: Disaggregate | None = make_structured(SERVED, Disaggregate)
    stages: Stages | None = make_structured(
        SERVED,
        Stages,
        about="Pipeline stages and prefill context parallelism, with --mode replay and with --step-times measured without stages. Values separated by / are separate points.",
    )
    kv_memory: str | None = SERVED(
        "KV pool per GPU, such as 20GiB. If the requests in flight need more, some of them wait or are preempted. Default: all memory that the weights leave. If the GPUs cannot hold all layers, each step repeats those that fit, and the default is the KV cache of the requests in flight, limited by the memory.",
        metavar="SIZE",
    )


class LayerOptions(opt.LayerOptions):
    """Hold the options of how a layer is computed, without `auto`."""

    backend: str | None = opt.HOW(
        "Attention kernel of running requests: triton, flashinfer, flashmla (Hopper GPUs, pages of 64) or, on the CPU, "
        "reference. Default on GPUs: triton on Hopper, with an fp8 KV cache or with --mtp; otherwise flashinfer if it is installed, else triton. Default on the CPU: reference.",
        metavar="NAME,…",
    )
    exchange: str | None = opt.HOW(
        "How partial attention outputs are merged over dcp ranks: ag_rs, a2a, symm (symmetric memory, inside one machine) or "
        "ag_rs_registered (ag_rs in memory that NCCL has registered). "
        "Default: ag_rs.",
        metavar="NAME,…",
    )
    emulate: str | None = opt.HOW(
        "With --mode replay, forecast layouts of any size: measure the step times of one rank on one GPU and model its communication. MACHINE as in dcpbench sweep. Records mark these points as forecasts.",
        metavar="MACHINE,…",
    )


class Run(opt.RunOnMachines):
    """Hold the options of how the command runs, with a limit of each load."""

    timeout: Timeout | None = make_structured(opt.MEASURE, Timeout, "stall", "point", "retries", "load")


class MeasurementOptions(Group):
    """Hold the options for the mode, the objectives and the repeats."""

    mode: str | None = opt.MEASURE(
        "live: every token is computed. replay: step times are measured once for a layout, then the same scheduler "
        "runs in virtual time. live,replay: both, and the report shows their difference. Default: live.",
        metavar="NAME,…",
    )
    step_times: Path | None = opt.MEASURE(
        "With --mode replay: file with step times from an earlier run; no GPU is needed then. Default: measure them.",
        metavar="FILE",
    )
    slo: str | None = SLO
    find: Find | None = FIND
    repeats: int | None = opt.REPEATS
    baseline: bool | None = opt.BASELINE
    profile: bool | None = opt.MEASURE(
        "On GPUs, run a separate profiled pass that finds where the host waits; it does not affect the timings. Default: yes."
    )


def serve(
    layouts: Layouts,
    load: Load,
    requests: Requests,
    scheduler: Scheduler,
    how: LayerOptions,
    measured: MeasurementOptions,
    run: Run,
) -> int:
    """Serve requests with dcpbench's own engine, including prefill and scheduling: TTFT, ITL, throughput and goodput.

    To measure a server of another engine, such as vLLM or SGLang, use `dcpbench server`. Every combination of the values in comma-separated lists is a point; points that cannot run are listed with the reason. The times of every request are written as Parquet next to the records; after Ctrl-C the file has only finished requests.

    For example:

      dcpbench serve --model kimi-k2 --tp 8 --dcp 8 --concurrency 8,32,48

      dcpbench serve --tp 4 --dcp 4 --request-rate 0.5,1,2 --slo ttft=2000,itl=60

      dcpbench serve --tp 4 --dcp 4 --requests trace.jsonl --timeout load=600

      dcpbench serve --tp 4 --input-tokens lognormal:8000:0.7 --mode replay

      dcpbench serve --mode replay --step-times FILE --concurrency 64

      dcpbench serve --tp 4 --mode replay --find concurrency --slo ttft=2000,itl=60
    """
    import msgspec

    from dcpbench.commands import point_runner
    from dcpbench.commands.server import replay_step_times
    from dcpbench.errors import UsageError
    from dcpbench.plan.serve_spec import OTHERS, SERVE_PARSERS, make_serve_spec, resolve_step_times
    from dcpbench.plan.spec import read_options
    from dcpbench.plan.validate import load_step_times
    from dcpbench.points.names import NO_EXCHANGE, STORED

    point_runner.check_run(run)
    given = read_options(run.config, SERVE_PARSERS) if run.config else {}
    given |= collect_typed(layouts, load, requests, scheduler, how, measured, opt.Limits(timeout=run.timeout))
    bounds = take_bounds(measured.find, given, run)
    path = resolve_step_times(given)
    if path is None:
        probe = point_runner.get_probe(run)
        spec = make_serve_spec(given, probe)
        _print_notes(spec, probe, run)
        return point_runner.measure(spec, probe, run, given=given, bounds=bounds)
    if run.gpu_name is not None:
        raise UsageError(f"--step-times {path} records the GPUs of its steps; leave --gpu out.")
    times = load_step_times(path)
    if times.engine is not None:
        return replay_step_times(Path(path), given, run, str(given.pop("policy", None) or ""), bounds)
    probe = msgspec.structs.replace(
        times.make_probe(),
        count=max(times.make_probe().count, int(times.path["tp"])),
        packages={"flashinfer": times.environment.flashinfer, "flash_mla": times.environment.flash_mla},
    )
    unsaid = OTHERS + (("exchange",) if times.path["exchange"] == NO_EXCHANGE else ())
    unsaid += tuple(name for name in (*STORED, "emulate", "routing", "mtp") if not times.path[name])
    own = {name: value for name, value in times.path.items() if name not in unsaid}
    spec = make_serve_spec(given, probe, {"baseline": "disaggregate" in given, **own})
    _print_notes(spec, probe, run)
    return point_runner.measure(spec, probe, run, _replay_points, given={**own, **given}, bounds=bounds)


def _replay_points(points: Sequence["Point"], options: "JobOptions", run: opt.Run) -> None:
    """Replay each point in virtual time, in this process."""
    from dcpbench.commands.point_runner import show_progress
    from dcpbench.errors import DcpbenchError
    from dcpbench.launch.jobs import Progress
    from dcpbench.points.budget import find_engine_plan
    from dcpbench.records.file import RecordFile
    from dcpbench.records.record import Record, format_omitted_note
    from dcpbench.serving.outcome import format_summary
    from dcpbench.serving.replay import replay_from_file

    out = RecordFile(options.folder)
    with show_progress(run, points, options) as bar:
        for point in points:
            try:
                record = replay_from_file(
                    point,
                    find_engine_plan(point, options.engines),
                    Path(options.settings.step_times),
                    options.settings,
                    options.folder,
                    options.command,
                )
            except DcpbenchError as e:
                detail = {"device": options.hardware}
                record = Record(point=point, outcome="failed", reason=str(e), detail=detail)
            record = out.append(record)
            stage = "done" if record.outcome == "ok" else record.outcome
            note = (record.reason or (format_summary(record.serve) if record.serve else "")) + format_omitted_note(
                record
            )
            bar(Progress(stage=stage, key=point.get_key(), note=note, at=time.time()))


def _print_notes(spec: "SweepSpec", probe: "Probe", run: opt.Run) -> None:
    """Print notes about the options: unordered traces, and long live runs."""
    from dcpbench.points.names import LIVE

    if not run.prints_notes:
        return
    loads = cast("ServeLoads", spec.serve)
    print_load_notes(loads, spec.settings, cpu=probe.device == "cpu")
    if LIVE not in loads.mode or probe.device == "cpu":
        return
    seconds = max(_estimate_seconds(concurrency, load, spec.settings) for concurrency, load in loads.iter_loads())
    if seconds > LONG_S:
        print_stderr(
            f"A live run takes long: about {seconds / 60:,.0f} min for the longest load of each layout, at "
            f"{USUAL_STEP_S * 1000:g} ms per step. --mode replay measures step times and needs seconds for a load; "
            "--timeout load=60 ends a run early."
        )


def _estimate_seconds(concurrency: int | None, load: "PointLoad", settings: "Settings") -> float:
    """Return the minimum duration of a live run, in s: until the last arrival, or until all tokens are sampled."""
    from dcpbench.serving.loads import compute_extent

    size = compute_extent(load, settings.trace_path)
    steps = size.output / (concurrency or load.requests)
    return min(max(size.ends_s, steps * USUAL_STEP_S), settings.limit_seconds or math.inf)
