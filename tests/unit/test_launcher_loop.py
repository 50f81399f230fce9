"""How the launcher follows its jobs: torchrun is a script of what ranks leave in their files, and time goes on by looking."""

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
from dcpbench.launch.torchrun import KEEP_WAIT_S, Machines, Running
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
    """What a job does, a bit each time the launcher looks; it returns torchrun's exit code."""
    Script = Callable[["Scripted"], Acts]

A, B, C = (
    Point(model="tiny", tp=2, concurrency=2, context=n, backend="reference", dtype="fp32") for n in (100, 200, 300)
)


class Scripted(Running):
    """A job whose ranks are a script."""

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

    def tells(self, stage: str, point: Point | None = None, note: str = "") -> None:
        """Rank 0 writes an event."""
        event = Progress(stage=stage, key=point.get_key() if point else "", note=note)
        with self.job.get_progress_path().open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def measures(self, *points: Point) -> None:
        """Rank 0 measures points."""
        for point in points:
            self.tells("measure", point)
            RecordFile(self.folder).append(Record(point=point, outcome="ok"))
            self.tells("done", point)

    def raises(self, rank: int, kind: str, message: str, point: Point | None = None, **disk: Any) -> None:
        """Leave the error of a rank, and of a `disk` its number and the `path` that could not be written."""
        key = point.get_key() if point else ""
        error = Failure(rank=rank, key=key, kind=kind, message=message, traceback=f"in {kind}", **disk)
        (self.folder / f"error-{rank}.json").write_bytes(msgspec.json.encode(error))

    def ends(self, rank: int, code: int, *, asked: bool = False, at: float = 1.0) -> None:
        """A rank ends."""
        (self.logs / f"rank-{rank}.exit").write_bytes(
            msgspec.json.encode(Exit(rank=rank, code=code, asked=asked, at=at))
        )


class Clock:
    """The module `time`, whose monotonic clock goes on as one sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Launched:
    """Runs points whose jobs are scripts, and keeps the jobs and all that was seen."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.clock = folder, Clock()
        self.jobs: list[Scripted] = []
        self.seen: list[Progress] = []
        self._scripts: list[Script] = []
        monkeypatch.setattr(launcher, "Running", self._start)
        monkeypatch.setattr(launcher, "time", self.clock)

    def _start(self, job: Job, *_: object) -> Scripted:
        self.jobs.append(Scripted(job, self._scripts[len(self.jobs)]))
        return self.jobs[-1]

    def __call__(self, points: list[Point], *scripts: Script, **options: Any) -> list[Record]:
        """The records, in their order; there must be as many jobs as scripts."""
        self._scripts += scripts
        work = launcher.Work(folder=self.folder, settings=Settings(), device="cpu", **options)
        launcher.run_points(points, work, Machines(), self.seen.append)
        assert len(self.jobs) == len(self._scripts)
        return read_records(self.folder)

    def stages(self) -> list[tuple[str, int | None]]:
        """(stage, context of its point) of what was seen, but for what a rank began."""
        context = {p.get_key(): p.context for job in self.jobs for p in job.job.points}
        return [(e.stage, context.get(e.key)) for e in self.seen if e.stage not in ("measure", "build")]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """See Launched."""
    return Launched(tmp_path, monkeypatch)


def measuring(*points: Point) -> Script:
    """A job that measures these and ends well."""

    def script(job: Scripted) -> Acts:
        job.measures(*points)
        yield
        job.tells("end")
        return 0

    return script


def raising(point: Point, kind: str = "ValueError", stage: str = "measure", *before: Point) -> Script:
    """A job that measures some, and in which rank 1 raises an error at this one."""

    def script(job: Scripted) -> Acts:
        job.measures(*before)
        job.tells(stage, point)
        yield
        job.raises(1, kind, "no such row", point)
        job.ends(1, 1)
        yield
        return 1

    return script


def dying(job: Scripted) -> Acts:
    """A job that ends before it has begun a point."""
    (job.logs / "rank-0.log").write_text("no port\n")
    yield
    return 1


def silent(point: Point, stage: str = "measure") -> Script:
    """A job of which nothing is heard after it has begun a point."""

    def script(job: Scripted) -> Acts:
        job.tells(stage, point)
        while True:
            yield

    return script


def test_a_point_that_raises_is_recorded_with_its_error_and_the_others_are_measured_by_another_job(
    launched: Launched,
) -> None:
    records = launched([A, B, C], raising(B, "ValueError", "measure", A), measuring(C))
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
    assert launched.stages() == [("done", 100), ("failed", 200), ("done", 300), ("end", None)]
    assert [e.note for e in launched.seen if e.stage == "failed"] == [format_reason(failed)]


