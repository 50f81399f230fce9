"""Test torchrun jobs of the fake worker with points that fail, hang or never start, and two nodes on loopback."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.errors import WorkerError
from dcpbench.launch import launcher, ranks, retry
from dcpbench.launch.jobs import SECRET, Progress
from dcpbench.launch.torchrun import RendezvousOptions
from dcpbench.launch.version_check import Package
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import read_records
from dcpbench.records.record import format_reason
from dcpbench.records.runs import read_last_records
from tests import as_fork
from tests.cli.waiting import wait_until
from tests.unit.test_launch import find_free_port

if TYPE_CHECKING:
    from dcpbench.records.record import Record

pytestmark = pytest.mark.distributed
HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _find_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{Path(launcher.__file__).parents[2]}")
    as_fork.replace_agents(monkeypatch.setattr)


def make_point(tp: int, context: int) -> Point:
    """Return a point; its context selects the behaviour of fake_worker.py."""
    return Point(model="tiny", tp=tp, concurrency=2, context=context, backend="reference", dtype="fp32")


def work(folder: Path, **options: Any) -> launcher.JobOptions:
    """Return a sweep on the CPU."""
    return launcher.JobOptions(folder=folder, settings=Settings(), device="cpu", worker="fake_worker", **options)


class Clock:
    """Module `time`, in which each call of monotonic() advances the clock by an hour while `fast` is set."""

    def __init__(self) -> None:
        self.fast, self.ahead = False, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        self.ahead += 3600.0 * self.fast
        return time.monotonic() + self.ahead


def list_outcomes(records: list[Record]) -> list[tuple[int, int, str]]:
    """Return (tp, context, outcome) in file order."""
    return [(r.point.tp, r.point.context, r.outcome) for r in records]


@pytest.mark.long
def test_failed_hung_and_killed_points_are_recorded_and_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 raises on rank 1, 66 hangs, 99 is killed on rank 1; 100 and 101, before and after them, are measured.

    The launcher's clock is fast only while both ranks hang.
    """
    seen: list[Progress] = []
    points = [make_point(2, context) for context in (100, 13, 66, 99, 101)]
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)
    patched_time = SimpleNamespace(sleep=lambda _: wait_until(lambda: all("<module>" in text for text in stacks())))
    monkeypatch.setattr(ranks, "time", patched_time)

    def stacks() -> list[str]:
        return [path.read_text() for path in tmp_path.glob("stacks-*.txt")]

    def watch(event: Progress) -> None:
        seen.append(event)
        if (event.stage, event.key) == ("measure", points[2].get_key()):
            wait_until(lambda: len(list(tmp_path.glob("hangs-*"))) == 2)
        clock.fast = (event.stage, event.key) == ("measure", points[2].get_key())

    launcher.run_points(points, work(tmp_path), RendezvousOptions(), watch)

    records = read_records(tmp_path)
    assert list_outcomes(records) == [
        (2, 100, "ok"),
        (2, 13, "failed"),
        (2, 66, "hung"),
        (2, 99, "failed"),
        (2, 101, "ok"),
    ]
    raised, hung, killed = records[1:4]
    assert "rank 1: ValueError: no such row in tiny. Read logs/tp2-0" in format_reason(raised)
    assert "cause_failure" in raised.detail["traceback"]
    assert raised.detail["exit_code"] == "1"
    assert "no sign of life for 300 s in stage 'measure'" in str(hung.reason)
    assert "cause_failure" in hung.detail["stacks_rank_0"]
    assert "cause_failure" in hung.detail["stacks_rank_1"]
    assert "rank 1 was killed by signal 9 (out of memory" in str(killed.reason)
    assert [e.stage for e in seen if e.stage in ("done", "failed", "hung")] == [
        "done",
        "failed",
        "hung",
        "failed",
        "done",
    ]
    assert "rank 0 of 2 at work" in (tmp_path / "logs" / "tp2-0" / "rank-0.log").read_text()
    assert not list(tmp_path.glob("rank-*.pid"))


@pytest.mark.long
def test_point_that_is_added_to_a_job_and_hangs_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """66 is added after 100 has been measured, and hangs; the launcher's clock is fast only then."""
    added, clock = make_point(2, 66), Clock()
    chosen = [[added]]
    monkeypatch.setattr(launcher, "time", clock)

    def watch(event: Progress) -> None:
        hangs = (event.stage, event.key) == ("measure", added.get_key())
        if hangs:
            wait_until(lambda: len(list(tmp_path.glob("hangs-*"))) == 2)
        clock.fast = hangs

    options = work(tmp_path, choose_points=lambda _: chosen.pop())
    launcher.run_points([make_point(2, 100)], options, RendezvousOptions(), watch)

    first, hung = read_records(tmp_path)
    assert list_outcomes([first, hung]) == [(2, 100, "ok"), (2, 66, "hung")]
    assert "cause_failure" in hung.detail["stacks_rank_1"]
    assert len(list(tmp_path.glob("job-*.json"))) == 1


