"""Run one torchrun job per world size, with a watchdog. A point that dies or hangs never ends the sweep. No torch.

torchrun.py runs a job on this machine, nodes.py on several.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench import errors
from dcpbench.errors import DiskError, WorkerError
from dcpbench.launch import folders, hang_capture, jobs, retry, subprocess_guard, version_check
from dcpbench.launch.jobs import END_TIMEOUT_S, ENDED, MIN_STAGE_LIMIT_S, Exit, Failure, Job, Progress, format_exit_code
from dcpbench.launch.nodes import FAILED, STOP, Ended, Leader, NodeConnection, join_leader, split_endpoint
from dcpbench.launch.ranks import LOG_LINES
from dcpbench.launch.torchrun import KEEP_WAIT_S, RendezvousOptions, Running
from dcpbench.points import budget
from dcpbench.points.device_probe import Probe
from dcpbench.records import disks
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import FAILED_FILE, RECORDS_FILE, get_job_file
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import Record, format_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcpbench.points.point import Point

WORKER = "dcpbench.worker"
PROBE = "dcpbench.measuring.hardware"  # program that describes the machine without torch, if it can
COLLECTIVE = re.compile(  # errors that a rank raises because another one is gone; the other's error is the cause
    r"nccl|gloo|process ?group|connection (reset|closed|refused)|broken pipe|timed? ?out|DistBackend", re.IGNORECASE
)
CRASHES = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
STOPPED, AGAIN = "stopped", "again"
POLL_S = 0.1
GRACE_S = 5.0  # time that the remaining ranks have to end by themselves after one has failed


class JobOptions(jobs.Command, frozen=True, kw_only=True):
    """Hold the settings and the supervision of the jobs of a command."""

    folder: Path
    point_limit: float | None = None  # seconds until an unfinished point counts as hung, despite signs of life
    retries: int = 0  # number of retries of a point that hung or failed
    worker: str = WORKER
    hardware: str = ""  # hardware of the machine, as named by probes
    lock: int | None = None  # descriptor of the folder's lock (folders.lock_folder)
    choose_points: Callable[[Point], Sequence[Point]] | None = (
        None  # points to add to the job of this point; none: it ends
    )

    def check_folder(self) -> None:
        """Raise OutputError if the folder no longer exists."""
        if self.lock is not None:
            folders.check_not_removed(self.folder, self.lock)

    @property
    def records_file(self) -> str:
        """Return the file of the records that the launcher writes; measured points are only in a sweep's."""
        return FAILED_FILE if self.kind == "verify" else RECORDS_FILE


def run_probe(worker: str = WORKER) -> Probe:
    """Return the hardware of the machine, from a subprocess, so that this process never loads torch or CUDA's driver.

    A worker other than dcpbench's own describes its machine itself.
    """
    return _run_probe(PROBE) if worker == WORKER else run_torch_probe(worker)


def run_torch_probe(worker: str = WORKER) -> Probe:
    """Return the hardware of the machine as a worker finds it with torch, which takes seconds."""
    return _run_probe(worker, "--probe")


def _run_probe(*program: str) -> Probe:
    version_check.get_started_package()  # files edited later count as another program
    command = subprocess_guard.make_tied_command([sys.executable, "-m", *program])
    env = os.environ | version_check.get_environment()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = done.stdout.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=Probe)
    except (IndexError, msgspec.DecodeError) as e:
        last = "\n".join(done.stderr.strip().splitlines()[-LOG_LINES:])
        raise WorkerError(
            f"`{' '.join([sys.executable, '-m', *program])}` could not describe this machine (exit code {done.returncode}). "
            f"It wrote:\n{last}"
        ) from e


def run_points(
    points: Sequence[Point], options: JobOptions, rendezvous: RendezvousOptions, watch: Callable[[Progress], None]
) -> None:
    """Run all points, one job per world size; every point leaves a record (kind `verify`: checks, or a failed one).

    `watch` gets each Progress event, and `failed` or `hung` with the reason. Raise WorkerError when a job dies twice
    before it reaches a point. On nodes other than 0 it serves node 0's jobs until the sweep is over.
    """
    if rendezvous.node_rank:
        _follow_leader(options, rendezvous)
        return
    left = list(points)
    with Leader(rendezvous.rdzv_endpoint, rendezvous.nnodes, max(options.timeout, MIN_STAGE_LIMIT_S)) as leader:
        while left:
            world = left[0].world
            unusable = _run_size([p for p in left if p.world == world], options, rendezvous, leader, watch)
            left = [p for p in left if p.world != world]
            for record in unusable:
                left = _record_same_cause(left, record, options, watch)


