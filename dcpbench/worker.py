"""Run one rank: `python -m dcpbench.worker JOBFILE` under torchrun, or `--probe` alone."""

from __future__ import annotations

import contextlib
import datetime as dt
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch
import torch.distributed as dist

from dcpbench.bench.operators import limits
from dcpbench.bench.operators.ranks import start
from dcpbench.errors import ExitCode, WorkerError
from dcpbench.exchange import collectives, registered_memory, signals
from dcpbench.hangs import beats
from dcpbench.hangs.evidence import Device
from dcpbench.launch import hung, jobs, package
from dcpbench.launch.jobs import Failure, Job
from dcpbench.measuring import flight_recorder
from dcpbench.measuring.environment import environment, probe
from dcpbench.points import budget
from dcpbench.points.names import FP8, REPLAY
from dcpbench.points.shapes import load_shape
from dcpbench.records.disks import error_number
from dcpbench.records.file import RecordFile
from dcpbench.records.record import omitted_note
from dcpbench.serving.outcome import in_short
from dcpbench.workloads import decode, replay, serve, verify
from dcpbench.workloads.session import build, free_memory

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.records.record import Rates, Record
    from dcpbench.workloads.session import Session

INTERRUPTED = ExitCode.INTERRUPTED
"""Exit code of a rank that was interrupted from outside, after it has written its record."""


class Worker:
    """Hold this rank's state through the points of a job."""

    def __init__(self, job: Job, rank: int, device: torch.device, marks: torch.Tensor | None = None) -> None:
        self.job, self.rank, self.device, self.marks = job, rank, device, marks
        self.environment = environment(device, job.command)
        self.rates: Rates | None = None
        self.records = RecordFile(Path(job.folder))
        self.session: Session | None = None
        self.step_times: replay.Known = {}
        self.point: Point | None = None

    def tell(self, stage: str, note: str = "") -> None:
        """Print one progress line, from rank 0."""
        if self.rank == 0:
            index = self.job.points.index(self.point) if self.point else 0
            jobs.tell(self.job, stage, self.point, index=index, note=note)

    def run(self) -> None:
        """Run all points of the job, in order."""
        self.tell("start")
        if self.device.type == "cuda" and self.job.kind != "verify":
            fp8 = any(FP8 in (point.weights_precision, point.kv_precision) for point in self.job.points)
            self.rates = limits.rates(self.device, dist.get_world_size(), fp8=fp8)  # before an engine takes all memory
        for point in self.job.points:
            self.point = point
            if self.job.kind == "verify":
                self.verify(point)
            else:
                self.measure(point)
        self.point = None
        self.tell("end")

    def measure(self, point: Point) -> None:
        """Measure one point, and write its record."""
        started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
        session = self.session_for(point)
        if point.load:
            record = self.serve(session, point)
        else:
            record = decode.run(session, point, self.job.settings, self.environment, rates=self.rates, tell=self.tell)
        note = ""
        if self.rank == 0:
            written = self.records.append(
                msgspec.structs.replace(
                    record,
                    measured_with=msgspec.to_builtins(self.job.settings),
                    started_at=started.isoformat(timespec="seconds"),
                    seconds=round(time.perf_counter() - begin, 3),
                )
            )
            note = omitted_note(written)
        if record.outcome != "ok":
            sys.exit(INTERRUPTED)  # on every rank: the run was ended
        self.tell("done", note=_numbers(record) + note)

    def serve(self, session: Session, point: Point) -> Record:
        """Run the workload `serve`, live or in replay."""
        serving = serve.serving_for(session, point)
        job, folder = self.job, Path(self.job.folder)
        if point.load is not None and point.load.mode == REPLAY:
            return replay.run(
                serving,
                point,
                job.points,
                job.settings,
                self.environment,
                folder,
                self.step_times,
                rates=self.rates,
                tell=self.tell,
            )
        return serve.run(serving, point, job.settings, self.environment, folder, rates=self.rates, tell=self.tell)

    def session_for(self, point: Point) -> Session:
        """Return the engine for a point: the last one if it can be shared, else a new one in its place."""
        old = self.session
        if old is not None and budget.same_engine(old.point, point):
            if not budget.same_path(old.point, point):
                self.tell("build")
                old.follow(point)
            return old
        old = None
        self.drop_session()
        self.tell("build")
        self.session = build(
            point,
            load_shape(point.model),
            budget.engine_of(point, self.job.engines),
            rank=self.rank,
            device=self.device,
            seed=self.job.settings.seed,
            alive=lambda: self.tell("build"),
        )
        self.session.engine.model.marks = self.marks
        return self.session

    def drop_session(self) -> None:
        """Take down the engine with all of its graphs: a communicator does not end while a graph with its kernels
        exists.
        """
        if self.session is not None:
            gc.unfreeze()  # what settle_heap has frozen, cycles of the engine among it
        self.session = None
        free_memory(self.device)

    def verify(self, point: Point) -> None:
        """Run one point's comparisons."""
        self.tell("check")
        shape = load_shape(point.model if point.weights == "synthetic" else point.weights)
        checks = verify.run(point, shape, self.job, rank=self.rank, device=self.device)
        free_memory(self.device)
        if self.rank == 0:
            jobs.write_checks(Path(self.job.folder), checks)
            self.tell("done", note=f"{sum(c.ok for c in checks)} of {len(checks)} checks agree")


