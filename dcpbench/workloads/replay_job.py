"""`--mode replay` in a job: measure the step times of an engine path once, then serve each point in virtual time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dcpbench.errors import RecordsError
from dcpbench.exchange.torch_collectives import gather_objects, is_first
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.replay import make_step_times_name, replay_point
from dcpbench.serving.step_cases import make_cases
from dcpbench.serving.step_times import StepTimes, get_engine_path, read_step_times, write_step_times
from dcpbench.workloads import step_timing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import Environment, Rates, Record
    from dcpbench.workloads.serve import Serving

StepTimesByPath = dict[str, StepTimes]  # step times that this job has, on every rank, by the name of their file


def run(
    serving: Serving,
    point: Point,
    points: Sequence[Point],
    settings: Settings,
    environment: Environment,
    folder: Path,
    known: StepTimesByPath,
    *,
    rates: Rates | None = None,
    tell: Callable[..., None],
) -> Record:
    """Replay a point on rank 0, with step times for all of `points` that share its path. Collective.

    Every rank returns the record. The step times are then stored below the run's folder, with their floors at `rates`.
    """
    path, session = get_engine_path(point), serving.session
    name = make_step_times_name(path)
    if name not in known:
        sharing = [p for p in points if p.replayed and get_engine_path(p) == path]
        old = _load_earlier_times(serving, sharing, environment, folder / name)
        if old is None:
            tell("capture")
            # All other kernels are compiled in the first step of a case, which is not counted.
            serving.engine.capture_steps(compiling=lambda: tell("compile"))
            old = step_timing.measure_step_times(serving, sharing, environment, tell, rates)
            if is_first():
                write_step_times(folder / name, old)
        known[name] = old
    tell("measure", "replay")
    record = None
    if is_first():
        requests = make_point_requests(point, settings, session.shape.vocab)
        record = replay_point(
            point, session.plan, requests, known[name], settings, folder, file=name, command=environment.command
        )
    found = gather_objects(record)[0]
    assert found is not None
    return found


def _load_earlier_times(
    serving: Serving, points: Sequence[Point], environment: Environment, file: Path
) -> StepTimes | None:
    """Return the step times of an earlier job of this run, if they are of this machine and code and have every case."""
    found = None
    if is_first() and file.is_file():
        with contextlib.suppress(RecordsError):  # of another version, or incomplete: measured again
            old = read_step_times(file)
            same = (environment.host_hash, environment.git_commit)
            here = (old.environment.host_hash, old.environment.git_commit) == same
            if here and {m.case for m in old.cases} >= set(make_cases(step_timing.get_extent(serving, points))):
                found = old
    return gather_objects(found)[0]
