"""The launcher's loop over jobs: scripted jobs write the files of ranks, and the clock advances only while it sleeps."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.errors import DiskError, RecordsError, WorkerError
from dcpbench.launch import launcher
from dcpbench.launch.jobs import Exit, Failure, Job, Progress
from dcpbench.launch.nodes import FAILED, STOP, Ended
from dcpbench.launch.ranks import Ranks
from dcpbench.launch.torchrun import KEEP_WAIT_S, RendezvousOptions, Running
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records import disks
from dcpbench.records.file import RecordFile, read_records
from dcpbench.records.folder import FAILED_FILE
from dcpbench.records.record import Record, format_reason
from tests.unit import serve_record_builder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Acts = Generator[None, None, int]
    """Script of a job: one step for each poll of the launcher; returns torchrun's exit code."""
    Script = Callable[["Scripted"], Acts]

A, B, C = (
    Point(model="tiny", tp=2, concurrency=2, context=n, backend="reference", dtype="fp32") for n in (100, 200, 300)
)


class Scripted(Running):
    """A job with ranks that follow a script."""

    def __init__(self, job: Job, script: Script) -> None:
        Ranks.__init__(
            self, Path(job.folder), job.get_log_folder(), job.get_progress_path(), range(job.points[0].world)
        )
        self.job, self.started, self.begun, self.agent_log = (
            job,
            1_764_072_000.0,
            0.0,
            job.get_log_folder() / "agent.log",
        )
        self.remove_files()
        self.logs.mkdir(parents=True, exist_ok=True)
        job.get_path().write_bytes(msgspec.json.encode(job))
        self.code: int | None = None
        self.killed: list[float] = []
        self.asleep = False
        self._acts = script(self)

    def poll(self) -> int | None:
        if self.code is None:
            try:
                next(self._acts)
            except StopIteration as end:
                self.code = end.value
        return self.code

    def is_stopped(self) -> bool:
        return self.asleep

    def resume(self) -> None:
        self.asleep = False

    def collect_stacks(self) -> dict[str, str]:
        return {"0": 'Thread 1 (most recent call first):\n  File "/a/model.py", line 7 in moe\n'}

    def kill(self, wait_s: float = 5.0) -> None:
        self.killed.append(wait_s)

    def write_event(self, stage: str, point: Point | None = None, note: str = "") -> None:
        """Write an event of rank 0."""
        event = Progress(stage=stage, key=point.get_key() if point else "", note=note)
        with self.job.get_progress_path().open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def measure(self, *points: Point) -> None:
        """Record points as measured by rank 0."""
        for point in points:
            self.write_event("measure", point)
            RecordFile(self.folder).append(Record(point=point, outcome="ok"))
            self.write_event("done", point)

    def write_error(self, rank: int, kind: str, message: str, point: Point | None = None, **disk: Any) -> None:
        """Write the error of a rank, for a disk error with its number and the path that could not be written."""
        key = point.get_key() if point else ""
        error = Failure(rank=rank, key=key, kind=kind, message=message, traceback=f"in {kind}", **disk)
        (self.folder / f"error-{rank}.json").write_bytes(msgspec.json.encode(error))

    def write_exit(self, rank: int, code: int, *, terminated: bool = False, at: float = 1.0) -> None:
        """Write the exit of a rank."""
        (self.logs / f"rank-{rank}.exit").write_bytes(
            msgspec.json.encode(Exit(rank=rank, code=code, terminated=terminated, at=at))
        )


