"""Build synthetic launches with the noise of real ones. None of these numbers was measured."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dcpbench.compare.judging import Options, judge_sides
from dcpbench.compare.sides import read_side
from dcpbench.points.layout import Layout
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import Emulated
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.compare.comparison import Comparison
    from dcpbench.records.record import Record

SAMPLES_PER_POINT = 24  # number of step samples of a real point
LOADS = (8, 16, 32, 48)


def make_step_times(
    rng: np.random.Generator, level_ms: float, model: str, cv: float = 0.003, rho: float = 0.6
) -> list[float]:
    """Return step times of one launch: neighbours are correlated by `rho`; with `outliers`, 2 % take up to 4 times as
    long.
    """
    last, *fresh = rng.normal(size=1 + SAMPLES_PER_POINT).tolist()
    noise, own = [], math.sqrt(1 - rho**2)
    for new in fresh:
        last = rho * last + own * new
        noise.append(last)
    times = level_ms * np.exp(cv * np.array(noise))
    if model == "outliers":
        times = np.where(rng.random(SAMPLES_PER_POINT) < 0.02, times * rng.uniform(1.5, 4, SAMPLES_PER_POINT), times)
    found: list[float] = times.tolist()
    return found


@functools.cache
def get_ok_record(load: int) -> Record:
    """Return a record with this many requests at a time, in which metrics are to be replaced."""
    return build.make_ok_record(build.make_point(Layout(4), concurrency=load), steps=20)


def make_launch(rng: np.random.Generator, model: str, cv: float = 0.01, faster: float = 1.0) -> list[Record]:
    """Return a launch of four points of 10 ms a step, with noise `cv` of each point and of the launch.

    The models are `normal`; `shared`: half of the variance is common to the launch; `heavy`: Student's t with 3
    degrees of freedom; `throttle`: every tenth point is 3 % slower; `outliers`: single steps are slow.
    """
    shared = math.sqrt(0.5) if model == "shared" else 0.0
    common = cv * shared * rng.normal()
    found = []
    for load in LOADS:
        own = rng.standard_t(3) / math.sqrt(3) if model == "heavy" else rng.normal()
        log = common + cv * math.sqrt(1 - shared**2) * own
        if model == "throttle" and rng.random() < 0.1:
            log += math.log(1.03)
        record = get_ok_record(load)
        metrics = compute_decode_metrics(
            make_step_times(rng, 10 * math.exp(log) / faster, model), load, record.point.tp
        )
        found.append(msgspec.structs.replace(record, metrics=metrics, started_at=f"at {rng.random()}"))
    return found


def write_launches(folder: Path, count: int, **how: object) -> Path:
    """Write `count` launches into a folder, with the options `seed`, `model`, `cv` and `faster` of `make_launch`."""
    rng = np.random.default_rng(how.pop("seed", 0))  # type: ignore[arg-type]
    for n in range(1, count + 1):
        build.write_records(
            folder / f"round-{n}",
            make_launch(rng, str(how.get("model", "normal")), **{k: v for k, v in how.items() if k != "model"}),
        )  # type: ignore[arg-type]
    return folder


def make_emulated(**ends: float) -> Emulated:
    """Return the modelled part of a forecast, with ends of served figures."""
    return Emulated(machine="H200", calls=1, comm_us=1.0, comm_low_us=1.0, comm_high_us=1.0, **ends)


def make_forecast(median_ms: float, uncertainty: tuple[float, float]) -> Record:
    """Return a forecast of decode steps, which may be shorter and longer by these shares."""
    point = build.make_point(Layout(4), emulate="H200")
    metrics = compute_decode_metrics([median_ms] * 200, point.concurrency, point.tp, uncertainty)
    return msgspec.structs.replace(
        build.make_ok_record(point), metrics=metrics, warnings=["emulated"], emulated=make_emulated()
    )


def compare_records(tmp_path: Path, a: list[Record], b: list[Record], **options: Any) -> Comparison:
    """Compare one launch with one."""
    return judge_sides(
        read_side([build.write_records(tmp_path / "a", a)]),
        read_side([build.write_records(tmp_path / "b", b)]),
        Options(**options),
    )


def compare_launches(
    tmp_path: Path, count: int, faster: float = 1.0, launch_noise: float | None = None, **how: Any
) -> Comparison:
    """Compare this many launches of each side, which scatter by 0.2 %."""
    a = write_launches(tmp_path / "a", count, seed=1, cv=0.002, **how)
    b = write_launches(tmp_path / "b", count, seed=2, cv=0.002, faster=faster, **how)
    return judge_sides(read_side([a]), read_side([b]), Options(launch_noise=launch_noise))