@pytest.mark.long
def test_ranks_that_hang_after_their_last_point_are_killed_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """46 is measured, then both ranks hang; a minute later the launcher reports their stacks and continues."""
    seen: list[Progress] = []
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)

    def watch(event: Progress) -> None:
        seen.append(event)
        clock.fast = [e.stage for e in seen].count("end") == 1 and event.stage == "end"

    launcher.run_points([make_point(2, 46), make_point(1, 100)], work(tmp_path), RendezvousOptions(), watch)

    assert list_outcomes(read_records(tmp_path)) == [(2, 46, "ok"), (1, 100, "ok")]
    (note,) = (e.note for e in seen if e.stage == "stopped")
    assert "all is measured, but its ranks had not ended 60 s later; dcpbench ends them. Where they stood: " in note
    kept = Path(note.rpartition(": ")[2])
    assert any("wait_for_end" in f.read_text() for f in kept.glob("stacks*"))


@pytest.mark.long
def test_failed_points_are_retried_after_the_others(tmp_path: Path) -> None:
    """44 fails the first time, 13 always; with one retry both run again after 100, and more are suggested for 13."""
    seen: list[str] = []
    points = [make_point(2, context) for context in (44, 13, 100)]
    launcher.run_points(points, work(tmp_path, retries=1), RendezvousOptions(), lambda event: seen.append(event.stage))
    records = read_records(tmp_path)
    assert list_outcomes(records) == [
        (2, 44, "failed"),
        (2, 13, "failed"),
        (2, 100, "ok"),
        (2, 44, "ok"),
        (2, 13, "failed"),
    ]
    assert [stage for stage in seen if stage in ("again", "failed", "done")] == [
        "again",
        "again",
        "done",
        "done",
        "failed",
    ]
    assert str(records[1].advice).endswith("try again with --resume")
    assert str(records[4].advice).endswith("try again with --resume --timeout retries=2")
    assert dict(retry.count_failures(tmp_path)) == {points[0].get_key(): 1, points[1].get_key(): 2}


@pytest.mark.long
def test_point_past_its_time_limit_is_killed_despite_progress(tmp_path: Path) -> None:
    launcher.run_points(
        [make_point(2, 45), make_point(2, 100)], work(tmp_path, point_limit=1.0), RendezvousOptions(), lambda _: None
    )
    records = read_records(tmp_path)
    assert list_outcomes(records) == [(2, 45, "hung"), (2, 100, "ok")]
    assert "not done after 1 s (--timeout point), in stage 'measure'" in str(records[0].reason)
    evidence = tmp_path / records[0].detail["evidence"]
    assert {"stacks-0.txt", "stacks-1.txt", "ranks.json"} <= {path.name for path in evidence.iterdir()}


@pytest.mark.parametrize(
    ("times", "retries", "aside"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (2, 1, True), (2, 2, False), (3, 2, True)],
)
def test_point_is_set_aside_after_two_failures_or_all_retries(times: int, retries: int, aside: bool) -> None:
    assert retry.is_set_aside(times, retries) is aside


@pytest.mark.long
def test_job_that_dies_before_its_first_point_is_tried_twice(tmp_path: Path) -> None:
    """Every relaunch would fail in the same way, so the error has the last log lines and no record is written."""
    with pytest.raises(WorkerError, match=r"(?s)before its first point, twice.*RuntimeError: cannot build the groups"):
        launcher.run_points([make_point(1, 7), make_point(1, 100)], work(tmp_path), RendezvousOptions(), lambda _: None)
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["tp1-0", "tp1-1"]
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.long
def test_unreadable_checkpoint_fails_all_points_of_its_model_after_one_job(tmp_path: Path) -> None:
    """Context 21 finds no tensor; tp 2 and tp 4 fail for the same reason, and another model is measured."""
    other = msgspec.structs.replace(make_point(2, 102), model="other")
    points = [make_point(2, 100), make_point(2, 21), make_point(2, 101), other, make_point(4, 103)]
    launcher.run_points(points, work(tmp_path), RendezvousOptions(), lambda _: None)
    records = read_records(tmp_path)
    assert list_outcomes(records) == [
        (2, 100, "ok"),
        (2, 21, "failed"),
        (2, 101, "failed"),
        (2, 102, "ok"),
        (4, 103, "failed"),
    ]
    failed = [r for r in records if r.outcome == "failed"]
    assert {r.reason for r in failed} == {"rank 0: ModelError: no tensor 'x'; the checkpoint does not match."}
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["tp2-0", "tp2-1"]