class Clock:
    """The module `time`, with a monotonic clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Launched:
    """Runs points with scripted jobs, and keeps the jobs and all events."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.clock = folder, Clock()
        self.jobs: list[Scripted] = []
        self.events: list[Progress] = []
        self._scripts: list[Script] = []
        monkeypatch.setattr(launcher, "Running", self._start)
        monkeypatch.setattr(launcher, "time", self.clock)

    def _start(self, job: Job, *_: object) -> Scripted:
        self.jobs.append(Scripted(job, self._scripts[len(self.jobs)]))
        return self.jobs[-1]

    def __call__(self, points: list[Point], *scripts: Script, **options: Any) -> list[Record]:
        """Return the records in their order, after as many jobs as scripts."""
        self._scripts += scripts
        work = launcher.JobOptions(folder=self.folder, settings=Settings(), device="cpu", **options)
        launcher.run_points(points, work, RendezvousOptions(), self.events.append)
        assert len(self.jobs) == len(self._scripts)
        return read_records(self.folder)

    def list_stages(self) -> list[tuple[str, int | None]]:
        """Return stage and context of each event, without the beginnings of stages of a rank."""
        context = {p.get_key(): p.context for job in self.jobs for p in job.job.points}
        return [(e.stage, context.get(e.key)) for e in self.events if e.stage not in ("measure", "build")]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Return a runner of scripted jobs."""
    return Launched(tmp_path, monkeypatch)


def measure_job(*points: Point) -> Script:
    """Return a script that measures these points and exits with 0."""

    def script(job: Scripted) -> Acts:
        job.measure(*points)
        yield
        job.write_event("end")
        return 0

    return script


def failing_job(point: Point, kind: str = "ValueError", stage: str = "measure", *before: Point) -> Script:
    """Return a script that measures some points and then writes an error of rank 1 at this one."""

    def script(job: Scripted) -> Acts:
        job.measure(*before)
        job.write_event(stage, point)
        yield
        job.write_error(1, kind, "no such row", point)
        job.write_exit(1, 1)
        yield
        return 1

    return script


def crash_before_first_point(job: Scripted) -> Acts:
    """Exit with code 1 before the first point."""
    (job.logs / "rank-0.log").write_text("no port\n")
    yield
    return 1


def silent_job(point: Point, stage: str = "measure") -> Script:
    """Return a script that writes no event after the beginning of a point."""

    def script(job: Scripted) -> Acts:
        job.write_event(stage, point)
        while True:
            yield

    return script


def test_failed_point_is_recorded_and_next_job_measures_the_others(
    launched: Launched,
) -> None:
    records = launched([A, B, C], failing_job(B, "ValueError", "measure", A), measure_job(C))
    assert [(r.point, r.outcome) for r in records] == [(A, "ok"), (B, "failed"), (C, "ok")]
    failed = records[1]
    assert (failed.reason, failed.warnings, failed.started_at) == (
        "rank 1: ValueError: no such row",
        ["cpu"],
        "2025-11-25T12:00:00Z",
    )
    assert failed.advice == "Read logs/tp2-0 in the run's folder, then try again with --resume"
    assert failed.detail == {
        "log": "logs/tp2-0",
        "stage": "measure",
        "log_tail": "",
        "exit_code": "1",
        "error_rank_1": "ValueError: no such row",
        "error": "ValueError",
        "traceback": "in ValueError",
    }
    assert [job.job.tag for job in launched.jobs] == ["tp2-0", "tp2-1"]
    assert [job.job.points for job in launched.jobs] == [[A, B, C], [C]]
    assert launched.list_stages() == [("done", 100), ("failed", 200), ("done", 300), ("end", None)]
    assert [e.note for e in launched.events if e.stage == "failed"] == [format_reason(failed)]


def test_each_world_size_has_a_job_in_order_of_first_points(launched: Launched) -> None:
    wide = msgspec.structs.replace(A, tp=4)
    records = launched([B, wide, A], measure_job(B, A), measure_job(wide))
    assert [r.point for r in records] == [B, A, wide]
    assert [job.job.tag for job in launched.jobs] == ["tp2-0", "tp4-0"]


def test_point_without_events_is_hung_after_its_timeout(launched: Launched) -> None:
    """The timeout is 60 s; building and starting have at least 300 s."""
    records = launched([A, B], silent_job(A), measure_job(B), timeout=60)
    hung = records[0]
    assert (hung.outcome, records[1].outcome) == ("hung", "ok")
    assert str(hung.reason).startswith("no sign of life for 60 s in stage 'measure': ")
    assert hung.cause == "no sign of life for 60 s in stage 'measure'"
    assert hung.detail["evidence"] == "hangs/tp2-0-0"
    assert "moe" in hung.detail["stacks_rank_0"]
    assert (launched.folder / "hangs" / "tp2-0-0" / "finding.json").exists()
    assert launched.clock.now == pytest.approx(1060, abs=2 * launcher.POLL_S)
    assert launched.list_stages()[0] == ("hung", 100)
    assert [job.killed for job in launched.jobs] == [[5.0, 5.0], [5.0]], (
        "killed when it is found hung, and again when the launcher leaves it"
    )


def test_building_has_five_minutes_if_the_timeout_is_shorter(launched: Launched) -> None:
    records = launched([A], silent_job(A, "build"), timeout=60)
    assert str(records[0].reason).startswith("no sign of life for 300 s in stage 'build'")


def test_point_past_its_limit_is_hung_even_with_events(launched: Launched) -> None:
    def busy(job: Scripted) -> Acts:
        job.measure(B)
        while True:
            job.write_event("measure", A, "still at it")
            yield

    records = launched([B, A], busy, point_limit=90)
    assert str(records[1].reason).startswith("not done after 90 s (--timeout point), in stage 'measure'")
    assert records[1].outcome == "hung"
    assert str(records[1].advice).startswith(
        "It may only be slow: allow more time with --timeout point=180. Otherwise read logs/"
    )


def test_failed_point_is_retried_after_the_others(launched: Launched) -> None:
    last = failing_job(B, "ValueError", "measure", C, A)
    records = launched([A, B, C], failing_job(A), failing_job(B), last, retries=1)
    outcomes = [(A, "failed"), (B, "failed"), (C, "ok"), (A, "ok"), (B, "failed")]
    assert [(r.point, r.outcome) for r in records] == outcomes
    assert [job.job.points for job in launched.jobs] == [[A, B, C], [B, C, A], [C, A, B]]
    stages = [s for s in launched.list_stages() if s[0] != "end"]
    assert stages == [("again", 100), ("again", 200), ("done", 300), ("done", 100), ("failed", 200)]
    assert str(records[-1].advice).endswith("then try again with --resume --timeout retries=2")


def test_capacity_error_is_not_retried(launched: Launched) -> None:
    """The reason suggests no retry either."""
    (record,) = launched([A], failing_job(A, "CapacityError"), retries=3)
    assert record.reason == "rank 1: CapacityError: no such row"


def test_build_error_fails_all_points_of_the_engine_after_one_job(launched: Launched) -> None:
    other = msgspec.structs.replace(C, backend="triton")
    records = launched([A, B, other], failing_job(A, "CapacityError", "build"), measure_job(other))
    assert [(r.point, r.outcome) for r in records] == [(A, "failed"), (B, "failed"), (other, "ok")]
    assert records[1].reason == records[0].reason
    assert (records[0].seconds > 0, records[1].seconds) == (True, 0.0)


def test_unreadable_model_fails_points_of_all_world_sizes_after_one_job(launched: Launched) -> None:
    wide = msgspec.structs.replace(A, tp=4)
    records = launched([A, B, wide], failing_job(A, "ModelError", "build"))
    assert [(r.point, r.outcome) for r in records] == [(A, "failed"), (B, "failed"), (wide, "failed")]


def test_job_that_ends_twice_before_its_first_point_raises_worker_error(launched: Launched) -> None:
    with pytest.raises(WorkerError) as error:
        launched([A], crash_before_first_point, crash_before_first_point)
    assert str(error.value) == (
        "the job for --tp 2 ended with exit code 1 before its first point, twice. "
        f"Logs of every rank: {launched.folder}/logs/tp2-1. The last lines:\nrank-0.log:\nno port"
    )
    assert len(launched.jobs) == 2


def test_jobs_without_a_point_that_are_not_consecutive_are_retried(launched: Launched) -> None:
    records = launched([A, B], crash_before_first_point, failing_job(A), crash_before_first_point, measure_job(B))
    assert [r.outcome for r in records] == ["failed", "ok"]


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (lambda job: job.write_error(0, "OSError", "no device"), "rank 0: OSError: no device\nLogs"),
        (lambda job: job.write_exit(1, -9), "rank 1 was killed by signal 9 (out of memory"),
    ],
    ids=["error", "signal"],
)
def test_error_of_job_without_a_point_names_its_cause(
    launched: Launched, fail: Callable[[Scripted], None], cause: str
) -> None:
    def script(job: Scripted) -> Acts:
        fail(job)
        yield
        return 1

    with pytest.raises(WorkerError, match="before its first point, twice") as error:
        launched([A], script, script)
    assert cause in str(error.value)


def test_job_without_events_raises_worker_error_after_two_tries(launched: Launched) -> None:
    def script(_: Scripted) -> Acts:
        while True:
            yield

    with pytest.raises(WorkerError, match=r"--tp 2 gave no sign of life for 300 s before its first point, twice"):
        launched([A], script, script)


def test_exit_code_0_with_missing_points_raises_worker_error(launched: Launched) -> None:
    """A worker that is not dcpbench's own can do this."""
    with pytest.raises(WorkerError, match=r"ended with 1 of its points undone; read .*agent\.log"):
        launched([A, B], measure_job(A))


