"""Run the fake worker with one fault on one rank at one moment: `FAULT=MOMENT:RANK:TARGET:KIND`.

TARGET is `rank`, `account` (the rank's supervising process of subprocess_guard.py), `agent` or `command`. KIND is the
number of a signal, `raise`, `out-of-memory` or `illegal-access` (errors named like torch's), `exit-N`, `full` (the disk is
full), or `moved` (the run's folder is renamed). table.py defines the moments. The moments build, measure, record and
recorded belong to the point with the context FAULTY_CONTEXT.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_worker

from dcpbench.launch import jobs
from dcpbench.launch.subprocess_guard import PARENT
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import RECORDS_FILE

if TYPE_CHECKING:
    from dcpbench.points.point import Point

FAULTY_CONTEXT = 302
FAULT = "DCPBENCH_FAULT"
DONE = "fault-done"


class OutOfMemoryError(RuntimeError):
    """Have the name of torch's error."""


class AcceleratorError(RuntimeError):
    """Have the name of torch's error."""


RAISED = {
    "raise": ValueError("no such row"),
    "out-of-memory": OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "illegal-access": AcceleratorError("CUDA error: an illegal memory access was encountered"),
}
MOMENT, RANK, TARGET, KIND = os.environ[FAULT].split(":")


def cause_fault(folder: Path) -> None:
    """Cause the fault; return only by an exception."""
    with (folder / DONE).open("x") as done:
        done.write(os.environ[PARENT])
    if KIND in RAISED:
        raise RAISED[KIND]
    if KIND.startswith("exit-"):
        os._exit(int(KIND.removeprefix("exit-")))
    if KIND == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if KIND == "moved":
        folder.rename(folder.with_name("moved"))
    else:
        os.kill(_find_target(), int(KIND))
    while True:  # wait until the fault ends this rank
        time.sleep(0.05)


def _find_target() -> int:
    """Return the process id of the target. Each process in the list is the parent of the previous one."""
    pid = os.getpid()
    for name in ("rank", "account", "agent", "command"):
        if name == TARGET:
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise ValueError(TARGET)


def _happened_before(done: Path) -> bool:
    """Return True if the fault has happened in an earlier job, and not only on another rank of this job."""
    return done.exists() and done.read_text() not in ("", os.environ[PARENT])


class Rank:
    """Replace steps of the fake worker to inject the fault; the other rank waits for it as in a collective."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.happened = folder, _happened_before(folder / DONE)
        self.original_build = fake_worker.build_engine
        self.original_measure = fake_worker.measure_point
        self.original_wait = fake_worker.wait_for_end
        self.original_append = RecordFile.append

    def is_due(self, moment: str, point: Point | None = None) -> bool:
        """Return True if the fault is due now, on this rank or on the other."""
        return not self.happened and moment == MOMENT and (point is None or point.context == FAULTY_CONTEXT)

    def cause_if_due(self, moment: str, point: Point | None = None) -> None:
        """Cause the fault if it is due now on this rank."""
        if self.is_due(moment, point) and int(RANK) == fake_worker.RANK:
            cause_fault(self.folder)

    def import_modules(self) -> None:
        """Cause the fault during imports, or wait until the other rank's fault ends this rank."""
        if self.is_due("importing"):
            self.cause_if_due("importing")
            while True:
                time.sleep(0.05)

    def cause_or_wait(self, job: jobs.Job, moment: str, point: Point) -> None:
        """Cause the fault if it is due, or wait until the other rank's fault ends this rank."""
        if self.is_due(moment, point):
            fake_worker.wait_for_stage(job, point, moment)
            self.cause_if_due(moment, point)
            while True:
                time.sleep(0.05)

    def build_engine(self, job: jobs.Job, point: Point) -> None:
        """Replace fake_worker.build_engine."""
        self.cause_or_wait(job, "build", point)
        self.original_build(job, point)

    def measure_point(self, job: jobs.Job, point: Point) -> str:
        """Replace fake_worker.measure_point."""
        self.cause_or_wait(job, "measure", point)
        note = self.original_measure(job, point)
        self.cause_if_due("recorded", point)
        return note

    def append_record(self, file: RecordFile, record: Any) -> None:
        """Replace RecordFile.append."""
        self.original_append(file, record)
        if self.is_due("record", record.point):
            path = self.folder / RECORDS_FILE
            os.truncate(path, path.stat().st_size - 100)
        self.cause_if_due("record", record.point)

    def wait_for_end(self, job: jobs.Job) -> None:
        """Replace fake_worker.wait_for_end."""
        self.original_wait(job)
        self.cause_if_due("end")


def main() -> None:
    """Run the fake worker with the fault."""
    if sys.argv[1] != "--probe":
        rank = Rank(Path(jobs.read_job(Path(sys.argv[1])).folder))
        rank.import_modules()
        fake_worker.build_engine, fake_worker.measure_point, fake_worker.wait_for_end = (
            rank.build_engine,
            rank.measure_point,
            rank.wait_for_end,
        )
        RecordFile.append = lambda file, record: rank.append_record(file, record)  # noqa: PLW0108 -- becomes a method
    fake_worker.main()


if __name__ == "__main__":
    main()