def find_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that explains the others: the first that is not merely a broken collective."""
    causes = [f for f in failures if not _is_collective(f)]
    return next(iter(causes or failures), None)


def find_first_exit(failures: Sequence[Failure], exits: Sequence[Exit], *, finished: bool) -> Exit | None:
    """Return the first rank that ended unasked and without an error message, before any rank with an error that
    explains the others.

    `finished`: all points are done, so that ranks may end with exit code 0.
    """
    reported_ranks = {f.rank for f in failures}
    causes = {f.rank for f in failures if not _is_collective(f)}
    first_error_at = min((e.at for e in exits if e.rank in causes), default=math.inf)
    unreported = [
        e for e in exits if not e.terminated and e.rank not in reported_ranks and not (finished and e.code == 0)
    ]
    first = min(unreported, key=lambda e: e.at, default=None)
    return first if first is not None and (first.at < first_error_at or not causes) else None


def format_exit(end: Exit) -> str:
    """Return a phrase for a rank that ended without an error message."""
    if end.code == -signal.SIGKILL:
        return (
            f"rank {end.rank} was killed by signal 9 (out of memory is the usual cause: lower --concurrency or "
            "--context)"
        )
    if end.code < 0:
        crashed = -end.code in CRASHES
        why = "native code crashed: the end of its log may say where" if crashed else "sent by another process"
        return f"rank {end.rank} {format_exit_code(end.code)}, {why}"
    why = " and without an error message" if end.code else " before its points were done"
    return f"rank {end.rank} {format_exit_code(end.code)}{why}"


def _is_collective(failure: Failure) -> bool:
    return bool(COLLECTIVE.search(f"{failure.kind} {failure.message}"))


def _run_size(
    points: list[Point],
    options: JobOptions,
    rendezvous: RendezvousOptions,
    leader: Leader,
    watch: Callable[[Progress], None],
) -> list[Record]:
    """Run all points of one world size. Return the failures whose cause does not depend on the world size; points of other
    sizes would fail likewise.
    """
    failed_starts = 0
    unusable = []
    failed = retry.count_failures(options.folder) if options.kind == "sweep" else collections.Counter[str]()
    while points:
        options.check_folder()
        records = RecordFile(options.folder, options.records_file)
        begin = records.get_end_offset()
        job = _make_job(points, options, rendezvous)
        leader.start(job)
        with Running(job, rendezvous, options.worker, options.lock) as running, _save_on_interrupt(running, watch):
            end = _follow_job(running, options, leader, watch)
        options.check_folder()
        _check_disk(end, options.folder)
        end.done |= {record.point.get_key() for record in records.read_since(begin)}
        points = [p for p in [*points, *end.added] if p.get_key() not in end.done]
        if not points:
            break
        if not end.failed:
            raise WorkerError(f"the job ended with {len(points)} of its points undone; read {running.agent_log}")
        if not end.started:
            failed_starts += 1
            if failed_starts == 2:  # noqa: PLR2004 -- once may be a port taken in between
                raise WorkerError(_format_failed_starts(running, end))
            continue
        failed_starts = 0
        cause = find_cause(end.failures)  # raised at a point that rank 0 may not have reached
        stuck = next((p for p in points if p.get_key() in (end.key, cause and cause.key)), None)
        if stuck is not None:  # no point is at fault between two points: the remaining ones are started again
            key = stuck.get_key()
            record = _make_record(stuck, running, end, options, failed[key])
            points.remove(stuck)
            failed[key] += 1
            if again := retry.can_pass(record) and failed[key] <= options.retries:
                points.append(stuck)  # after the others, so that it cannot prevent their measurement
            _record_failure(record, options, watch, again=again)
            if _is_model_error(record):
                unusable.append(record)
            points = _record_same_cause(points, record, options, watch)
    return unusable


def _check_disk(end: _JobEnd, folder: Path) -> None:
    """Raise DiskError if a disk ended the job, also if the ranks could not leave their errors on it."""
    for failure in end.failures:
        if failure.disk is not None:
            elsewhere = failure.path and not Path(failure.path).is_relative_to(folder)
            raise disks.make_disk_error(folder, failure.disk, failure.path if elsewhere else "")
    if end.failed:
        disks.check_free_space(folder)


def _record_failure(
    record: Record, options: JobOptions, watch: Callable[[Progress], None], *, again: bool = False
) -> None:
    """Record a point that failed, and say so; `again`: that it will be begun once more."""
    record = RecordFile(options.folder, options.records_file).append(record)
    stage = AGAIN if again else record.outcome
    watch(Progress(stage=stage, key=record.point.get_key(), note=format_reason(record), at=time.time()))


def _record_same_cause(
    points: list[Point], record: Record, options: JobOptions, watch: Callable[[Progress], None]
) -> list[Point]:
    """Record the points that would fail as `record` did without starting a job for each; returns the others."""
    same_cause = [p for p in points if _has_same_cause(p, record)]
    for point in same_cause:
        _record_failure(msgspec.structs.replace(record, point=point, seconds=0.0), options, watch)
    return [p for p in points if p not in same_cause]


def _has_same_cause(point: Point, record: Record) -> bool:
    """Return True if the cause lies in the model and its weights, or in an engine that could not be built."""
    failed = record.point
    if _is_model_error(record):
        return (point.model, point.weights) == (failed.model, failed.weights)
    ours, built = record.detail.get("error") in retry.OURS, record.detail.get("stage") == "build"
    return ours and built and budget.is_same_path(point, failed) and budget.is_same_engine(point, failed)


def _is_model_error(record: Record) -> bool:
    return record.detail.get("error") == errors.ModelError.__name__


@dataclasses.dataclass
class _JobEnd:
    """End of a job."""

    done: set[str] = dataclasses.field(default_factory=set)
    added: list[Point] = dataclasses.field(default_factory=list)  # points that a search chose while it ran
    key: str = ""  # current point when it ended
    stage: str = ""
    started: bool = False  # True if any point was started
    hung_s: float = 0.0  # duration of its silence in s when it was considered hung; 0 if it was not
    over_s: float = 0.0  # exceeded time limit of a point in s; 0 if it was not exceeded
    begun: float = math.inf  # start of the current point, by the monotonic clock
    code: int = 0  # exit code of torchrun, or 1 if its ranks were ended with it; negative: the signal that killed it
    failures: list[Failure] = dataclasses.field(default_factory=list)
    exits: list[Exit] = dataclasses.field(default_factory=list)
    stacks: dict[str, str] = dataclasses.field(default_factory=dict)
    evidence: Path | None = None  # folder with the captured evidence of a job that hung

    @property
    def failed(self) -> bool:
        return self.hung or self.code != 0 or self.first_exit is not None

    @property
    def hung(self) -> bool:
        """Return True if it was ended for its silence or for the duration of a point."""
        return self.hung_s > 0 or self.over_s > 0

    @property
    def first_exit(self) -> Exit | None:
        """Return the exit of the rank that ended first by itself; see find_first_exit."""
        return find_first_exit(self.failures, self.exits, finished=self.stage == ENDED)

    def has_been_ended(self, rank: int) -> bool:
        """Return True if a rank was ended by torchrun, or together with it."""
        return self.code < 0 or any(e.terminated for e in self.exits if e.rank == rank)

    def is_past_limit(self, limit_s: float | None) -> bool:
        """Return True if the current point has taken longer than `limit_s`."""
        return limit_s is not None and bool(self.key) and time.monotonic() - self.begun > limit_s

    def update(self, event: Progress) -> None:
        self.stage = event.stage
        self.started |= bool(event.key)
        if event.stage == "done":
            self.done.add(event.key)
            self.key = ""
        elif event.key and event.key != self.key:
            self.key, self.begun = event.key, time.monotonic()


class Watchdog:
    """Decide when to give up on ranks: some time after one of them has failed, or after a long silence."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self._failing: float | None = None

    def record_activity(self) -> None:
        """Record that the job has made progress."""
        self._heard = time.monotonic()

    def is_past_grace(self, failing: Callable[[], bool]) -> bool:
        """Return True if a rank has failed and the grace period for the others to end or report is over."""
        now = time.monotonic()
        if self._failing is None and failing():
            self._failing = now
        return self._failing is not None and now - self._failing > GRACE_S

    def is_silent(self, limit_s: float) -> bool:
        """Return True if there was no sign of life for longer than `limit_s` and no rank has failed."""
        return self._failing is None and time.monotonic() - self._heard > limit_s