def test_recorded_point_counts_as_done_without_its_event(launched: Launched) -> None:
    """Rank 0 was killed between the record and the event."""

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        RecordFile(job.folder).append(Record(point=A, outcome="ok"))
        job.write_exit(0, -9)
        yield
        return 1

    records = launched([A, B], script, measure_job(B))
    assert [(r.point, r.outcome) for r in records] == [(A, "ok"), (B, "ok")]


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "rank 1 was killed by signal 9 (out of memory is the usual cause: lower --concurrency or --context)"),
        (-11, "rank 1 was ended by signal 11 (SIGSEGV), native code crashed: the end of its log may say where"),
        (-10, "rank 1 was ended by signal 10 (SIGUSR1), sent by another process"),
        (3, "rank 1 ended with exit code 3 and without an error message"),
        (0, "rank 1 ended with exit code 0 before its points were done"),
    ],
)
def test_rank_that_ends_without_an_error_is_named_with_its_exit_code(launched: Launched, code: int, cause: str) -> None:
    """Torchrun does not end by itself: the other ranks get five seconds, and their logs are kept."""

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        (job.logs / "rank-0.log").write_text("of rank 0\n")
        (job.logs / "rank-1.log").write_text("of rank 1\n")
        job.write_exit(1, code)
        while True:
            yield

    (record,) = launched([A], script)
    assert format_reason(record) == f"{cause}. Read logs/tp2-0 in the run's folder, then try again with --resume"
    assert (record.detail["exit_code"], record.detail["log_tail"]) == (str(code), "rank-1.log:\nof rank 1")
    assert launched.clock.now == pytest.approx(1000 + launcher.GRACE_S, abs=2 * launcher.POLL_S)
    assert launched.jobs[0].killed


