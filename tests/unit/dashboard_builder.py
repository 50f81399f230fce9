"""Build synthetic histories for tests of the dashboard. None of these numbers was measured."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.points.layout import Layout
from tests.unit import record_builder

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Environment, Record

LAYOUTS = (Layout(4), Layout(4, 1, 2), Layout(4, 1, 4), Layout(4, 4))
BEGAN = datetime(2026, 1, 5, 6, tzinfo=UTC)


def make_environment(run: int, **changes: Any) -> Environment:
    """Return an environment of four H200s at the run-th commit."""
    return msgspec.structs.replace(record_builder.GPU, **({"git_commit": f"{run:07d}abcdef"} | changes))


def make_record(point: Point, run: int, faster: float = 1.0, steps: int = 12, **changes: Any) -> Record:
    """Return a finished record of the run-th day, `faster` times as fast as the plain one."""
    plain = record_builder.compute_step_ms(point.layout, point.context, point.concurrency)
    at = (BEGAN + timedelta(days=run)).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields: dict[str, Any] = {"environment": make_environment(run), "started_at": at}
    return record_builder.make_ok_record(point, median_ms=plain / faster, steps=steps, **(fields | changes))


def list_points(count: int) -> list[Point]:
    """Return different points of two models: layouts, contexts and loads."""
    found = []
    load = 0
    while len(found) < count:
        load += 1
        found += [
            record_builder.make_point(layout, model=model, context=context, concurrency=load)
            for model in ("kimi-k2", "deepseek-v3")
            for context in (4000, 32000)
            for layout in LAYOUTS
        ]
    return found[:count]


def write_history(folder: Path, runs: int = 40, count: int = 8, *, step_at: int | None = 25, cv: float = 0.01) -> Path:
    """Write a folder of runs over the same points; the first point is 5 % slower from `step_at` on."""
    rng = random.Random(count)
    for run in range(runs):
        found = []
        for i, point in enumerate(list_points(count)):
            step = 0.95 if i == 0 and step_at is not None and run >= step_at else 1.0
            found.append(make_record(point, run, faster=step * rng.gauss(1, cv)))
        record_builder.write_records(folder / f"run-{run:03d}", found)
    return folder


def write_many_runs(folder: Path, runs: int, count: int) -> Path:
    """Write `runs` × `count` records quickly: each run repeats the figures of the first with other dates and noise."""
    rng = random.Random(7)
    first = [make_record(point, 0, steps=8) for point in list_points(count)]
    for run in range(runs):
        at = (BEGAN + timedelta(days=run)).strftime("%Y-%m-%dT%H:%M:%SZ")
        where = make_environment(run)
        found = []
        for one in first:
            assert one.metrics is not None
            slower = rng.gauss(1, 0.01)
            step, out = one.metrics.step_ms, one.metrics.output_tok_s
            scaled = msgspec.structs.replace(
                one.metrics,
                step_ms=_scale(step, slower),
                output_tok_s=_scale(out, 1 / slower),
                tok_s_per_user=one.metrics.tok_s_per_user / slower,
                step_samples_ms=[],
            )
            found.append(msgspec.structs.replace(one, metrics=scaled, environment=where, started_at=at))
        record_builder.write_records(folder / f"run-{run:03d}", found)
    return folder


def _scale(interval: Any, by: float) -> Any:
    low, high = interval.low * by, interval.high * by
    return msgspec.structs.replace(interval, median=interval.median * by, low=low, high=high)
