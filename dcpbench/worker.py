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
from dcpbench.bench.operators.rendezvous import start_distributed
from dcpbench.errors import ExitCode, WorkerError
from dcpbench.exchange import registered_memory, signals, torch_collectives
from dcpbench.exchange.torch_collectives import gather_objects
from dcpbench.hangs import heartbeats
from dcpbench.hangs.evidence import Device
from dcpbench.launch import hang_capture, jobs, version_check
from dcpbench.launch.jobs import Failure, Job
from dcpbench.launch.start_phases import StartPhases
from dcpbench.measuring import flight_recorder
from dcpbench.measuring.environment import collect_environment
from dcpbench.measuring.hardware import get_torch_hardware
from dcpbench.models import load_shape
from dcpbench.points import budget
from dcpbench.points.names import FP8
from dcpbench.records.disks import get_disk_error_number
from dcpbench.records.file import RecordFile
from dcpbench.records.record import format_omitted_note
from dcpbench.serving.outcome import format_summary
from dcpbench.workloads import decode, replay_job, serve, verify
from dcpbench.workloads.session import build_session, free_memory

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.records.record import Rates, Record, StartPhase
    from dcpbench.workloads.session import Session


class Worker:
    """Hold this rank's state through the points of a job."""

    def __init__(
        self, job: Job, rank: int, device: torch.device, marks: torch.Tensor | None = None, started: float | None = None
    ) -> None:
        """Create the state; `started` is the Unix time at which the job was started, by default now."""
        self.job, self.rank, self.device, self.marks = job, rank, device, marks
        self.start_phases = StartPhases(time.time() if started is None else started)
        self.phases: list[StartPhase] = []  # of the engine that the current point built
        self.environment = collect_environment(device, job.command)
        self.rates: Rates | None = None
        self.records = RecordFile(Path(job.folder))
        self.session: Session | None = None
        self.points: list[Point] = job.points  # points of the job since it last waited for more
        self.step_times: replay_job.StepTimesByPath = {}  # step times that cover these points
        self.point: Point | None = None

    def write_progress(self, stage: str, note: str = "") -> None:
        """Print one progress line, from rank 0."""
        if self.rank == 0:
            index = self.job.points.index(self.point) if self.point else 0
            phases = self.start_phases.enter_stage(stage, time.time())
            self.phases = phases or self.phases
            jobs.write_progress(self.job, stage, self.point, index=index, note=note, phases=phases)

    def run(self) -> None:
        """Run all points of the job, in order, with those that are added to it."""
        self.write_progress("start")
        if self.device.type == "cuda" and self.job.kind != "verify":
            self.write_progress("limits")
            fp8 = any(FP8 in (point.weights_precision, point.kv_precision) for point in self.job.points)
            self.rates = limits.measure_rates(
                self.device, dist.get_world_size(), fp8=fp8
            )  # before an engine takes all memory
        while self.points:
            for point in self.points:
                self.point = point
                if self.job.kind == "verify":
                    self.verify(point)
                else:
                    self.measure(point)
            self.point = None
            self.points = self.receive_points() if self.job.open else []
        self.write_progress("end")

    def receive_points(self) -> list[Point]:
        """Return the points that the launcher adds to an open job; none if it closes the job. Collective: rank 0 reads them."""
        self.write_progress(jobs.WAITING)
        known = len(self.job.points)
        self.job = gather_objects(jobs.wait_for_points(self.job) if self.rank == 0 else self.job)[0]
        self.step_times = {}
        return self.job.points[known:]

    def measure(self, point: Point) -> None:
        """Measure one point, and write its record."""
        started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
        self.phases = []
        session = self.get_session(point)
        if point.load:
            record = self.run_serve(session, point)
        else:
            record = decode.run(
                session, point, self.job.settings, self.environment, rates=self.rates, tell=self.write_progress
            )
        note = ""
        if self.rank == 0:
            written = self.records.append(
                msgspec.structs.replace(
                    record,
                    measured_with=msgspec.to_builtins(self.job.settings),
                    started_at=started.isoformat(timespec="seconds"),
                    seconds=round(time.perf_counter() - begin, 3),
                    start=self.phases or msgspec.UNSET,
                )
            )
            note = format_omitted_note(written)
        if record.outcome != "ok":
            sys.exit(ExitCode.INTERRUPTED)  # on every rank: the run was ended
        self.write_progress("done", note=_format_numbers(record) + note)

    def run_serve(self, session: Session, point: Point) -> Record:
        """Run the workload `serve`, live or in replay."""
        serving = serve.get_serving(session, point)
        job, folder = self.job, Path(self.job.folder)
        if point.replayed:
            return replay_job.run(
                serving,
                point,
                self.points,
                job.settings,
                self.environment,
                folder,
                self.step_times,
                rates=self.rates,
                tell=self.write_progress,
            )
        return serve.run(
            serving, point, job.settings, self.environment, folder, rates=self.rates, tell=self.write_progress
        )

    def get_session(self, point: Point) -> Session:
        """Return the engine for a point: the last one if it can be shared, else a new one in its place."""
        old = self.session
        if old is not None and budget.is_same_engine(old.point, point):
            if not budget.is_same_path(old.point, point):
                self.write_progress("build")
                old.apply_point(point)
            return old
        old = None
        self.drop_session()
        self.write_progress("build")
        self.session = build_session(
            point,
            load_shape(point.model),
            budget.find_engine_plan(point, self.job.engines),
            rank=self.rank,
            device=self.device,
            seed=self.job.settings.seed,
            alive=lambda: self.write_progress("build"),
        )
        self.session.engine.model.marks = self.marks
        return self.session

    def drop_session(self) -> None:
        """Take down the engine with all of its graphs: a communicator does not end while a graph with its kernels
        exists.
        """
        if self.session is not None:
            gc.unfreeze()  # objects that freeze_heap froze, among them reference cycles of the engine
        self.session = None
        free_memory(self.device)

    def verify(self, point: Point) -> None:
        """Run one point's comparisons."""
        self.write_progress("check")
        shape = load_shape(point.model if point.weights == "synthetic" else point.weights)
        checks = verify.run(point, shape, self.job, rank=self.rank, device=self.device)
        free_memory(self.device)
        if self.rank == 0:
            jobs.write_checks(Path(self.job.folder), checks)
            self.write_progress("done", note=f"{sum(c.ok for c in checks)} of {len(checks)} checks agree")