def test_killed_torchrun_is_the_cause_and_not_its_ranks(launched: Launched) -> None:
    """The connection error of rank 0 is only a consequence."""

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        yield
        job.write_error(0, "RuntimeError", "Connection closed by peer", A)
        return -9

    (record,) = launched([A], script)
    assert record.reason == "torchrun itself was ended by signal 9 (SIGKILL), and its ranks with it"


ROOT_CAUSE = """\
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 143 (pid: 20155)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_16:52:08
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 20156)
"""


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "rank 1 was killed by signal 9 (out of memory is the usual cause: lower --concurrency or --context)"),
        (143, "rank 1 was ended by signal 15 (SIGTERM), sent by another process"),
    ],
)
@pytest.mark.parametrize("has_error", [False, True])
def test_first_failed_rank_of_torchrun_is_the_cause_and_its_point_is_retried(
    launched: Launched, code: int, cause: str, *, has_error: bool
) -> None:
    """Rank 1 and its parent process were killed, so it left no exit file; torchrun's log names it first, with or
    without an error of rank 0.
    """

    def script(job: Scripted) -> Acts:
        job.write_event("build", A)
        yield
        job.agent_log.write_text(ROOT_CAUSE.format(code))
        if has_error:
            job.write_error(0, "RuntimeError", "Connection closed by peer", A)
        job.write_exit(0, -15, terminated=True)
        return 1

    first, second = launched([A], script, measure_job(A), retries=1)
    assert format_reason(first).startswith(f"{cause}. Read logs/tp2-0")
    assert (first.outcome, second.outcome) == ("failed", "ok")


def test_rank_with_an_error_is_reported_as_the_cause(launched: Launched) -> None:
    """Both ranks report a closed connection; torchrun saw rank 1 end first, and rank 1 has written an error."""

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        yield
        job.agent_log.write_text(ROOT_CAUSE.format(1))
        for rank in (0, 1):
            job.write_error(rank, "RuntimeError", "Connection closed by peer", A)
            job.write_exit(rank, 1)
        return 1

    (record,) = launched([A], script)
    assert str(record.reason).startswith("rank 0: RuntimeError: Connection closed by peer")


