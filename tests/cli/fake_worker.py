"""Replace dcpbench.worker without torch: the context of a point selects the behaviour of its ranks.

A point of `serve` finishes three requests. With the context 130 it waits for an interrupt and records it; with 131 it
continues to wait.

Contexts of other points:

    13        rank 1 raises
    44        rank 1 raises in the first job only
    45        never ends, but reports progress
    46        measured; the job hangs after its last point
    99        rank 1 kills itself
    66        every rank hangs
    7         the job exits before its first point
    28        the disk is full when rank 0 writes the record
    21, 22    the engine cannot be built: a tensor is missing, or memory
    700 + n   rank 1 ends with exit code n, and rank 0 loses its connection
    800 + n   rank 1 ends by signal n, and rank 0 loses its connection
    300       measured; the job stops there
    others    measured
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import CapacityError, ModelError
from dcpbench.launch import jobs
from dcpbench.points.device_probe import Probe
from dcpbench.records.disks import get_disk_error_number
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Interval, Latencies, Metrics, Percentiles, Record, ServeMetrics

if TYPE_CHECKING:
    from dcpbench.points.point import Point

RAISES, HANGS, STILLBORN, KILLED, NO_TENSOR, NO_MEMORY, LONG, STUBBORN = 13, 66, 7, 99, 21, 22, 130, 131
FLAKY, ENDLESS, LINGERS = 44, 45, 46
CODES, SIGNALS, PAUSE, FULL = range(700, 800), range(800, 900), 300, errno.ENOSPC
POINT_S = "DCPBENCH_FAKE_POINT_S"  # environment variable with the duration of a point in seconds
RANK = int(os.environ.get("RANK", "0"))


def make_record(point: Point) -> Record:
    """Return a measured point with steps of 10 ms."""
    rate = point.concurrency * 100.0
    metrics = Metrics(
        step_ms=Interval(median=10.0, low=9.9, high=10.1, samples=100),
        itl_ms=Percentiles(p50=10.0, p90=10.2, samples=100),
        output_tok_s=Interval(median=rate, low=rate, high=rate, samples=100),
        output_tok_s_per_gpu=rate / point.tp,
        tok_s_per_user=100.0,
        step_samples_ms=[10.0] * 100,
    )
    return Record(point=point, outcome="ok", metrics=metrics, warnings=["cpu"])


def make_served_record(point: Point, finished: int = 3) -> Record:
    """Return the record of a point of `serve` with requests of 0.1 s each."""
    times = Latencies(mean=100.0, p50=100.0, samples=finished)
    serve = ServeMetrics(
        ttft_ms=times,
        itl_ms=times,
        tpot_ms=times,
        e2el_ms=times,
        output_tok_s=10.0,
        output_tok_s_per_gpu=10.0 / point.tp,
        total_tok_s=20.0,
        request_throughput=10.0,
        tok_s_per_user=10.0,
        steady_tok_s=None,
        steady_s=None,
        wall_s=0.1 * finished,
        submitted=3,
        finished=finished,
        rejected=0,
        cancelled=3 - finished,
        input_tokens=9,
        output_tokens=3,
        cached_tokens=0,
        preemptions=0,
        steps=9,
        decode_steps=6,
        decode_batch=1.0,
    )
    outcome = "ok" if finished == 3 else "failed"
    return Record(point=point, outcome=outcome, serve=serve, reason=None if outcome == "ok" else "interrupted")


def serve_point(job: jobs.Job, point: Point) -> None:
    """Write a record at once, or after SIGTERM and a second for finished requests."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    if point.context in (LONG, STUBBORN):
        (Path(job.folder) / f"waits-{RANK}").touch()
    while point.context == STUBBORN or (point.context == LONG and not came):
        time.sleep(0.05)
    if came:
        time.sleep(1.0)
    if RANK == 0:
        RecordFile(Path(job.folder)).append(make_served_record(point, finished=1 if came else 3))
    if came:
        sys.exit(130)


def wait_for_stage(job: jobs.Job, point: Point, stage: str) -> None:
    """Wait until rank 0 has reached a stage of a point. Return at once on another node, which has no file with rank 0's progress."""
    seen = job.get_progress_path()
    while int(os.environ["LOCAL_WORLD_SIZE"]) > RANK and f'"{stage}","key":"{point.get_key()}' not in _read_text(seen):
        time.sleep(0.05)


def wait_for_end(job: jobs.Job) -> None:
    """Wait until rank 0 has reported the end, like the last barrier of the real worker; for ever if a point has the context LINGERS."""
    while int(os.environ["LOCAL_WORLD_SIZE"]) > RANK and '"stage":"end"' not in _read_text(job.get_progress_path()):
        time.sleep(0.05)
    while any(point.context == LINGERS for point in job.points):
        time.sleep(0.05)