def test_sizes_have_jobs_of_their_own_in_the_order_of_their_first_points(launched: Launched) -> None:
    wide = msgspec.structs.replace(A, tp=4)
    records = launched([B, wide, A], measuring(B, A), measuring(wide))
    assert [r.point for r in records] == [B, A, wide]
    assert [job.job.tag for job in launched.jobs] == ["tp2-0", "tp4-0"]


def test_a_point_of_which_nothing_is_heard_is_hung_after_its_timeout(launched: Launched) -> None:
    """The timeout is 60 s; building and starting have at least 300 s."""
    records = launched([A, B], silent(A), measuring(B), timeout=60)
    hung = records[0]
    assert (hung.outcome, records[1].outcome) == ("hung", "ok")
    assert str(hung.reason).startswith("no sign of life for 60 s in stage 'measure': ")
    assert hung.cause == "no sign of life for 60 s in stage 'measure'"
    assert hung.detail["evidence"] == "hangs/tp2-0-0"
    assert "moe" in hung.detail["stacks_rank_0"]
    assert (launched.folder / "hangs" / "tp2-0-0" / "finding.json").exists()
    assert launched.clock.now == pytest.approx(1060, abs=2 * launcher.POLL_S)
    assert launched.stages()[0] == ("hung", 100)
    assert [job.killed for job in launched.jobs] == [[5.0, 5.0], [5.0]], (
        "as soon as it is given up, and as each is left"
    )


def test_a_point_that_is_being_built_has_five_minutes_however_short_the_timeout(launched: Launched) -> None:
    records = launched([A], silent(A, "build"), timeout=60)
    assert str(records[0].reason).startswith("no sign of life for 300 s in stage 'build'")


def test_a_point_past_its_limit_is_ended_whatever_is_heard_of_it(launched: Launched) -> None:
    def busy(job: Scripted) -> Acts:
        job.measures(B)
        while True:
            job.tells("measure", A, "still at it")
            yield

    records = launched([B, A], busy, point_limit=90)
    assert str(records[1].reason).startswith("not done after 90 s (--timeout point), in stage 'measure'")
    assert records[1].outcome == "hung"


def test_a_point_that_failed_is_begun_again_behind_the_others_as_often_as_asked(launched: Launched) -> None:
    last = raising(B, "ValueError", "measure", C, A)
    records = launched([A, B, C], raising(A), raising(B), last, retries=1)
    outcomes = [(A, "failed"), (B, "failed"), (C, "ok"), (A, "ok"), (B, "failed")]
    assert [(r.point, r.outcome) for r in records] == outcomes
    assert [job.job.points for job in launched.jobs] == [[A, B, C], [B, C, A], [C, A, B]]
    told = [s for s in launched.stages() if s[0] != "end"]
    assert told == [("again", 100), ("again", 200), ("done", 300), ("done", 100), ("failed", 200)]
    assert str(records[-1].advice).endswith("then try again with --resume --timeout retries=2")


def test_an_error_that_says_what_to_type_is_not_met_again(launched: Launched) -> None:
    """A capacity error, whatever the retries; nothing is said of trying again."""
    (record,) = launched([A], raising(A, "CapacityError"), retries=3)
    assert record.reason == "rank 1: CapacityError: no such row"


def test_what_one_engine_cannot_build_is_told_for_all_of_its_points_after_one_job(launched: Launched) -> None:
    other = msgspec.structs.replace(C, backend="triton")
    records = launched([A, B, other], raising(A, "CapacityError", "build"), measuring(other))
    assert [(r.point, r.outcome) for r in records] == [(A, "failed"), (B, "failed"), (other, "ok")]
    assert records[1].reason == records[0].reason
    assert (records[0].seconds > 0, records[1].seconds) == (True, 0.0)


def test_a_model_that_cannot_be_read_is_told_for_points_of_all_sizes_after_one_job(launched: Launched) -> None:
    wide = msgspec.structs.replace(A, tp=4)
    records = launched([A, B, wide], raising(A, "ModelError", "build"))
    assert [(r.point, r.outcome) for r in records] == [(A, "failed"), (B, "failed"), (wide, "failed")]


def test_a_job_that_ends_before_its_first_point_is_tried_once_more_and_then_told(launched: Launched) -> None:
    with pytest.raises(WorkerError) as told:
        launched([A], dying, dying)
    assert str(told.value) == (
        "the job for --tp 2 ended with exit code 1 before its first point, twice. "
        f"Logs of every rank: {launched.folder}/logs/tp2-1. The last lines:\nrank-0.log:\nno port"
    )
    assert len(launched.jobs) == 2