def test_stopped_torchrun_is_resumed(launched: Launched) -> None:
    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        job.asleep = True
        yield
        job.measure(A)
        yield
        return 0

    assert [r.outcome for r in launched([A], script)] == ["ok"]
    (note,) = [e.note for e in launched.events if e.stage == "stopped"]
    assert note == "torchrun had been stopped (SIGSTOP); dcpbench lets it continue"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "disk quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "I/O error"),
    ],
)
def test_disk_error_ends_the_run_without_failed_points(
    launched: Launched, number: int, message: str, elsewhere: bool
) -> None:
    """Every point would meet the error. The message names the file, which may be in another folder such as a cache."""
    path = "/cache/x" if elsewhere else f"{launched.folder}/records.jsonl"

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        job.write_error(0, "OSError", "as the system says it", A, disk=number, path=path)
        yield
        return 1

    with pytest.raises(DiskError, match=message) as raised:
        launched([A], script)
    assert str(raised.value).startswith(f"{path if elsewhere else launched.folder}: ")
    assert f"-o {launched.folder} --resume" in str(raised.value)
    assert raised.value.exit_code == 3
    assert not (launched.folder / "records.jsonl").exists()


def test_record_with_failed_fsync_raises_disk_error(launched: Launched) -> None:
    """All points have a record, but fsync reported EIO after the last line was written."""

    def script(job: Scripted) -> Acts:
        job.measure(A)
        job.write_error(0, "DiskError", "its disk reported an I/O error", A, disk=errno.EIO)
        yield
        return 1

    with pytest.raises(DiskError, match="the last record may be lost"):
        launched([A], script)