def _read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def run_job(job: jobs.Job) -> None:
    """Run every point as its context requests."""
    if job.points[0].context == STILLBORN:
        raise RuntimeError("cannot build the groups")
    if RANK == 0:
        jobs.write_progress(job, "start")
    done = 0
    while done < len(job.points):
        for index, point in enumerate(job.points[done:], done):
            run_point(job, point, index)
        done = len(job.points)
        if job.open:
            if RANK == 0:
                jobs.write_progress(job, jobs.WAITING)
            job = jobs.wait_for_points(job)
    if RANK == 0:
        jobs.write_progress(job, "end")
    wait_for_end(job)


def run_point(job: jobs.Job, point: Point, index: int) -> None:
    """Run one point as its context requests."""
    if RANK == 0:
        jobs.write_progress(job, "build", point, index=index)
    build_engine(job, point)
    if RANK == 0:
        jobs.write_progress(job, "measure", point, index=index)
    if point.context in (RAISES, KILLED, HANGS, ENDLESS, *CODES, *SIGNALS) or is_first_time(job, point):
        wait_for_stage(job, point, "measure")
        cause_failure(job, point)
    note = measure_point(job, point)
    if RANK == 0:
        jobs.write_progress(job, "done", point, index=index, note=note)
    while point.context == PAUSE:
        time.sleep(0.05)


def is_first_time(job: jobs.Job, point: Point) -> bool:
    """Return True if the point fails once and no earlier job has started it."""
    return point.context == FLAKY and len(list(Path(job.folder).glob("job-*.json"))) == 1


def measure_point(job: jobs.Job, point: Point) -> str:
    """Write the result of a point, and return the note for its progress."""
    if point.load:
        serve_point(job, point)
        return "10 tok/s"
    if job.kind == "verify":
        if RANK == 0:
            write_check(job, point)
        return "1 check"
    time.sleep(float(os.environ.get(POINT_S, "0")))
    if RANK == 0 and point.context == FULL:
        raise OSError(FULL, os.strerror(FULL))
    if RANK == 0:
        RecordFile(Path(job.folder)).append(make_record(point))
    return "step 10.0 ms"


def build_engine(job: jobs.Job, point: Point) -> None:
    """Raise the DcpbenchError of the context, if any, on every rank after rank 0 has reached the point."""
    if point.context in (NO_TENSOR, NO_MEMORY):
        wait_for_stage(job, point, "build")
    if point.context == NO_TENSOR:
        raise ModelError("no tensor 'x'; the checkpoint does not match.")
    if point.context == NO_MEMORY:
        raise CapacityError("3 GiB are missing.")


def cause_failure(job: jobs.Job, point: Point) -> None:
    """Fail on rank 1; the other ranks wait as in a collective, or get a closed connection."""
    if RANK == 1 and point.context in CODES:
        os._exit(point.context - CODES.start)
    if RANK == 1 and point.context in SIGNALS:
        os.kill(os.getpid(), point.context - SIGNALS.start)
    if point.context in (*CODES, *SIGNALS):
        while not (Path(job.folder) / "logs" / job.tag / "rank-1.exit").exists():
            time.sleep(0.05)
        raise RuntimeError("gloo: Connection closed by peer")
    if RANK == 1 and point.context in (RAISES, FLAKY):
        raise ValueError(f"no such row in {point.model}")
    if RANK == 1 and point.context == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if point.context == HANGS:
        (Path(job.folder) / f"hangs-{RANK}").touch()
    while True:
        time.sleep(0.05)
        if point.context == ENDLESS and RANK == 0:
            jobs.write_progress(job, "measure", point)


def write_check(job: jobs.Job, point: Point) -> None:
    """Append one check to the job's file; it fails for layouts with dp > 1."""
    one = jobs.Check(
        name="attention",
        layout=str(point.layout),
        ep=point.ep_degree,
        backend=point.backend,
        exchange=point.exchange,
        dtype=point.dtype,
        error=1e-7 if point.dp == 1 else 0.5,
        limit=1e-4,
        ok=point.dp == 1,
    )
    with (Path(job.folder) / "checks.jsonl").open("ab") as f:
        f.write(msgspec.json.encode(one) + b"\n")


def main() -> None:
    """Run with `--probe` or a job file, like the real worker."""
    if sys.argv[1] == "--probe":
        sys.stdout.write("a library's greeting\n")
        probe = Probe(device="cpu", count=0, name="CPU", packages={"torch": "2.9", "flashinfer": None})
        sys.stdout.write(msgspec.json.encode(probe).decode() + "\n")
        return
    job = jobs.read_job(Path(sys.argv[1]))
    folder = Path(job.folder)
    stacks = (folder / f"stacks-{RANK}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.stdout.write(f"rank {RANK} of {os.environ['WORLD_SIZE']} at work\n")
    sys.stdout.flush()
    try:
        run_job(job)
    except Exception as e:
        failure = jobs.Failure(
            rank=RANK,
            key="",
            kind=type(e).__name__,
            message=str(e),
            traceback=traceback.format_exc(),
            disk=get_disk_error_number(e),
        )
        (folder / f"error-{RANK}.json").write_bytes(msgspec.json.encode(failure))
        raise


if __name__ == "__main__":
    main()
