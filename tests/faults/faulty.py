"""Run the fake worker with one fault on one rank at one moment: `FAULT=MOMENT:RANK:WHOM:WHAT`. WHOM is the rank
itself, the process that keeps account of it, the agent, or the command. WHAT is the number of a signal, `raise`,
`out-of-memory` or `illegal-access` (torch's errors, by name), `exit-N`, `full` (the disk is full), or `moved` (the
run's folder is renamed). The moments are those of table.py; all but the first and the last two belong to the point
with the context AT.
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

AT = 302
FAULT = "DCPBENCH_FAULT"
DONE = "fault-done"


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's."""


class AcceleratorError(RuntimeError):
    """An error with the name of torch's."""


RAISED = {
    "raise": ValueError("no such row"),
    "out-of-memory": OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "illegal-access": AcceleratorError("CUDA error: an illegal memory access was encountered"),
}
MOMENT, WHICH, WHOM, WHAT = os.environ[FAULT].split(":")


def cause_fault(folder: Path) -> None:
    """Cause the fault."""
    with (folder / DONE).open("x") as done:
        done.write(os.environ[PARENT])
    if WHAT in RAISED:
        raise RAISED[WHAT]
    if WHAT.startswith("exit-"):
        os._exit(int(WHAT.removeprefix("exit-")))
    if WHAT == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if WHAT == "moved":
        folder.rename(folder.with_name("moved"))
    else:
        os.kill(_whom(), int(WHAT))
    while True:  # until it is noticed
        time.sleep(0.05)


def _whom() -> int:
    """Return the process id of the target: each process is the parent of the one before."""
    pid = os.getpid()
    for name in ("rank", "account", "agent", "command"):
        if name == WHOM:
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise ValueError(WHOM)


def _was_another_job(done: Path) -> bool:
    """Return True if the fault has happened in an earlier job; in this job another rank may have come first."""
    return done.exists() and done.read_text() not in ("", os.environ[PARENT])


class Rank:
    """Run the fake worker's steps with a fault between them, which the other rank waits for as in a collective."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.over = folder, _was_another_job(folder / DONE)
        self.build, self.answer, self.end = fake_worker.build, fake_worker.answer, fake_worker.wait_for_the_end
        self.append = RecordFile.append

    def at(self, moment: str, point: Point | None = None) -> bool:
        """Return True if the fault is due now, on this rank or on the other."""
        return not self.over and moment == MOMENT and (point is None or point.context == AT)

    def pass_by(self, moment: str, point: Point | None = None) -> None:
        """Cause the fault if this is the rank and the moment."""
        if self.at(moment, point) and int(WHICH) == fake_worker.RANK:
            cause_fault(self.folder)

    def importing(self) -> None:
        """Cause the fault, or wait for its consequences: no rank continues before all have arrived."""
        if self.at("importing"):
            self.pass_by("importing")
            while True:
                time.sleep(0.05)

    def meet(self, job: jobs.Job, moment: str, point: Point) -> None:
        """Cause the fault, or wait for its consequences."""
        if self.at(moment, point):
            fake_worker.wait_for(job, point, moment)
            self.pass_by(moment, point)
            while True:
                time.sleep(0.05)

    def building(self, job: jobs.Job, point: Point) -> None:
        """Replace fake_worker.build."""
        self.meet(job, "build", point)
        self.build(job, point)

    def answering(self, job: jobs.Job, point: Point) -> str:
        """Replace fake_worker.answer."""
        self.meet(job, "measure", point)
        answer = self.answer(job, point)
        self.pass_by("recorded", point)
        return answer

    def appending(self, of: RecordFile, record: Any) -> None:
        """Replace RecordFile.append."""
        self.append(of, record)
        if self.at("record", record.point):
            path = self.folder / RECORDS_FILE
            os.truncate(path, path.stat().st_size - 100)
        self.pass_by("record", record.point)

    def ending(self, job: jobs.Job) -> None:
        """Replace fake_worker.wait_for_the_end."""
        self.end(job)
        self.pass_by("end")


def main() -> None:
    """Run the fake worker with the fault."""
    if sys.argv[1] != "--probe":
        rank = Rank(Path(jobs.read_job(Path(sys.argv[1])).folder))
        rank.importing()
        fake_worker.build, fake_worker.answer, fake_worker.wait_for_the_end = rank.building, rank.answering, rank.ending
        RecordFile.append = lambda of, record: rank.appending(of, record)  # noqa: PLW0108 -- becomes a method
    fake_worker.main()


if __name__ == "__main__":
    main()
