"""Build synthetic files of a run for tests of `dcpbench top`. Times are seconds after BEGAN."""

from __future__ import annotations

import datetime as dt
import os
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.launch.jobs import Job, Progress
from dcpbench.launch.processes import COMMAND
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.record import Interval, Metrics, Percentiles, Record
from dcpbench.top.facts import Facts
from dcpbench.top.state import State, compute_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BEGAN = 1_700_000_000
COMMAND_LINE = "dcpbench sweep --tp 2"


def make_point(context: int, **changes: Any) -> Point:
    """Return a point of the tiny model, identified by its context."""
    fields: dict[str, Any] = {"model": "tiny", "tp": 2, "concurrency": 2, "backend": "reference", "dtype": "fp32"}
    return Point(context=context, ep="1", **(fields | changes))


def write_job(
    folder: Path,
    points: Sequence[Point],
    *,
    tag: str = "tp2-0",
    at: float = 0,
    pool: Sequence[Point] | None = None,
    kind: str = "sweep",
    command: str = COMMAND_LINE,
    device: str = "cuda",
    is_open: bool = False,
    timeout: float = 300.0,
) -> Job:
    """Write a job file at that time; `pool` has all points of the run, by default these."""
    folder.mkdir(exist_ok=True)
    written = Job(
        kind=kind,
        tag=tag,
        folder=str(folder),
        device=device,
        points=list(points),
        settings=Settings(),
        pool_points=list(points if pool is None else pool),
        command=command,
        open=is_open,
        timeout=timeout,
    )
    written.get_path().write_bytes(msgspec.json.encode(written))
    os.utime(written.get_path(), (BEGAN + at, BEGAN + at))
    return written


def add_event(job: Job, at: float, stage: str, point: Point | None = None, note: str = "") -> None:
    """Add one event."""
    event = Progress(stage=stage, key=point.get_key() if point else "", note=note, at=BEGAN + at)
    append_data(job.get_progress_path(), msgspec.json.encode(event) + b"\n")


def add_record(
    folder: Path, point: Point, *, start: float, seconds: float = 10, outcome: str = "ok", **changes: Any
) -> None:
    """Add a record; an ok one has 200 tok/s and 10 ms."""
    started = dt.datetime.fromtimestamp(BEGAN + start, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    metrics = Metrics(
        step_ms=Interval(median=10, low=10, high=10, samples=100),
        itl_ms=Percentiles(p50=10, samples=100),
        output_tok_s=Interval(median=200, low=200, high=200, samples=100),
        output_tok_s_per_gpu=100,
        tok_s_per_user=100,
    )
    written = Record(
        point=point,
        outcome=outcome,
        started_at=started,
        seconds=seconds,
        metrics=metrics if outcome == "ok" else None,
        **changes,
    )
    append_data(folder / "records.jsonl", msgspec.json.encode(written) + b"\n")


def add_finished_point(job: Job, folder: Path, point: Point, start: float, end: float) -> None:
    """Add a point from its first event to its last one, with its record."""
    add_event(job, start, "measure", point)
    add_record(folder, point, start=start, seconds=end - start)
    add_event(job, end, "done", point, "10.00 ms/step")


def append_data(path: Path, data: bytes) -> None:
    """Append to a file."""
    with path.open("ab") as file:
        file.write(data)


def make_state(facts: Facts | Path, at: float, *, alive: str = COMMAND, began: float | None = 0, **more: Any) -> State:
    """Return the state at that time, of a command that began at `began`."""
    found = facts if isinstance(facts, Facts) else Facts(facts)
    found.read_updates()
    return compute_state(found, BEGAN + at, alive=alive, began=None if began is None else BEGAN + began, **more)