def test_only_two_jobs_in_a_row_that_begin_no_point_are_too_many(launched: Launched) -> None:
    records = launched([A, B], dying, raising(A), dying, measuring(B))
    assert [r.outcome for r in records] == ["failed", "ok"]


@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        (lambda job: job.raises(0, "OSError", "no device"), "rank 0: OSError: no device\nLogs"),
        (lambda job: job.ends(1, -9), "rank 1 was killed by signal 9 (out of memory"),
    ],
    ids=["error", "signal"],
)
def test_of_a_job_that_begins_no_point_it_is_said_who_broke_it(
    launched: Launched, leaves: Callable[[Scripted], None], told: str
) -> None:
    def script(job: Scripted) -> Acts:
        leaves(job)
        yield
        return 1

    with pytest.raises(WorkerError, match="before its first point, twice") as error:
        launched([A], script, script)
    assert told in str(error.value)


def test_a_job_that_never_says_anything_is_given_up_after_five_minutes_twice(launched: Launched) -> None:
    def script(_: Scripted) -> Acts:
        while True:
            yield

    with pytest.raises(WorkerError, match=r"--tp 2 gave no sign of life for 300 s before its first point, twice"):
        launched([A], script, script)


def test_a_job_that_ends_well_with_points_undone_is_an_error(launched: Launched) -> None:
    """The worker is not dcpbench's own."""
    with pytest.raises(WorkerError, match=r"ended with 1 of its points undone; read .*agent\.log"):
        launched([A, B], measuring(A))


def test_a_point_recorded_though_its_rank_did_not_live_to_say_so_is_done(launched: Launched) -> None:
    """Rank 0 was killed between the record and the event."""

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        RecordFile(job.folder).append(Record(point=A, outcome="ok"))
        job.ends(0, -9)
        yield
        return 1

    records = launched([A, B], script, measuring(B))
    assert [(r.point, r.outcome) for r in records] == [(A, "ok"), (B, "ok")]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-9, "rank 1 was killed by signal 9 (out of memory is the usual cause: lower --concurrency or --context)"),
        (-11, "rank 1 was ended by signal 11 (SIGSEGV), native code crashed: the end of its log may say where"),
        (-10, "rank 1 was ended by signal 10 (SIGUSR1), sent by another process"),
        (3, "rank 1 ended with exit code 3 and without an error message"),
        (0, "rank 1 ended with exit code 0 before its points were done"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named_with_how(launched: Launched, code: int, told: str) -> None:
    """Torchrun does not end by itself: the others have five seconds, and their logs are kept."""

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        (job.logs / "rank-0.log").write_text("of rank 0\n")
        (job.logs / "rank-1.log").write_text("of rank 1\n")
        job.ends(1, code)
        while True:
            yield

    (record,) = launched([A], script)
    assert format_reason(record) == f"{told}. Read logs/tp2-0 in the run's folder, then try again with --resume"
    assert (record.detail["exit_code"], record.detail["log_tail"]) == (str(code), "rank-1.log:\nof rank 1")
    assert launched.clock.now == pytest.approx(1000 + launcher.GRACE_S, abs=2 * launcher.POLL_S)
    assert launched.jobs[0].killed


def test_where_torchrun_was_killed_it_is_named_and_none_of_its_ranks(launched: Launched) -> None:
    """What rank 0 said of a connection is no cause."""

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        yield
        job.raises(0, "RuntimeError", "Connection closed by peer", A)
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
    ("code", "told"),
    [
        (-9, "rank 1 was killed by signal 9 (out of memory is the usual cause: lower --concurrency or --context)"),
        (143, "rank 1 was ended by signal 15 (SIGTERM), sent by another process"),
    ],
)
@pytest.mark.parametrize("said", [False, True])
def test_a_rank_that_was_ended_with_what_kept_account_of_it_is_named_and_its_point_tried_again(
    launched: Launched, code: int, told: str, *, said: bool
) -> None:
    """It left no file, while rank 0 built and was ended for it; torchrun's log says who was first, whatever rank 0 said."""

    def script(job: Scripted) -> Acts:
        job.tells("build", A)
        yield
        job.agent_log.write_text(ROOT_CAUSE.format(code))
        if said:
            job.raises(0, "RuntimeError", "Connection closed by peer", A)
        job.ends(0, -15, asked=True)
        return 1

    first, second = launched([A], script, measuring(A), retries=1)
    assert format_reason(first).startswith(f"{told}. Read logs/tp2-0")
    assert (first.outcome, second.outcome) == ("failed", "ok")