def test_full_disk_without_an_error_file_raises_disk_error(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank ended with code 1 and could write no error; the launcher finds that it cannot write either."""

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        yield
        monkeypatch.setattr(disks.tempfile, "TemporaryFile", _full)
        return 1

    with pytest.raises(DiskError, match="no space is left on its disk"):
        launched([A], script)


def test_unresponsive_file_system_raises_disk_error_instead_of_a_hang(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state is captured, as that would wait for the same file system."""
    monkeypatch.setattr(disks, "ANSWER_S", 0.2)
    monkeypatch.setattr(disks, "PROBE", "import time; time.sleep(60)")

    def script(job: Scripted) -> Acts:
        job.write_event("measure", A)
        while True:
            yield

    with pytest.raises(DiskError, match="its file system does not answer"):
        launched([A], script, timeout=5.0)
    (note,) = [e.note for e in launched.events if e.stage == "stopped"]
    assert "does not answer" in note
    assert not (launched.folder / "hangs").exists()


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_check_of_verify_is_not_in_the_records(launched: Launched) -> None:
    """Such a record would leave nothing to resume."""
    with pytest.raises(RecordsError, match="holds no record"):
        launched([A], failing_job(A, stage="check"), kind="verify")
    (line,) = (launched.folder / FAILED_FILE).read_bytes().splitlines()
    record = msgspec.json.decode(line, type=Record)
    assert format_reason(record) == "rank 1: ValueError: no such row. Read logs/tp2-0 in the run's folder"


def test_timeout_limits_checks_of_verify_and_measuring_of_sweeps() -> None:
    def list_limits(kind: str, timeout: float) -> list[float]:
        options = launcher.JobOptions(folder=Path(), settings=Settings(), device="cpu", kind=kind, timeout=timeout)
        return [options.get_limit_s(stage) for stage in ("build", "check", "measure", "profile", "end")]

    assert list_limits("sweep", 60) == [300, 300, 60, 60, 60]
    assert list_limits("verify", 60) == [300, 60, 300, 300, 60]
    assert list_limits("sweep", 900) == [900, 900, 900, 900, 60]


@pytest.mark.parametrize("served", [True, False], ids=["requests", "decode"])
def test_interrupt_waits_for_finished_requests_to_be_written(launched: Launched, served: bool) -> None:
    """A run of requests has 25 seconds, any other run none; then the job is killed."""
    load = serve_record_builder.make_load() if served else None
    point = msgspec.structs.replace(A, load=load, workload="serve" if served else "decode")

    def script(job: Scripted) -> Acts:
        job.write_event("measure", point)
        yield
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched([point], script)
    assert launched.jobs[0].killed == ([KEEP_WAIT_S, 5.0] if served else [5.0])
    notes = [e.note for e in launched.events if e.stage == "ending"]
    assert notes == ["writing the requests that have finished; Ctrl-C again ends at once"] * served


class Node0:
    """A connection to node 0 that receives these messages; None is a wait without a message."""

    def __init__(self, *messages: bytes | None) -> None:
        self.messages, self.sent, self.waits = list(messages), list[bytes](), list[float]()
        self.closed = False

    def receive(self, wait: float) -> bytes | None:
        self.waits.append(wait)
        self.closed = len(self.messages) <= 1
        return self.messages.pop(0)

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True


def run_node_1(launched: Launched, monkeypatch: pytest.MonkeyPatch, line: Node0, *scripts: Script) -> None:
    """Run node 1 of two with these scripts as its jobs."""
    launched._scripts += scripts
    monkeypatch.setattr(launcher, "join_leader", lambda *_: line)
    monkeypatch.setattr(Scripted, "wait", lambda job, _: job.poll(), raising=False)
    options = launcher.JobOptions(folder=launched.folder, settings=Settings(), device="cpu")
    launcher.run_points(
        [A], options, RendezvousOptions(nnodes=2, node_rank=1, rdzv_endpoint="10.0.0.1:29500"), launched.events.append
    )


def encode_job(folder: Path) -> bytes:
    """Return a job as node 0 sends it, with a folder that only node 0 has."""
    job = Job(kind="sweep", tag="tp2-0", folder="/of/node/0", device="cpu", points=[A, B], settings=Settings())
    assert folder != Path("/of/node/0")
    return msgspec.json.encode(job)


def test_node_1_runs_jobs_of_node_0_until_stopped(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(_: Scripted) -> Acts:
        while True:
            yield
            if len(line.messages) <= 2:
                return 0

    line = Node0(None, encode_job(launched.folder), None, None, STOP, None)
    run_node_1(launched, monkeypatch, line, script)
    (job,) = launched.jobs
    assert (job.folder, job.job.points, job.killed) == (launched.folder, [A, B], [5.0, 5.0])
    (ended,) = (msgspec.json.decode(data, type=Ended) for data in line.sent)
    assert ended == Ended(node=1, code=0)


def test_node_1_reports_failed_ranks_once_with_their_exits(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(job: Scripted) -> Acts:
        job.write_error(1, "ValueError", "no such row", A)
        job.write_exit(1, 7)
        while True:
            yield

    line = Node0(encode_job(launched.folder), None, None, None, STOP, None)
    run_node_1(launched, monkeypatch, line, script)
    assert line.sent[0] == FAILED
    ended = msgspec.json.decode(line.sent[1], type=Ended)
    assert (len(line.sent), ended.node, ended.code) == (2, 1, 1)
    assert [f.message for f in ended.failures] == ["no such row"]
    assert [e.code for e in ended.exits] == [7]
    assert "moe" in ended.stacks["0"], "stacks are collected because the job had to be killed"


def test_invalid_job_from_node_0_raises_worker_error(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"node 0 sent an invalid job .*; install the same dcpbench on all"):
        run_node_1(launched, monkeypatch, Node0(b"{}", None))


def test_watchdog_grants_five_seconds_after_a_failure_and_measures_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks still run after five seconds; the failed rank does not count as silent."""
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)
    watchdog = launcher.Watchdog()
    clock.now += 60
    assert (watchdog.is_silent(60), watchdog.is_silent(59.9)) == (False, True)
    watchdog.record_activity()
    assert not watchdog.is_silent(1)
    assert not watchdog.is_past_grace(lambda: False)
    assert not watchdog.is_past_grace(lambda: True)
    clock.now += launcher.GRACE_S
    assert not watchdog.is_past_grace(lambda: False)
    assert not watchdog.is_silent(1)
    clock.now += 0.1
    assert watchdog.is_past_grace(lambda: False)


def test_two_jobs_without_a_point_after_a_failed_point_raise_worker_error(launched: Launched) -> None:
    """The run has four jobs: one crashes, one fails at a point, and two crash in a row."""
    with pytest.raises(WorkerError, match="before its first point, twice"):
        launched(
            [A, B],
            crash_before_first_point,
            failing_job(A),
            crash_before_first_point,
            crash_before_first_point,
            measure_job(B),
        )
    assert len(launched.jobs) == 4
