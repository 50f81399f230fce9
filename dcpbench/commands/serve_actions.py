"""What `dcpbench serve` does once its options are read: a grid as of sweep, with loads. No torch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from dcpbench.commands.runs import check_run, machine, measure, stoppable
from dcpbench.errors import DcpbenchError
from dcpbench.launch.jobs import Progress
from dcpbench.plan.judge_serve import known_times
from dcpbench.plan.serve_spec import SERVE_PARSERS, ServeLoads, make_serve_spec, measured_before
from dcpbench.plan.spec import read_options
from dcpbench.points.names import LIVE, NO_EXCHANGE
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Record
from dcpbench.serving.loads import extent
from dcpbench.serving.outcome import in_short
from dcpbench.serving.replay_point import replay_from_file
from dcpbench.show.terminal import console, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.commands.runs import Run
    from dcpbench.launch.launcher import Work
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.machine import Probe
    from dcpbench.points.point import Load, Point
    from dcpbench.points.settings import Settings

USUAL_STEP_S = 0.05
"""Order of magnitude of a step of a large model, to say beforehand what a live run is going to take."""
LONG_S = 600.0


def serve(given: dict[str, object], run: Run) -> int:
    """`dcpbench serve`: returns the exit code."""
    check_run(run)
    from_file = read_options(run.config, SERVE_PARSERS) if run.config else {}
    typed = from_file | {name: value for name, value in given.items() if value is not None}
    path = measured_before(typed)
    if path is None:
        probe = machine(run)
        spec = make_serve_spec(typed, probe)
        _say_about(spec, probe)
        return measure(spec, probe, run)
    times = known_times(path)
    probe = msgspec.structs.replace(
        times.probe(),
        count=max(times.probe().count, times.path.tp),
        packages={"flashinfer": times.environment.flashinfer},
    )
    unsaid = ("overlap", "exchange") if times.path.exchange == NO_EXCHANGE else ("overlap",)
    own = {name: value for name, value in msgspec.to_builtins(times.path).items() if name not in unsaid}
    spec = make_serve_spec({"baseline": False, **own, **typed}, probe)
    _say_about(spec, probe)
    return measure(spec, probe, run, _replay_points)


def _replay_points(points: Sequence[Point], work: Work, run: Run) -> None:
    """Each point in virtual time, in this process."""
    from dcpbench.launch.progress import Watch

    del run
    out = RecordFile(work.folder)
    with stoppable(work), Watch(points, console(error=True)) as watch:
        for point in points:
            try:
                record = replay_from_file(
                    point,
                    work.pool_points or points,
                    Path(work.settings.step_times),
                    work.settings,
                    work.folder,
                    work.command,
                )
            except DcpbenchError as e:
                record = Record(point=point, outcome="failed", reason=str(e))
            out.append(record)
            stage = "done" if record.outcome == "ok" else record.outcome
            note = record.reason or (in_short(record.serve) if record.serve else "")
            watch(Progress(stage=stage, key=point.key(), note=note, at=time.time()))


def _say_about(spec: SweepSpec, probe: Probe) -> None:
    """What the options do that nobody might expect."""
    loads = cast("ServeLoads", spec.serve)
    if loads.trace and loads.trace.sorted:
        say(f"{loads.trace.path}: its times were out of order; the requests are sent by time.")
    if LIVE not in loads.mode or probe.device == "cpu":
        return
    seconds = max(_seconds(concurrency, load, spec.settings) for concurrency, load in loads.each())
    if seconds > LONG_S:
        say(
            f"A live run takes long: about {seconds / 60:,.0f} min for the longest load of each layout, were a step "
            f"{USUAL_STEP_S * 1000:g} ms. --mode replay measures step times and needs seconds for a load; --limit 60s "
            "ends a run early."
        )


def _seconds(concurrency: int | None, load: Load, settings: Settings) -> float:
    """What a live run of a load takes at least: until the last request comes, or until all tokens are sampled."""
    size = extent(load, settings.trace_path)
    steps = size.output / (concurrency or load.requests)
    return min(max(size.ends_s, steps * USUAL_STEP_S), settings.limit_seconds or math.inf)
