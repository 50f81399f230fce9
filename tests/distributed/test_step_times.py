"""Measure step times in real torchrun jobs: each case of the grid runs on an engine, and the load is replayed with
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.launch import launcher
from dcpbench.launch.torchrun import RendezvousOptions
from dcpbench.points.budget import plan_engines
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import read_records
from dcpbench.serving.replay import make_step_times_name, replay_from_file
from dcpbench.serving.samples import read_samples
from dcpbench.serving.step_cases import make_cases
from dcpbench.serving.step_times import StepTimes, get_engine_path, read_step_times

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

pytestmark = pytest.mark.distributed

LOAD = Load(mode="replay", requests=12, input_tokens="uniform:1-40", output_tokens="uniform:1-8", chunk=16)
SETTINGS = Settings(profile=False)
CPU = Probe(device="cpu", count=0, name="CPU")


def make_point(layout: Layout = Layout(2, dcp=2), concurrency: int = 6, **changes: object) -> Point:  # noqa: B008 - frozen
    """Return a point of the tiny model on the CPU."""
    return Point(
        model="tiny",
        workload="serve",
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        concurrency=concurrency,
        context=48,
        load=msgspec.structs.replace(LOAD, **changes),
        exchange="ag_rs" if layout.dcp > 1 else "none",
        backend="reference",
        dtype="fp32",
        page_size=2,
    )


def run(points: list[Point], folder: Path) -> list[Record]:
    """Run a job of these points, and return its records."""
    engines = tuple(plan_engines(points, SETTINGS, CPU))
    options = launcher.JobOptions(
        folder=folder, settings=SETTINGS, device="cpu", worker="tests.distributed.rank", engines=engines
    )
    launcher.run_points(points, options, RendezvousOptions(), lambda _: None)
    records = read_records(folder)[-len(points) :]
    assert [(r.outcome, r.reason, r.detail) for r in records] == [("ok", None, {})] * len(points)
    return records


LONE, REPLICAS = Layout(1), Layout(2, dp=2)
OTHERS = {"policy": "prefill-first", "prefix_share": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run that all jobs of this module share."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[Record]:
    """Replay two points of one engine path and one of another in one job."""
    return run([make_point(), make_point(concurrency=2, seed=1), make_point(REPLICAS, **OTHERS)], folder)


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Record:
    """Replay a point of one rank, with the code's commit set to "one"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCPBENCH_GIT_COMMIT", "one")
        return run([make_point(LONE, **OTHERS)], folder)[0]


@pytest.fixture(scope="module")
def job(folder: Path, two_ranks: list[Record]) -> tuple[Path, list[Record], StepTimes]:
    """Return the folder, the records of the two points of one engine path, and their step times."""
    records = two_ranks[:2]
    (file,) = {folder / record.conditions.step_times for record in records}
    return folder, records, read_step_times(file)


@pytest.mark.long
def test_points_of_one_path_share_a_step_times_file(job) -> None:
    folder, records, _ = job
    name = make_step_times_name(get_engine_path(records[0].point))
    assert [r.conditions.step_times for r in records] == [name] * 2
    assert (folder / name).is_file()


@pytest.mark.long
def test_every_case_is_measured_with_enough_samples(job) -> None:
    """Expect at least two samples, and the requests of the larger point."""
    _, _, times = job
    assert all(len(m.samples_ms) >= 2 for m in times.cases)
    assert all(bool(m.host_ms) is bool(m.case.chunks) for m in times.cases)
    assert max(m.case.requests for m in times.cases) == 6
    assert {bool(m.case.decodes) + 2 * bool(m.case.chunks) for m in times.cases} == {1, 2, 3}


@pytest.mark.long
def test_grid_covers_the_larger_point(job) -> None:
    from dcpbench.serving.step_cases import Extent

    _, records, times = job
    pages = records[0].kv.capacity_tokens // 4 + 1
    extent = Extent.from_points([r.point for r in records], pages=pages, max_context=49)
    assert [m.case for m in times.cases] == make_cases(extent)


def test_every_request_is_answered_in_virtual_time(job) -> None:
    folder, records, _ = job
    for record in records:
        assert (record.serve.finished, record.serve.idle_fraction) == (12, None)
        rows = read_samples(folder / record.serve.samples_file)
        assert all(len(row.token_s) == row.output_tokens and not row.tokens for row in rows)
        assert record.warnings[0] == "cpu"


def test_replay_from_the_file_gives_the_same_record(job, tmp_path) -> None:
    """Compare all fields except time, path and command."""
    folder, records, _ = job
    (plan,) = plan_engines([r.point for r in records], SETTINGS, CPU)
    for record in records:
        file = folder / record.conditions.step_times
        again = replay_from_file(record.point, plan, file, SETTINGS, tmp_path)
        conditions = msgspec.structs.replace(again.conditions, step_times=record.conditions.step_times)
        assert conditions == record.conditions
        assert (again.serve, again.kv, again.warnings) == (record.serve, record.kv, record.warnings)
        assert again.measured_with == record.measured_with


@pytest.mark.parametrize("layout", [LONE, REPLICAS], ids=str)
@pytest.mark.long
def test_other_layouts_have_their_own_step_times(layout: Layout, request: pytest.FixtureRequest) -> None:
    record = request.getfixturevalue("one_rank") if layout == LONE else request.getfixturevalue("two_ranks")[2]
    assert record.point.layout == layout
    assert record.conditions.step_times == make_step_times_name(get_engine_path(record.point))
    assert record.serve.finished == 12


@pytest.mark.long
def test_resumed_run_reuses_step_times_of_the_same_commit(folder, one_rank, monkeypatch) -> None:
    """Reuse the file as long as machine and code are the same and it contains every case."""
    file = folder / one_rank.conditions.step_times
    written = file.stat().st_mtime_ns
    monkeypatch.setenv("DCPBENCH_GIT_COMMIT", "one")
    run([make_point(LONE, seed=1, **OTHERS)], folder)
    assert file.stat().st_mtime_ns == written
    monkeypatch.setenv("DCPBENCH_GIT_COMMIT", "two")
    run([make_point(LONE, seed=2, **OTHERS)], folder)
    assert file.stat().st_mtime_ns != written