@pytest.mark.long
def test_failure_to_build_an_engine_fails_only_points_of_its_layout(tmp_path: Path) -> None:
    """Context 22 runs out of memory while building; the same layout's next point fails too, another layout runs."""
    dcp = msgspec.structs.replace(make_point(2, 102), dcp=2, exchange="ag_rs")
    launcher.run_points(
        [make_point(2, 22), make_point(2, 101), dcp], work(tmp_path), RendezvousOptions(), lambda _: None
    )
    records = read_records(tmp_path)
    assert list_outcomes(records) == [(2, 22, "failed"), (2, 101, "failed"), (2, 102, "ok")]
    assert records[0].reason == records[1].reason == "rank 0: CapacityError: 3 GiB are missing."


@pytest.mark.long
def test_failed_point_of_verify_is_kept_apart_from_sweep_records(tmp_path: Path) -> None:
    """The failure is written to failed.jsonl, and its message does not suggest --resume, which verify lacks."""
    checking = msgspec.structs.replace(work(tmp_path), kind="verify")
    launcher.run_points([make_point(2, 13)], checking, RendezvousOptions(), lambda _: None)
    assert not (tmp_path / "records.jsonl").exists()
    (record,) = read_last_records(tmp_path, "failed.jsonl").values()
    assert format_reason(record).endswith("no such row in tiny. Read logs/tp2-0 in the run's folder")


@pytest.mark.long
def test_only_node_0_of_two_nodes_writes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 on node 1 raises; node 0 records the reason, and both nodes continue with tp 2 and tp 4."""
    monkeypatch.setenv(SECRET, "of these two")
    endpoint = f"127.0.0.1:{find_free_port()}"
    folders = [tmp_path / "node0", tmp_path / "node1"]
    errors: list[BaseException] = []

    def node(rank: int) -> None:
        folders[rank].mkdir()
        points = [make_point(2, 13), make_point(2, 100), make_point(4, 100)] if rank == 0 else []
        rendezvous = RendezvousOptions(nnodes=2, node_rank=rank, rdzv_endpoint=endpoint)
        try:
            launcher.run_points(points, work(folders[rank]), rendezvous, lambda _: None)
        except BaseException as e:  # noqa: BLE001 -- checked in the main thread
            errors.append(e)

    threads = [threading.Thread(target=node, args=(rank,), daemon=True) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    records = read_records(folders[0])
    assert list_outcomes(records) == [(2, 13, "failed"), (2, 100, "ok"), (4, 100, "ok")]
    assert "rank 1: ValueError" in str(records[0].reason)
    assert not (folders[1] / "records.jsonl").exists()
    assert "rank 3 of 4 at work" in (folders[1] / "logs" / "tp4-0" / "rank-3.log").read_text()


def test_ranks_and_probes_import_the_package_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` looks in the working directory first, where another dcpbench raises SystemExit."""
    other = tmp_path / "dcpbench"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('another dcpbench')")
    monkeypatch.chdir(tmp_path)
    assert launcher.run_probe("fake_worker").name == "CPU"
    folder = tmp_path / "run"
    folder.mkdir()
    launcher.run_points([make_point(2, 100)], work(folder), RendezvousOptions(), lambda _: None)
    assert list_outcomes(read_records(folder)) == [(2, 100, "ok")]


def test_ranks_of_another_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is patched to expect another folder than the real worker imports, so no point starts."""
    monkeypatch.setattr(
        launcher.version_check, "get_started_package", lambda: Package(folder="/elsewhere/dcpbench", sha256="0" * 64)
    )
    real = msgspec.structs.replace(work(tmp_path), worker="tests.distributed.rank")
    with pytest.raises(WorkerError) as error:
        launcher.run_points([make_point(2, 100)], real, RendezvousOptions(), lambda _: None)
    assert "before its first point, twice. rank" in str(error.value)
    assert "whose files are not those of the command, in /elsewhere/dcpbench" in str(error.value)
    assert not list(tmp_path.glob("records.jsonl"))