def test_a_rank_that_said_what_was_wrong_is_not_said_to_have_ended_without_a_word(launched: Launched) -> None:
    """Both heard that a connection was closed: torchrun saw rank 1 end first, and its error is known."""

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        yield
        job.agent_log.write_text(ROOT_CAUSE.format(1))
        for rank in (0, 1):
            job.raises(rank, "RuntimeError", "Connection closed by peer", A)
            job.ends(rank, 1)
        return 1

    (record,) = launched([A], script)
    assert str(record.reason).startswith("rank 0: RuntimeError: Connection closed by peer")


def test_a_torchrun_that_was_stopped_is_let_go_on(launched: Launched) -> None:
    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        job.asleep = True
        yield
        job.measures(A)
        yield
        return 0

    assert [r.outcome for r in launched([A], script)] == ["ok"]
    (told,) = [e.note for e in launched.seen if e.stage == "stopped"]
    assert told == "torchrun had been stopped (SIGSTOP); dcpbench lets it continue"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "disk quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "I/O error"),
    ],
)
def test_a_disk_that_cannot_be_written_ends_the_run_and_no_point_is_blamed(
    launched: Launched, number: int, what: str, elsewhere: bool
) -> None:
    """The disk may be that of another folder, such as a cache: every point would meet the error, and the file is named."""
    where = "/cache/x" if elsewhere else f"{launched.folder}/records.jsonl"

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        job.raises(0, "OSError", "as the system says it", A, disk=number, path=where)
        yield
        return 1

    with pytest.raises(DiskError, match=what) as raised:
        launched([A], script)
    assert str(raised.value).startswith(f"{where if elsewhere else launched.folder}: ")
    assert f"-o {launched.folder} --resume" in str(raised.value)
    assert raised.value.exit_code == 3
    assert not (launched.folder / "records.jsonl").exists()


def test_a_record_that_may_not_have_reached_the_disk_is_no_success(launched: Launched) -> None:
    """fsync says EIO after the line was written: the point has a record, and all points are done."""

    def script(job: Scripted) -> Acts:
        job.measures(A)
        job.raises(0, "DiskError", "its disk reported an I/O error", A, disk=errno.EIO)
        yield
        return 1

    with pytest.raises(DiskError, match="the last record may be lost"):
        launched([A], script)


