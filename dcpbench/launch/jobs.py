"""Define the JSON files that the launcher and a torchrun job exchange. No torch.

job-TAG.json          Job, written by torchrun.py, read by every rank; again with more points while it is `open`
progress-TAG.jsonl    Progress, one line per event, written by rank 0
stacks-R.txt          Python stacks of a rank, written on SIGUSR1
error-R.json          Failure, written by a rank that raised
records.jsonl         finished points (kind `sweep`)
checks.jsonl          Check, one line each (kind `verify`), with a checksum like records
failed.jsonl          records of points that could not be checked (kind `verify`)
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcpbench.errors import DcpbenchError, RecordsError
from dcpbench.launch.version_check import Package
from dcpbench.points.budget import EnginePlan
from dcpbench.points.names import ALL_REDUCES
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records import checksums
from dcpbench.records.folder import CHECKS_FILE, get_job_file, get_progress_file
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import StartPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")
WAITING = "waiting"  # stage of an open job that has run all its points
ENDED = "end"  # last stage of a job
AT_A_POINT, AT_A_CHECK = ("measure", "profile"), ("check",)  # stages that --timeout is about
MIN_STAGE_LIMIT_S = 300.0  # minimum time limit of other stages, such as starting, building and warming up
END_TIMEOUT_S = 60.0  # time limit for ranks to end after their last point; they are killed without data loss
LOOK_S = 0.02  # interval at which rank 0 then looks for more
SECRET = "DCPBENCH_SECRET"  # noqa: S105 -- variable with the secret that the machines of a sweep share


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the settings shared by all jobs of a command."""

    kind: str = "sweep"  # `sweep` or `verify`
    device: str  # `cuda` or `cpu`
    settings: Settings
    pool_points: tuple[Point, ...] = ()  # points of the sweep, with those already recorded; empty: the job's
    engines: tuple[EnginePlan, ...] = ()  # `sweep`: engines of all its points, so that memory plans survive a restart
    command: str = ""  # command line of the user
    prompts: tuple[tuple[int, ...], ...] = ()  # kind `verify` with a checkpoint: token ids, one list per request
    new_tokens: int = 8
    timeout: float = 300.0  # seconds without a sign of life after which a point counts as hung

    def get_limit_s(self, stage: str) -> float:
        """Return the seconds without a sign of life after which a job in this stage counts as hung."""
        if stage == ENDED:
            return END_TIMEOUT_S
        timed = AT_A_CHECK if self.kind == "verify" else AT_A_POINT
        return self.timeout if stage in timed else max(self.timeout, MIN_STAGE_LIMIT_S)


