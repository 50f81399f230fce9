"""Read the files of a run incrementally: jobs, their events, and the shown parts of records.

Unreadable lines are left out and counted. Texts are untrusted and may have any length: they are shortened and made
printable here, once for all later uses.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.errors import DcpbenchError
from dcpbench.launch.jobs import Failure, Job, Progress, decode_check, decode_progress, read_files, read_job
from dcpbench.launch.launcher import find_cause
from dcpbench.plan.grid import format_point_name
from dcpbench.records.file import decode_record
from dcpbench.records.folder import CHECKS_FILE, FAILED_FILE, JOB_FILES, RECORDS_FILE, get_job_tag, get_progress_file
from dcpbench.records.lines import Tail
from dcpbench.records.metrics import TOP
from dcpbench.records.record import format_reason
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

MAX_FINISHED_POINTS = 50  # finished points that are kept in full
VERIFY = "verify"


class FinishedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point that has a record."""

    point: str
    outcome: str
    reason: str = ""
    tok_s: float | None = None
    tok_s_per_gpu: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None  # medians, as ttft_ms is
    seconds: float | None = None  # wall time of the point, set-up included


class PointEnd(NamedTuple):
    """Outcome and end time of a point."""

    outcome: str
    at: float | None  # Unix time; None if the record has none
    ran: bool = True  # False for a point that was not tried, as it would have failed like another one


@dataclasses.dataclass
class JobFacts:
    """A torchrun job and its events."""

    job: Job
    began: float  # Unix time at which its file was written
    events: Tail
    heard: float = 0.0  # time of the last event; 0 before the first
    stage: str = ""
    since: float = 0.0  # time at which this stage of this point began
    key: str = ""  # key of the current point
    note: str = ""  # latest numbers
    done: dict[int, float] = dataclasses.field(default_factory=dict)  # time at which each point finished, by point_id

    @functools.cached_property
    def points(self) -> dict[int, Point]:
        """Return every point of the run that can run, if the job lists them, else the job's own; by point_id."""
        return {compute_point_id(p): p for p in self.job.pool_points or self.job.points}

    def add_event(self, event: Progress) -> None:
        """Take one event."""
        stage = fit_line(event.stage)
        if event.key != self.key:
            self.note = ""
        if (stage, event.key) != (self.stage, self.key):
            self.since = event.at
        self.stage, self.key, self.heard = stage, event.key, event.at
        self.note = fit_line(event.note) or self.note
        if stage == "done":
            self.done[hash(event.key)] = event.at


class Facts:
    """All files of a run's folder; `read_updates` reads new data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reset_facts()

    def _reset_facts(self) -> None:
        self.jobs: dict[str, JobFacts] = {}  # jobs by file name
        self.ended: dict[int, PointEnd] = {}  # the last record of each point, by point_id
        self.last: collections.deque[FinishedPoint] = collections.deque(maxlen=MAX_FINISHED_POINTS)
        self._unread_jobs: set[str] = set()
        self.wrong = 0  # checks of `verify` that are wrong
        self._records = [Tail(self.folder / name) for name in (RECORDS_FILE, FAILED_FILE)]
        self._checks = Tail(self.folder / CHECKS_FILE)

    def read_updates(self) -> None:
        """Read new data. After --force, discard the data read before."""
        if any(tail.reset_if_replaced() for tail in self._list_tails()):
            self._reset_facts()
        self._find_jobs()
        for found in self.jobs.values():
            for event in found.events.decode_lines(decode_progress):
                found.add_event(event)
        for tail in self._records:
            for record in tail.decode_lines(decode_record):
                self._add_record(record)
        self.wrong += sum(not check.ok for check in self._checks.decode_lines(decode_check))

    @property
    def unread(self) -> dict[str, int]:
        """Return the number of unreadable lines, or files, by file name."""
        return dict.fromkeys(sorted(self._unread_jobs), 1) | {
            t.path.name: t.unread for t in self._list_tails() if t.unread
        }

    @property
    def newest_job(self) -> JobFacts | None:
        """Return the job that started last."""
        return max(self.jobs.values(), key=lambda j: j.began, default=None)

    def find_failure(self) -> str:
        """Return the cause of death of a rank of the newest job, or an empty string."""
        cause = find_cause(read_files(sorted(self.folder.glob("error-*.json")), Failure))
        return fit_line(f"rank {cause.rank}: {cause.kind}: {cause.message}") if cause else ""

    def has_running_ranks(self) -> bool:
        """Return True if files with process ids of ranks exist; they are removed when a job ends normally."""
        return any(self.folder.glob("rank-*.pid"))

    def _list_tails(self) -> list[Tail]:
        return [*(j.events for j in self.jobs.values()), *self._records, self._checks]

    def _find_jobs(self) -> None:
        for path in self.folder.glob(JOB_FILES):
            known = self.jobs.get(path.name)
            if known is not None and not known.job.open:
                continue
            try:
                job, began = read_job(path), path.stat().st_mtime
            except (DcpbenchError, OSError):  # it may be half written; the next look tries again
                self._unread_jobs.add(path.name)
                continue
            self._unread_jobs.discard(path.name)
            if known is None:
                known = JobFacts(job, began, Tail(get_progress_file(self.folder, get_job_tag(path))))
            self.jobs[path.name] = dataclasses.replace(known, job=job)

    def _add_record(self, record: Record) -> None:
        at = None
        with contextlib.suppress(ValueError, OverflowError):
            at = dt.datetime.fromisoformat(record.started_at).timestamp() + record.seconds
        at = at if at is not None and math.isfinite(at) else None
        self.ended[compute_point_id(record.point)] = PointEnd(fit_line(record.outcome), at, ran=record.seconds > 0)
        if record.outcome != "rejected":
            self.last.append(
                FinishedPoint(
                    point=fit_line(format_point_name(record.point)),
                    outcome=fit_line(record.outcome),
                    reason=fit_line(format_reason(record)),
                    seconds=record.seconds or None,
                    **{name: metric.get_value(record) for name, metric in TOP.items()},
                )
            )


def compute_point_id(point: Point) -> int:
    """Return a short substitute for Point.get_key()."""
    return hash(point.get_key())