def _format_numbers(record: Record) -> str:
    """Return the last numbers for the progress line."""
    if record.serve is not None:
        return format_summary(record.serve)
    assert record.metrics is not None
    chosen = f" with {record.choice}" if record.choice else ""
    return f"{record.metrics.step_ms.median:.2f} ms/step{chosen}"


def _report_failure(folder: Path, rank: int, key: str, e: Exception) -> NoReturn:
    """Write the exception that a rank raised at a point, and exit."""
    failure = Failure(
        rank=rank,
        key=key,
        kind=type(e).__name__,
        message=str(e),
        traceback=traceback.format_exc(),
        disk=get_disk_error_number(e),
        path=str(getattr(e, "filename", None) or ""),
    )
    with contextlib.suppress(OSError):  # a full disk, or a deleted folder
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
            version_check.check_same_package(job.package)
    except WorkerError as e:  # before ranks connect: another version may do that differently
        _report_failure(folder, rank, "", e)
    faulthandler.enable()
    stacks = (folder / f"stacks-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    gc.freeze()  # the garbage collector need not scan torch's modules between points
    if job.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    start_distributed(device, rank, ranks, job.get_port_path(), job.store)
    marks = torch.zeros(1, dtype=torch.int32, pin_memory=True) if job.device == "cuda" else None
    says = {  # the first answer needs no other component: CUDA may not respond
        hang_capture.DEVICE: lambda: b"" if marks is None else msgspec.json.encode(Device(norm=int(marks[0]))),
        hang_capture.STACKS: flight_recorder.collect_stacks,
        hang_capture.FLIGHT: flight_recorder.export_trace,
        hang_capture.SIGNALS: signals.read_signals,
        hang_capture.ANSWERED: lambda: b"{}",
    }
    flight_recorder.start_responder(
        job.get_log_folder() / hang_capture.ASK.format(rank),
        {job.get_log_folder() / name.format(rank): say for name, say in says.items()},
    )
    torch_collectives.start_rank_heartbeats(
        job.get_log_folder() / hang_capture.HEARTBEATS.format(rank), rank, ranks, device
    )
    worker = None
    try:
        worker = Worker(job, rank, device, marks, started=Path(path).stat().st_mtime)
        with torch.inference_mode():
            worker.run()
        with heartbeats.record_collective("barrier", None, dist.group.WORLD):
            dist.barrier(device_ids=[local_rank] if job.device == "cuda" else None)
    except Exception as e:  # noqa: BLE001 - report any error to the launcher
        _report_failure(folder, rank, worker.point.get_key() if worker and worker.point else "", e)
    if worker is not None:
        worker.drop_session()
    registered_memory.close_all()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        sys.stdout.write(msgspec.json.encode(get_torch_hardware()).decode() + "\n")
    else:
        sys.exit(main(sys.argv[1]))