def test_a_disk_so_full_that_no_rank_could_leave_its_error_is_not_the_points_fault(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank ended with code 1 and left nothing; the launcher finds that it cannot write either."""

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        yield
        monkeypatch.setattr(disks.tempfile, "TemporaryFile", _full)
        return 1

    with pytest.raises(DiskError, match="no space is left on its disk"):
        launched([A], script)


def test_a_file_system_that_does_not_answer_is_not_called_a_hang_of_the_point(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken down, as that would wait for the same file system."""
    monkeypatch.setattr(disks, "ANSWER_S", 0.2)
    monkeypatch.setattr(disks, "PROBE", "import time; time.sleep(60)")

    def script(job: Scripted) -> Acts:
        job.tells("measure", A)
        while True:
            yield

    with pytest.raises(DiskError, match="its file system does not answer"):
        launched([A], script, timeout=5.0)
    (told,) = [e.note for e in launched.seen if e.stage == "stopped"]
    assert "does not answer" in told
    assert not (launched.folder / "hangs").exists()


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_point_that_verify_cannot_check_is_in_no_sweeps_records(launched: Launched) -> None:
    """There is nothing to resume."""
    with pytest.raises(RecordsError, match="holds no record"):
        launched([A], raising(A, stage="check"), kind="verify")
    (line,) = (launched.folder / FAILED_FILE).read_bytes().splitlines()
    record = msgspec.json.decode(line, type=Record)
    assert format_reason(record) == "rank 1: ValueError: no such row. Read logs/tp2-0 in the run's folder"


def test_a_check_has_the_timeout_and_a_sweeps_measuring_and_profiling_do() -> None:
    def limits(kind: str, timeout: float) -> list[float]:
        work = launcher.Work(folder=Path(), settings=Settings(), device="cpu", kind=kind, timeout=timeout)
        return [work.get_limit_s(stage) for stage in ("build", "check", "measure", "profile", "end")]

    assert limits("sweep", 60) == [300, 300, 60, 60, 60]
    assert limits("verify", 60) == [300, 60, 300, 300, 60]
    assert limits("sweep", 900) == [900, 900, 900, 900, 60]


@pytest.mark.parametrize("served", [True, False], ids=["requests", "decode"])
def test_an_interrupt_lets_requests_that_have_finished_be_written(launched: Launched, served: bool) -> None:
    """25 seconds for a run of requests, none for another; then all of the job is ended."""
    load = serve_record_builder.load() if served else None
    point = msgspec.structs.replace(A, load=load, workload="serve" if served else "decode")

    def script(job: Scripted) -> Acts:
        job.tells("measure", point)
        yield
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched([point], script)
    assert launched.jobs[0].killed == ([KEEP_WAIT_S, 5.0] if served else [5.0])
    notes = [e.note for e in launched.seen if e.stage == "ending"]
    assert notes == ["writing the requests that have finished; Ctrl-C again ends at once"] * served


class Node0:
    """The line to node 0, as a script of what it sends: None where nothing came meanwhile."""

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


def serve(launched: Launched, monkeypatch: pytest.MonkeyPatch, line: Node0, *scripts: Script) -> None:
    """Node 1 of two, whose jobs are these scripts."""
    launched._scripts += scripts
    monkeypatch.setattr(launcher, "join_leader", lambda *_: line)
    monkeypatch.setattr(Scripted, "wait", lambda job, _: job.poll(), raising=False)
    work = launcher.Work(folder=launched.folder, settings=Settings(), device="cpu")
    launcher.run_points(
        [A], work, Machines(nnodes=2, node_rank=1, rdzv_endpoint="10.0.0.1:29500"), launched.seen.append
    )


def told(folder: Path) -> bytes:
    """A job as node 0 sends it, whose folder is its own."""
    job = Job(kind="sweep", tag="tp2-0", folder="/of/node/0", device="cpu", points=[A, B], settings=Settings())
    assert folder != Path("/of/node/0")
    return msgspec.json.encode(job)


def test_another_node_runs_the_jobs_of_node_0_in_its_own_folder_until_it_is_stopped(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(_: Scripted) -> Acts:
        while True:
            yield
            if len(line.messages) <= 2:
                return 0

    line = Node0(None, told(launched.folder), None, None, STOP, None)
    serve(launched, monkeypatch, line, script)
    (job,) = launched.jobs
    assert (job.folder, job.job.points, job.killed) == (launched.folder, [A, B], [5.0, 5.0])
    (ended,) = (msgspec.json.decode(data, type=Ended) for data in line.sent)
    assert ended == Ended(node=1, code=0)


def test_another_node_tells_that_its_ranks_failed_once_and_how_they_ended(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(job: Scripted) -> Acts:
        job.raises(1, "ValueError", "no such row", A)
        job.ends(1, 7)
        while True:
            yield

    line = Node0(told(launched.folder), None, None, None, STOP, None)
    serve(launched, monkeypatch, line, script)
    assert line.sent[0] == FAILED
    ended = msgspec.json.decode(line.sent[1], type=Ended)
    assert (len(line.sent), ended.node, ended.code) == (2, 1, 1)
    assert [f.message for f in ended.failures] == ["no such row"]
    assert [e.code for e in ended.exits] == [7]
    assert "moe" in ended.stacks["0"], "it had to be ended"


def test_what_is_no_job_is_a_sentence_on_another_node(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"node 0 sent an invalid job .*; install the same dcpbench on all"):
        serve(launched, monkeypatch, Node0(b"{}", None))


def test_others_have_five_seconds_once_one_has_failed_and_silence_counts_from_what_was_heard_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others still run at five seconds; the rank that has failed does not count as silent."""
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)
    dog = launcher.Watchdog()
    clock.now += 60
    assert (dog.is_silent(60), dog.is_silent(59.9)) == (False, True)
    dog.record_activity()
    assert not dog.is_silent(1)
    assert not dog.is_past_grace(lambda: False)
    assert not dog.is_past_grace(lambda: True)
    clock.now += launcher.GRACE_S
    assert not dog.is_past_grace(lambda: False)
    assert not dog.is_silent(1)
    clock.now += 0.1
    assert dog.is_past_grace(lambda: False)


def test_after_a_point_was_begun_two_jobs_that_begin_none_are_too_many_again(launched: Launched) -> None:
    """One that fails at a point, then twice nothing: three jobs, not four."""
    with pytest.raises(WorkerError, match="before its first point, twice"):
        launched([A, B], dying, raising(A), dying, dying, measuring(B))
    assert len(launched.jobs) == 4