def _follow_job(running: Running, options: JobOptions, leader: Leader, watch: Callable[[Progress], None]) -> _JobEnd:
    """Follow a job until it has ended on all nodes: by itself, by a failure, or by its silence."""
    end, watchdog = _JobEnd(), Watchdog()

    def has_failed_rank() -> bool:
        """Return True if a rank has failed, or ended while points are left."""
        failures = running.read_failures()
        failed = failures or find_first_exit(failures, running.read_exits(), finished=end.stage == ENDED)
        return bool(failed) or leader.has_failure()

    while True:
        code = running.poll()
        for event in _iter_events(running, options, end):
            watchdog.record_activity()
            watch(event)
        if code is not None:
            end.code = code
            break
        if running.is_stopped():
            watch(Progress(stage=STOPPED, note="torchrun had been stopped (SIGSTOP); dcpbench lets it continue"))
            running.resume()
        if watchdog.is_past_grace(has_failed_rank):
            end.code = 1
            break
        options.check_folder()
        silent = watchdog.is_silent(options.get_limit_s(end.stage))
        if silent or end.is_past_limit(options.point_limit):
            end.hung_s, end.over_s = (
                (options.get_limit_s(end.stage), 0.0) if silent else (0.0, options.point_limit or 0.0)
            )
            _check_answers(options.folder, watch)
            end.evidence, end.stacks = hang_capture.capture_hang(running)
            _report_lingering(end, watch)
            break
        time.sleep(POLL_S)
    end.exits = running.read_exits()  # before kill, which would add exits that the ranks did not cause
    if end.hung or end.code != 0:
        running.kill()
    end.failures = running.read_failures()
    for other in leader.stop():
        end.failures += other.failures
        end.exits += other.exits
        end.stacks |= other.stacks
    return end


