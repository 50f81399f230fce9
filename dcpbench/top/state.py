"""Derive the State of a run from the facts of its files and its living processes. Pure; the clock is an argument."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import ExitCode
from dcpbench.launch.jobs import WAITING
from dcpbench.launch.processes import COMMAND, NONE, WORKERS
from dcpbench.plan.grid import format_point_name
from dcpbench.show.text import fit_line
from dcpbench.top.facts import VERIFY, FinishedPoint, PointEnd
from dcpbench.top.gpu_monitor import GpuState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.point import Point
    from dcpbench.top.facts import Facts, JobFacts

STARTING, RUNNING, SILENT, FINISHING = "starting", "running", "silent", "finishing"
ORPHANED, ELSEWHERE = "orphaned", "elsewhere"
ENDED, STOPPED = "ended", "stopped"
OVER = (ENDED, STOPPED)  # final statuses: all points have ended, or the run stopped before
REJECTED = "rejected"
BETWEEN = ("done", "start", WAITING, "end")  # stages of no point
QUIET_S = 60.0  # seconds without an event after which a run is shown as silent; dcpbench ends such a job at --timeout
SLACK_S = 2.0  # maximum error of a record's times, which are written in whole seconds
MIN_POINTS = 3  # minimum number of finished points for a range
T_95 = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # Student's t at 97.5 %, from MIN_POINTS - 1 degrees
T_95_MORE = 2.2  # value for more degrees of freedom: 2.20 at 11, 1.96 at infinity


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Time that is left."""

    seconds: float
    low: float | None = None  # 95 % prediction interval; null with fewer than MIN_POINTS points
    high: float | None = None
    points: int  # number of points on which the estimate is based


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Current activity of the run."""

    point: str = ""  # current point; empty between points
    stage: str  # see jobs.Progress.stage
    stage_s: float
    note: str = ""
    silent_s: float  # time since the last sign of life
    timeout_s: float  # seconds without an event after which dcpbench treats the job as hung


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The points of one world size, which one torchrun job after the other runs."""

    tp: int
    total: int
    finished: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that top shows. Texts are inert, and short."""

    folder: str
    kind: str  # `sweep`, `serve` or `verify`; empty without a job, as in a replay from --step-times, which needs none
    device: str  # `cuda`, `cpu`, or empty without jobs
    status: str
    exit_code: int | None = None  # exit code of the run's command, as far as its files show; null while it runs
    problem: str = ""  # cause of death of a rank
    total: int | None = None  # number of points that can run; null if no file has it
    ok: int = 0
    failed: int = 0  # hung ones included
    rejected: int = 0
    left: int | None = None
    elapsed_s: float | None = None  # elapsed time of this command, without earlier commands that it resumes
    points_per_minute: float | None = None  # rate of this command, failed points included
    eta: Estimate | None = None
    now: Activity | None = None
    sizes: list[Size] = []
    last: list[FinishedPoint] = []  # newest last
    unread: dict[str, int] = {}  # lines that could not be read, by file
    gpus: list[GpuState] = []
    at: float  # Unix time of this state


def compute_state(
    facts: Facts, now: float, *, alive: str = NONE, began: float | None = None, known_here: bool = False
) -> State:
    """Return the state at `now` (Unix time).

    `alive` and `began` are the results of processes.find_alive; `known_here` is True if this run was alive on this machine
    before, so that it cannot be a run of another machine on a shared file system.
    """
    job = facts.newest_job
    jobs = _find_command_jobs(facts, began)
    began = began if began is not None else min((j.began for j in jobs), default=None)
    points = _collect_points(facts)
    ended = _find_ended_points(facts, points, began)
    ends = _compute_end_times(ended, jobs, began)
    heard = max((*ends[-1:], *(max(j.began, j.heard) for j in jobs)), default=began or now)
    left = len(points) - len(ended) if job else None
    failed = sum(end.outcome != "ok" for end in ended.values())
    status = _compute_status(facts, left, max(now - heard, 0.0), alive, known_here=known_here)
    over = status in OVER
    at_work = not over and status != FINISHING
    until = now if at_work else heard
    problem = facts.find_failure() if status == STOPPED else ""
    durations = [max(b - a, 0.0) for a, b in itertools.pairwise([began, *ends])] if began is not None else []
    spent = until - (ends[-1] if ends else began or until)
    return State(
        folder=fit_line(str(facts.folder)),
        kind=_get_kind(facts),
        device=job.job.device if job else "",
        status=status,
        exit_code=_compute_exit_code(facts, status, failed, problem) if over else None,
        problem=problem,
        total=len(points) if job else None,
        ok=len(ended) - failed,
        failed=failed,
        rejected=sum(e.outcome == REJECTED and key not in points for key, e in facts.ended.items()),
        left=left,
        elapsed_s=None if began is None else max(until - began, 0.0),
        points_per_minute=60 * len(durations) / sum(durations) if sum(durations) > 0 else None,
        eta=estimate_time_left(durations, left or 0, spent) if at_work else None,
        now=_make_activity(job, points, now) if job and at_work else None,
        sizes=[
            Size(tp=tp, total=total, finished=sum(points[key].tp == tp for key in ended if key in points))
            for tp, total in Counter(point.tp for point in points.values()).items()
        ],
        last=list(facts.last),
        unread=dict(facts.unread),
        at=now,
    )


def estimate_time_left(durations: Sequence[float], left: int, spent: float = 0.0) -> Estimate | None:
    """Estimate the seconds until `left` more points have finished; the current one has been running for `spent` seconds.

    Points are treated as draws of one distribution, so with m and s, mean and standard deviation of n `durations` (s
    each, from one point's end to the next one's): left · m, ± t(n - 1) · s · sqrt(left + left² / n), the prediction
    interval of a sum of new draws. The time spent on the current point is subtracted, at most m. The estimate is too
    short if larger points come last. None if no point has finished, or none is left.
    """
    n = len(durations)
    if not n or left <= 0:
        return None
    mean = statistics.fmean(durations)
    had = min(max(spent, 0.0), mean)
    seconds = max(left * mean - had, 0.0)
    if n < MIN_POINTS:
        return Estimate(seconds=seconds, points=n)
    t = T_95[n - MIN_POINTS] if n - MIN_POINTS < len(T_95) else T_95_MORE
    half = t * statistics.stdev(durations) * math.sqrt(left + left**2 / n)
    return Estimate(seconds=seconds, low=max(seconds - half, 0.0), high=seconds + half, points=n)


def _get_kind(facts: Facts) -> str:
    job = facts.newest_job
    if job is None:
        return ""
    return "serve" if job.job.points and job.job.points[0].load else fit_line(job.job.kind)


def _find_command_jobs(facts: Facts, began: float | None) -> list[JobFacts]:
    """Return the jobs of the running command, or of the last one; a command that it resumes has another command line."""
    jobs = sorted(facts.jobs.values(), key=lambda j: j.began)
    if began is not None:
        return [j for j in jobs if j.began >= began - SLACK_S]
    return [j for j in jobs if j.job.command == jobs[-1].job.command]


def _collect_points(facts: Facts) -> dict[int, Point]:
    """Return every point that can run; without a list of them, those of the jobs so far."""
    newest = facts.newest_job
    if newest is None:
        return {}
    if newest.job.pool_points:
        return newest.points
    return {key: p for j in facts.jobs.values() for key, p in j.points.items()}


def _find_ended_points(facts: Facts, points: dict[int, Point], began: float | None) -> dict[int, PointEnd]:
    """Return the outcomes of points. Points that failed under an earlier command are pending under this one."""
    ended = dict(facts.ended)
    if facts.newest_job and facts.newest_job.job.kind == VERIFY:  # leaves checks, and records of failures alone
        ended = {key: PointEnd("ok", at) for j in facts.jobs.values() for key, at in j.done.items()} | ended
    return {
        key: end
        for key, end in ended.items()
        if end.outcome != REJECTED and (key in points or not points)
        if end.outcome == "ok" or began is None or end.at is None or end.at >= began - SLACK_S
    }


def _compute_end_times(ended: dict[int, PointEnd], jobs: list[JobFacts], began: float | None) -> list[float]:
    """Return the end times of points under this command. Events have a resolution of microseconds, records of seconds."""
    reported = {key: at for j in jobs for key, at in j.done.items()}
    recorded = {key: e.at for key, e in ended.items() if e.ran and e.at is not None and (e.outcome != "ok" or not jobs)}
    since = float("-inf") if began is None else began
    return sorted(at for at in (recorded | reported).values() if at >= since)


def _compute_status(facts: Facts, left: int | None, silent_s: float, alive: str, *, known_here: bool) -> str:
    job = facts.newest_job
    if alive == COMMAND:
        if left == 0:
            return FINISHING
        if silent_s > QUIET_S:
            return SILENT
        return RUNNING if facts.ended or (job and job.heard) else STARTING
    if alive == WORKERS:
        return ORPHANED
    if left == 0 or (job is None and facts.ended):
        return ENDED
    # a job between its first and last event without process ids of ranks was ended by its command
    goes_on = job is not None and (not job.heard or job.stage == "end" or facts.has_running_ranks())
    return ELSEWHERE if goes_on and silent_s < QUIET_S and not known_here else STOPPED


def _compute_exit_code(facts: Facts, status: str, failed: int, problem: str) -> int:
    """Return the exit code as far as files show it: an interrupted run and a killed one look the same."""
    if facts.wrong:
        return ExitCode.WRONG
    if status == STOPPED and not problem:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if failed or problem else 0


def _make_activity(job: JobFacts, points: dict[int, Point], now: float) -> Activity:
    point = None if job.stage in BETWEEN else points.get(hash(job.key))
    heard = job.heard or job.began
    return Activity(
        point=fit_line(format_point_name(point)) if point else "",
        stage=job.stage or "start",
        stage_s=max(now - (job.since or job.began), 0.0),
        note=job.note if point else "",
        silent_s=max(now - heard, 0.0),
        timeout_s=job.job.get_limit_s(job.stage),
    )