class Job(Command, frozen=True, kw_only=True):
    """Describe one torchrun job. Its points have the same tp, which is the world size."""

    tag: str
    folder: str  # absolute path of the run's folder
    points: list[Point]
    open: bool = False  # True if ranks wait for more points at the end: a search chooses them one load after the other
    store: tuple[str, int] | None = None  # (host, port) of rank 0's store for several machines; None: all on this one
    package: Package | None = None  # dcpbench that starts the job, and that ranks must have; None: any

    def get_path(self) -> Path:
        """Return the path of the job file."""
        return get_job_file(Path(self.folder), self.tag)

    def get_log_folder(self) -> Path:
        """Return the folder with the output of the job's processes."""
        return Path(self.folder) / "logs" / self.tag

    def get_port_path(self) -> Path:
        """Return the path of the file with the port of the store; see `store`."""
        return self.get_log_folder() / "port"

    def get_progress_path(self) -> Path:
        """Return the path of the file to which rank 0 writes Progress lines."""
        return get_progress_file(Path(self.folder), self.tag)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one event of a running job."""

    stage: str
    """`start` (job), `limits` (of the GPU), `build`, `choose` (with `auto`), `check`, `capture`, `compile` (loads: wait for
    kernels of FlashInfer), `warm up` (loads), `measure`, `profile`, `done` (point recorded), `waiting` (for the points that a
    search chooses next), `end` (job); the launcher adds `failed`, `hung`, `again` (it failed or hung, and will be begun once
    more), `ending` (interrupted) and `stopped`."""
    key: str = ""  # Point.get_key() of the current point
    index: int = 0
    of: int = 0
    note: str = ""  # last numbers, for the progress line
    at: float = 0.0  # Unix time
    phases: list[StartPhase] = []  # phases until an engine measures its first step, in the first event of that step


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the exception of a rank."""

    rank: int
    key: str
    kind: str
    message: str
    traceback: str
    disk: int | None = None  # number of the operating system's error, if a disk is at fault (records/disks.py)
    path: str = ""  # file that could not be written then, if the error names one


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """Exit of a rank, written by subprocess_guard.py."""

    rank: int
    code: int  # exit code; -9 means signal 9
    terminated: bool  # True if torchrun terminated this rank before it failed: another rank is the cause
    at: float  # Unix time


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of one comparison of `dcpbench verify`."""

    name: str  # `attention`, `kv_write`, `reduce` (verify); `layers`, `logits`, `tokens`, `routing` (checkpoint_checks)
    layout: str
    ep: int | None = None  # expert parallel degree; 1 for tensor-parallel experts
    backend: str
    exchange: str  # exchange with the enabled options: `a2a +q-replicate`
    all_reduce: str = ALL_REDUCES[0]
    dtype: str
    error: float | None
    """Relative error ‖x − ref‖ / ‖ref‖; for `layers` that of the operation that is nearest to its limit; for `logits` the
    largest absolute difference; for `kv_write`, `tokens` and `routing` how many are wrong. Null if it is NaN or infinite,
    which JSON does not have; such a check is never ok."""
    limit: float | None  # null if it is no finite number, as of an engine that computes NaN
    ok: bool
    detail: str = ""


_jobs, _checks = msgspec.json.Decoder(Job), msgspec.json.Decoder(Check)
decode_progress = msgspec.json.Decoder(Progress).decode


def write_checks(folder: Path, checks: Iterable[Check]) -> None:
    """Append checks to those of a run, each a line with its checksum."""
    with (folder / CHECKS_FILE).open("ab") as f:
        f.writelines(checksums.add_checksum(msgspec.json.encode(check)) + b"\n" for check in checks)


def decode_check(line: bytes) -> Check:
    """Return the check of one line after comparing it with its checksum. Raise one of lines.UNREADABLE if it is damaged."""
    checksums.check(line)
    return _checks.decode(line)


def read_checks(folder: Path) -> list[Check]:
    """Return all checks of a run, none without a file. Raise RecordsError for an invalid line."""
    path = folder / CHECKS_FILE
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e}; repeat the verification with --force.") from e
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(decode_check(line))
        except UNREADABLE as e:
            raise RecordsError(f"{path}, line {number}: {str(e)[:300]}. Repeat the verification with --force.") from e
    return found


def format_exit_code(code: int) -> str:
    """Return a phrase that describes the end of a process by its exit code or, if negative, its signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((f" ({s.name})" for s in signal.Signals if s == -code), "")
    return f"was ended by signal {-code}{name}"


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens only at this address of this machine; port 0 selects a free one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(found[4][:2], family=found[0])


def read_files(paths: Iterable[Path], kind: type[T]) -> list[T]:
    """Return the contents of JSON files that ranks write; files that are missing or incomplete are left out."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError, *UNREADABLE):
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
    return found


def read_job(path: Path) -> Job:
    """Read a job file."""
    try:
        return _jobs.decode(path.read_bytes())
    except (OSError, *UNREADABLE) as e:
        raise DcpbenchError(f"cannot read the job file {path}: {e}") from e


def wait_for_points(job: Job) -> Job:
    """Return an open job once the launcher has added points to it, or has closed it."""
    while (now := read_job(job.get_path())).open and len(now.points) == len(job.points):
        time.sleep(LOOK_S)
    return now


def write_progress(
    job: Job,
    stage: str,
    point: Point | None = None,
    *,
    index: int = 0,
    note: str = "",
    phases: Sequence[StartPhase] = (),
) -> None:
    """Append one Progress line (rank 0 only)."""
    event = Progress(
        stage=stage,
        key=point.get_key() if point else "",
        index=index,
        of=len(job.points),
        note=note,
        at=time.time(),
        phases=list(phases),
    )
    with job.get_progress_path().open("ab") as f:
        f.write(msgspec.json.encode(event) + b"\n")