def _iter_events(running: Running, options: JobOptions, end: _JobEnd) -> Iterator[Progress]:
    """Yield the events of a job since the last call; add the points that a search chooses next to a job that waits for them."""
    for event in running.read_events():
        end.update(event)
        if event.stage == jobs.WAITING:
            assert options.choose_points is not None
            points = options.choose_points(running.job.points[0])
            running.add_points(points)
            end.added += points
        yield event


def _check_answers(folder: Path, watch: Callable[[Progress], None]) -> None:
    """Raise DiskError if the folder's file system does not answer, which blocks its ranks and every diagnosis of them."""
    try:
        disks.check_answers(folder)
    except DiskError as e:
        watch(Progress(stage=STOPPED, note=str(e).rstrip(".")))  # at once, as the job may not end before it answers
        raise


def _report_lingering(end: _JobEnd, watch: Callable[[Progress], None]) -> None:
    """Report why a job that has measured all its points is ended."""
    if end.stage == ENDED:
        note = f"all is measured, but its ranks had not ended {END_TIMEOUT_S:.0f} s later; dcpbench ends them"
        watch(Progress(stage=STOPPED, note=f"{note}. Where they stood: {end.evidence}"))


@contextlib.contextmanager
def _save_on_interrupt(running: Running, watch: Callable[[Progress], None]) -> Iterator[None]:
    """On an interrupt, let a run of requests write its finished requests before its ranks end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if any(p.load for p in running.job.points) and running.poll() is None:
            watch(Progress(stage="ending", note="writing the requests that have finished; Ctrl-C again ends at once"))
            running.kill(KEEP_WAIT_S)
        raise


def _follow_leader(options: JobOptions, rendezvous: RendezvousOptions) -> None:
    """Take part in a sweep as another node: start the jobs that node 0 sends and end them on its request."""
    connection = join_leader(rendezvous.rdzv_endpoint, max(options.timeout, MIN_STAGE_LIMIT_S), rendezvous.node_rank)
    with contextlib.closing(connection):
        while not connection.closed:
            message = connection.receive(1.0)
            if message is None or message == STOP:
                continue
            try:
                job = msgspec.structs.replace(msgspec.json.decode(message, type=Job), folder=str(options.folder))
            except UNREADABLE as e:
                raise WorkerError(f"node 0 sent an invalid job ({e}); install the same dcpbench on all.") from e
            with Running(job, rendezvous, options.worker) as running:
                ended = _serve_job(running, connection, rendezvous)
            connection.send(msgspec.json.encode(ended))


def _serve_job(running: Running, connection: NodeConnection, rendezvous: RendezvousOptions) -> Ended:
    reported = False
    while not connection.closed and connection.receive(POLL_S) != STOP:
        if not reported and (running.poll() or running.read_failures() or any(e.code for e in running.read_exits())):
            connection.send(FAILED)
            reported = True
    code = None if connection.closed else running.wait(GRACE_S)
    stacks = running.collect_stacks() if code is None and not connection.closed else {}
    running.kill()
    return Ended(
        node=rendezvous.node_rank,
        code=1 if code is None else code,
        failures=running.read_failures(),
        exits=running.read_exits(),
        stacks=stacks,
    )


def _make_job(points: list[Point], options: JobOptions, rendezvous: RendezvousOptions) -> Job:
    tags = (f"tp{points[0].world}-{n}" for n in itertools.count())
    tag = next(t for t in tags if not get_job_file(options.folder, t).exists())
    store = split_endpoint(rendezvous.rdzv_endpoint) if rendezvous.nnodes > 1 else None
    same = {name: getattr(options, name) for name in jobs.Command.__struct_fields__}
    return Job(
        tag=tag,
        folder=str(options.folder),
        points=points,
        open=options.choose_points is not None,
        store=store,
        package=version_check.get_started_package(),
        **same,
    )


def _make_record(point: Point, running: Running, end: _JobEnd, options: JobOptions, before: int = 0) -> Record:
    """Return the record of a point that ended before it could write its own; it had failed `before` times."""
    first_exit, cause = end.first_exit, find_cause(end.failures)
    if first_exit is None and (cause is None or _is_collective(cause)):
        first_exit = _find_unheard(running, end)
    tail = running.log_tail([first_exit.rank] if first_exit else [])
    detail = {"device": options.hardware} if options.hardware else {}
    detail |= {"log": str(running.logs.relative_to(options.folder)), "stage": end.stage, "log_tail": tail}
    shared: str | msgspec.UnsetType = msgspec.UNSET
    advice: str | msgspec.UnsetType = msgspec.UNSET
    if end.hung:
        reason = f"no sign of life for {end.hung_s:g} s in stage '{end.stage}'"
        if end.over_s:
            reason = f"not done after {end.over_s:g} s (--timeout point), in stage '{end.stage}'"
        detail |= {f"stacks_rank_{rank}": text for rank, text in end.stacks.items()}
        if end.evidence is not None:
            found = hang_capture.explain_hang(end.evidence, end.stacks)
            shared, reason = reason, f"{reason}: {found.message}" if found else reason
            detail |= {
                "hang": found.kind if found else "unknown",
                "evidence": str(end.evidence.relative_to(options.folder)),
            }
    else:
        detail["exit_code"] = str(first_exit.code if first_exit else end.code)
        detail |= {f"error_rank_{f.rank}": f"{f.kind}: {f.message}" for f in end.failures}
        apart = hang_capture.find_difference(running) if cause is None or _is_collective(cause) else None
        if apart is not None:
            folder, found = apart
            reason = f"ranks began different collectives: {found.message}"
            detail |= {"hang": found.kind, "evidence": str(folder.relative_to(options.folder))}
        elif first_exit is not None:
            reason = format_exit(first_exit)
        elif cause is not None and not (_is_collective(cause) and end.has_been_ended(cause.rank)):
            reason = f"rank {cause.rank}: {cause.kind}: {cause.message}"
            detail |= {"error": cause.kind, "traceback": cause.traceback}
        else:
            reason = f"torchrun itself {format_exit_code(end.code)}, and its ranks with it"
    if detail.get("error") not in retry.OURS:
        how = retry.format_retry_options(before + 1, options.retries)
        again = f", then try again with {how}" if options.kind == "sweep" else ""
        log = f"{detail['log']} in the run's folder{again}"
        advice = f"Read {log}"
        if end.over_s:
            advice = (
                f"It may only be slow: allow more time with --timeout point={2 * end.over_s:g}. Otherwise read {log}"
            )
    warnings = ["cpu"] if options.device == "cpu" else []
    return Record(
        point=point,
        outcome="hung" if end.hung else "failed",
        reason=reason,
        cause=shared,
        advice=advice,
        detail=detail,
        warnings=warnings,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(running.started)),
        seconds=time.monotonic() - running.begun,
    )


def _find_unheard(running: Running, end: _JobEnd) -> Exit | None:
    """Return the rank that torchrun saw end first, if it left no error of its own."""
    first = running.find_first_seen()
    return first if first is not None and first.rank not in {f.rank for f in end.failures} else None


def _format_failed_starts(running: Running, end: _JobEnd) -> str:
    what = f"gave no sign of life for {end.hung_s:g} s" if end.hung_s else format_exit_code(end.code)
    cause = find_cause(end.failures)
    first_exit = end.first_exit or _find_unheard(running, end)
    why = f"rank {cause.rank}: {cause.kind}: {cause.message}\n" if cause else ""
    if first_exit:
        why = f"{format_exit(first_exit)}.\n"
    return (
        f"the job for --tp {running.job.points[0].tp} {what} before its first point, twice. {why}"
        f"Logs of every rank: {running.logs}. The last lines:\n{running.log_tail()}"
    )