def _numbers(record: Record) -> str:
    """Return the last numbers for the progress line."""
    if record.serve is not None:
        return in_short(record.serve)
    assert record.metrics is not None
    chosen = f" with {record.choice}" if record.choice else ""
    return f"{record.metrics.step_ms.median:.2f} ms/step{chosen}"


def _fail(folder: Path, rank: int, key: str, e: Exception) -> NoReturn:
    """Write the exception that a rank raised at a point, and exit."""
    failure = Failure(
        rank=rank,
        key=key,
        kind=type(e).__name__,
        message=str(e),
        traceback=traceback.format_exc(),
        disk=error_number(e),
        path=str(getattr(e, "filename", None) or ""),
    )
    with contextlib.suppress(OSError):  # a full disk, or a folder that is gone
        (folder / f"error-{rank}.json").write_bytes(msgspec.json.encode(failure))
    with contextlib.suppress(OSError):
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # not sys.exit: tearing down a group whose other ranks wait in a collective would hang


def main(path: str) -> int:
    """Run a job as one rank of a torchrun; a rank that fails writes error-R.json and ends at once."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    job = jobs.read_job(Path(path))
    folder = Path(job.folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception would wait for threads and for the other ranks
    try:
        if job.package is not None:
            package.must_be(job.package)
    except WorkerError as e:  # before ranks meet, which others may do in another way
        _fail(folder, rank, "", e)
    faulthandler.enable()
    stacks = (folder / f"stacks-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    gc.freeze()  # the modules of torch, which no collection between two points need look through
    if job.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    start(device, rank, ranks, job.port_path(), job.store)
    marks = torch.zeros(1, dtype=torch.int32, pin_memory=True) if job.device == "cuda" else None
    says = {  # first the answer that needs no other component: CUDA may not respond
        hung.DEVICE: lambda: b"" if marks is None else msgspec.json.encode(Device(norm=int(marks[0]))),
        hung.STACKS: flight_recorder.stacks,
        hung.FLIGHT: flight_recorder.recorded,
        hung.SIGNALS: signals.read,
        hung.ANSWERED: lambda: b"{}",
    }
    flight_recorder.answer(
        job.logs() / hung.ASK.format(rank), {job.logs() / name.format(rank): say for name, say in says.items()}
    )
    collectives.beat(job.logs() / hung.BEATS.format(rank), rank, ranks, device)
    worker = None
    try:
        worker = Worker(job, rank, device, marks)
        with torch.inference_mode():
            worker.run()
        with beats.collective("barrier", None, dist.group.WORLD):
            dist.barrier(device_ids=[local_rank] if job.device == "cuda" else None)
    except Exception as e:  # noqa: BLE001 - whatever it is, the launcher has to hear of it
        _fail(folder, rank, worker.point.key() if worker and worker.point else "", e)
    if worker is not None:
        worker.drop_session()
    registered_memory.close_all()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        sys.stdout.write(msgspec.json.encode(probe()).decode() + "\n")
    else:
        sys.exit(main(sys.argv[1]))
