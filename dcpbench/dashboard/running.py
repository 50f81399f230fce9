"""Read the progress of current runs below a folder from their progress files; locks are never touched."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.dashboard.lines import fit_label
from dcpbench.errors import DcpbenchError
from dcpbench.launch import processes
from dcpbench.launch.jobs import Progress, decode_progress, read_job
from dcpbench.plan.grid import format_point_name
from dcpbench.records.folder import JOB_FILES, LOCK_FILE, get_progress_file
from dcpbench.records.lines import Tail

if TYPE_CHECKING:
    from collections.abc import Iterator

FINISHED = ("done", "failed", "hung")
FAILED = ("failed", "hung")
ENDED = "end"
MAX_NOTE_CHARS = 200
MAX_BYTES = 16 << 20
"""Maximum size of a progress file: a line is 300 bytes, and a job has some for each point."""


@dataclasses.dataclass(frozen=True)
class RunningJob:
    """Hold one torchrun job in progress."""

    run: str
    done: int
    """Number of points that were recorded or have failed."""
    failed: int
    of: int
    left_s: float | None
    """Estimated remaining seconds, by the mean time of a point so far; null before the first is done."""
    stage: str
    point: str
    note: str


def find_running_jobs(root: Path, now: float | None = None) -> list[RunningJob]:
    """Return the newest job of every run below `root` with a live command, in order of folders."""
    found = []
    for folder in _find_locked_folders(root):
        jobs = sorted(folder.glob(JOB_FILES), key=_get_mtime, reverse=True)
        if jobs and (one := _read_running_job(root, folder, jobs[0], time.time() if now is None else now)):
            found.append(one)
    return found


def _find_locked_folders(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if LOCK_FILE in files and processes.find_alive(Path(folder))[0] != processes.NONE:
            yield Path(folder)


def _read_running_job(root: Path, folder: Path, path: Path, now: float) -> RunningJob | None:
    try:
        job = read_job(path)
        events = _read_events(get_progress_file(folder, job.tag))
    except (DcpbenchError, OSError):
        return None
    if not events or events[-1].stage == ENDED:
        return None
    ended = {event.key: event.stage for event in events if event.stage in FINISHED and event.key}
    last = events[-1]
    spent = now - events[0].at
    left = spent / len(ended) * (len(job.points) - len(ended)) if ended and spent > 0 else None
    return RunningJob(
        run=fit_label(str(folder.relative_to(root)) if folder != root else folder.name),
        done=len(ended),
        failed=sum(stage in FAILED for stage in ended.values()),
        of=len(job.points),
        left_s=left,
        stage=fit_label(last.stage),
        point=fit_label(next((format_point_name(point) for point in job.points if point.get_key() == last.key), "")),
        note=fit_label(last.note, MAX_NOTE_CHARS),
    )


def _read_events(path: Path) -> list[Progress]:
    """Return all complete lines of a progress file; lines that are no events are left out."""
    return [] if path.stat().st_size > MAX_BYTES else list(Tail(path).decode_lines(decode_progress))


def _get_mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
