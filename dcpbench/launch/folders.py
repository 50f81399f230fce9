"""Validate a run's folder: whether a command may use it, what --force removes, and what --resume must keep. No torch.

A sweep owns records.jsonl; `verify` owns checks.jsonl and failed.jsonl, and does not use a sweep's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError, OutputError
from dcpbench.launch.jobs import read_job
from dcpbench.launch.processes import COMMAND, find_alive, find_alive_pid
from dcpbench.plan.used_options import get_idle_fields
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import format_field
from dcpbench.points.point import HOW
from dcpbench.points.settings import Settings
from dcpbench.records import disks
from dcpbench.records.folder import (
    CASES_SUFFIX,
    CHECKS_FILE,
    FAILED_FILE,
    GAINS_FILE,
    HANGS_FOLDER,
    JOB_FILES,
    LOCK_FILE,
    RECORDS_FILE,
    STEP_TIMES_FOLDER,
    get_job_tag,
    get_progress_file,
)
from dcpbench.show.text import make_printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dcpbench.launch.jobs import Job
    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

COMMANDS = {"decode": "sweep", "serve": "serve"}  # command that writes records, by workload
END_TIMEOUT_S, POLL_INTERVAL_S = 5.0, 0.05
GRID_OPTIONS = frozenset(  # options of a layout or a load; without any a command measures its default grid
    {*DEGREES, "concurrency", "context", "request_rate", "requests", "input_tokens", "output_tokens"}
)
_GRID_FIELDS = ("model", *DEGREES, "concurrency", "context")
_GRID_FIELDS_OF_LOAD = ("arrival", "request_rate", "input_tokens", "output_tokens", "trace_sha256")
MAY_CHANGE = ("--seconds", "--profile")  # options that only make some points of a run better known than others


def make_folder(folder: Path, remedy: str = "") -> None:
    """Make the folder, and make sure that files can be written into it.

    Raise OutputError if this fails, and DiskError if its disk is the reason. `remedy` is what else to do in that case, by
    default to resume the run in it, or to give another folder.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as e:
        raise OutputError(
            f"{make_printable(str(folder))} is no name in UTF-8, so records cannot name it; give another folder with -o."
        ) from e
    with _convert_folder_errors(folder, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def _convert_folder_errors(folder: Path, remedy: str) -> Iterator[None]:
    """Convert errors of the operating system in this block, which makes or locks the folder. `remedy`: see make_folder."""
    try:
        yield
    except OSError as e:
        number = disks.get_disk_error_number(e)
        if number is None:
            raise OutputError(f"{folder} cannot be used as output folder ({e.strerror}); give another with -o.") from e
        if not remedy and _has_content(folder / RECORDS_FILE):
            raise disks.make_disk_error(folder, number) from e
        raise disks.make_output_error(folder, e, remedy or "give another folder with -o") from e


def choose_folder(name: str, tp: Sequence[int]) -> Path:
    """Return a folder that does not exist yet, named by the time, `name` and the world sizes."""
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name.replace("/", "_").strip("._"))
    base = Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{safe}-tp{'-'.join(map(str, tp))}"
    numbered = (base.with_name(f"{base.name}-{n}") for n in range(2, 100))
    return base if not base.exists() else next(p for p in numbered if not p.exists())


@contextlib.contextmanager
def lock_folder(folder: Path, remedy: str = "") -> Iterator[int]:
    """Create the folder and lock it against every other run; yield the descriptor, which all processes of a job
    inherit.

    The lock ends with the last process that has the descriptor. `remedy`: see make_folder. Raise OutputError if a run is still in progress, or if the
    file system has no locks: two runs that write here would corrupt each other's records.
    """
    make_folder(folder, remedy)
    with _convert_folder_errors(folder, remedy):
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for_lock(lock, folder)
        with _convert_folder_errors(folder, remedy):
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
        yield lock
    finally:
        os.close(lock)


def _wait_for_lock(lock: int, folder: Path) -> None:
    """Take the lock. If the command that held it is gone, wait END_TIMEOUT_S for its workers to end."""
    refused = time.monotonic() + END_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            if find_alive(folder)[0] != COMMAND and time.monotonic() < refused:
                time.sleep(POLL_INTERVAL_S)
                continue
            pid = find_alive_pid(folder) or "unknown"
            raise OutputError(
                f"{folder}: a run is still writing here; wait for it, or end it (pid {pid}), or give another folder "
                "with -o."
            ) from e
        except OSError as e:
            raise OutputError(
                f"{folder}: the file system gives no lock on {LOCK_FILE} ({e.strerror}), so that a second run here "
                "would not be noticed; give a folder on a local disk with -o."
            ) from e
        return


@contextlib.contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Convert errors of writes to the run's folder into errors that name the disk, or the missing folder."""
    try:
        yield
    except OSError as e:
        if (number := disks.get_disk_error_number(e)) is not None:
            raise disks.make_disk_error(folder, number) from e
        if not folder.is_dir():
            raise _make_removed_error(folder) from e
        if e.filename is not None and Path(os.fsdecode(e.filename)).absolute().is_relative_to(folder.absolute()):
            raise disks.make_write_error(Path(os.fsdecode(e.filename)), e, run=folder) from e
        raise


def check_not_removed(folder: Path, lock: int) -> None:
    """Raise OutputError if the folder is no longer the locked one: it was removed, or moved away."""
    try:
        same = os.path.samestat(os.fstat(lock), (folder / LOCK_FILE).stat())
    except OSError:
        same = False
    if not same:
        raise _make_removed_error(folder)


def _make_removed_error(folder: Path) -> OutputError:
    return OutputError(
        f"{folder} was removed or moved away while the run was writing there, and the run has ended; repeat the "
        "command, and where its records still are, add --resume and -o with that folder."
    )


def check_free(folder: Path, *, goes_on: bool) -> None:
    """Raise OutputError if a folder holds records and no option selects what to do with them."""
    if _has_content(folder / RECORDS_FILE) and not goes_on:
        raise OutputError(
            f"{folder} already holds records; add --resume to measure only what is missing, "
            "--force to start over, or give another folder with -o."
        )


def prepare_sweep(folder: Path, *, resume: bool, force: bool) -> None:
    """Create a sweep's folder; `force` removes the files of an earlier run. Only `resume` keeps measured cases of servers.

    Raise OutputError if it holds records and neither flag is given, or if it cannot be written.
    """
    check_free(folder, goes_on=resume or force)
    make_folder(folder)
    if force:
        _remove_results(folder, RECORDS_FILE, GAINS_FILE)
    if not resume:
        for path in list_case_files(folder):
            path.unlink(missing_ok=True)


def list_case_files(folder: Path) -> list[Path]:
    """Return the files with measured cases of servers."""
    return sorted((folder / STEP_TIMES_FOLDER).glob(f"*{CASES_SUFFIX}"))


def prepare_checks(folder: Path, *, force: bool) -> None:
    """Create the folder for `verify`, which never touches a sweep's records."""
    if _has_content(folder / RECORDS_FILE):
        raise OutputError(f"{folder} holds the records of a sweep; give verify another folder with -o.")
    if (_has_content(folder / CHECKS_FILE) or _has_content(folder / FAILED_FILE)) and not force:
        raise OutputError(f"{folder} already holds checks; add --force to check again, or give another folder with -o.")
    make_folder(folder)
    _remove_results(folder, CHECKS_FILE, FAILED_FILE)


def list_settings(points: Sequence[Point], settings: Settings, device: str) -> dict[str, object]:
    """Return the settings shared by all points of a run, by option; those that no point uses are left out."""
    shared = {
        axis.name: getattr(point, axis.name)
        for point in reversed(points)
        for axis in HOW
        if axis.one and axis.name not in get_idle_fields(point.tp, point.dp, point.dcp)
    }
    return {
        **_list_measurement_settings(settings),
        **{format_field(name): value for name, value in shared.items()},
        "--device": device,
    }


def _list_measurement_settings(settings: Settings) -> dict[str, object]:
    return {
        "--seconds": settings.seconds,
        "--profile": settings.profile,
        "--slo": ",".join(f"{name}={ms:g}" for name, ms in settings.slo.items()) or None,
        "--timeout load": settings.limit_seconds,
        "--step-times": settings.step_times or None,
        "--stages micro-batches": settings.micro_batches or None,
        "--kv-memory": settings.kv_memory_bytes and f"{settings.kv_memory_bytes}B",
    }


def check_same_command(folder: Path, point: Point, records: Iterable[Record]) -> None:
    """Raise OutputError if the folder holds a run of another command (sweep or serve) than the one that measures `point`."""
    job = _find_last_job(folder)
    known = list(records)
    before = job.points[0] if job else next((record.point for record in known), point)
    if before.workload == point.workload:
        return
    theirs, mine = (COMMANDS.get(p.workload, p.workload) for p in (before, point))
    again = format_resume_command(folder, known) or f"dcpbench {theirs} … -o {shlex.quote(str(folder))} --resume"
    raise OutputError(
        f"--resume: {folder} holds a run of {theirs}, and this is {mine}; to go on with that run, type: {again}"
    )


def check_default_grid(
    folder: Path, points: Iterable[Point], records: Sequence[Record], given: Mapping[str, object]
) -> None:
    """Raise OutputError if no option in `given` gives a layout or a load, and the folder holds another grid than the default.

    With --resume the default grid would be added to a run of another grid. Other options may add points to the same grid,
    such as --repeats.
    """
    if GRID_OPTIONS & given.keys():
        return
    known = _list_point_keys(folder, records)
    if given:
        model = not {"model", "weights"} & given.keys()
        grid = {_list_grid_values(point, model=model) for point in known.values()}
        same = all(_list_grid_values(point, model=model) in grid for point in points)
    else:
        same = all(point.get_key() in known for point in points)
    if not known or same:
        return
    again = format_resume_command(folder, records)
    type_this = f"type: {again}" if again else "repeat its options"
    raise OutputError(
        f"--resume: no option gives a layout or a load, and the default grid of this machine is not the grid of the run in "
        f"{folder}. To go on with that run, {type_this}"
    )


def _list_grid_values(point: Point, *, model: bool) -> tuple[object, ...]:
    """Return the fields of a point that define its place in a grid; those of the model only if `model` is true."""
    fields = [name for name in _GRID_FIELDS if model or name != "model"]
    load = [getattr(point.load, name) for name in _GRID_FIELDS_OF_LOAD] if point.load else []
    return (*(getattr(point, name) for name in fields), *load)


def _list_point_keys(folder: Path, records: Iterable[Record]) -> dict[str, Point]:
    """Return the points that a run has measured or planned, by their keys."""
    known = {record.point.get_key(): record.point for record in records}
    return known | {point.get_key(): point for job in _iter_jobs(folder) for point in (*job.points, *job.pool_points)}


def format_resume_command(folder: Path, records: Iterable[Record]) -> str:
    """Return the command line that continues the run in `folder`; empty if neither its jobs nor its records name one."""
    job = _find_last_job(folder)
    typed = [job.command] if job else [r.environment.command for r in records if r.environment]
    command = next((command for command in typed if command.startswith("dcpbench ")), "")
    if not command:
        return ""
    words = shlex.split(command)
    command += "" if {"-o", "--output"} & set(words) else f" -o {shlex.quote(str(folder))}"
    return command + ("" if "--resume" in words else " --resume")


def check_resumed(folder: Path, now: Mapping[str, object], records: Iterable[Record] = ()) -> str:
    """Return the differences from the settings of the folder's jobs and records as a sentence; empty without differences.

    Raise OutputError if new points would not be comparable with the recorded ones: another pool, layout of the KV
    cache, dtype, checkpoint or device. Points that no job measured, such as replays of given step times, have their settings in
    `records` alone.
    """
    before: dict[str, object] = {}
    for job in _iter_jobs(folder):
        before = list_settings(job.points, job.settings, job.device) | before
    for record in records:
        if record.outcome == "ok" and record.measured_with:
            with contextlib.suppress(msgspec.ValidationError):
                before = _list_measurement_settings(msgspec.convert(record.measured_with, Settings)) | before
    differ = {name: (old, now[name]) for name, old in before.items() if name in now and old != now[name]}
    differences = ", ".join(
        f"{name} was {_format_value(old)} and is {_format_value(new)}" for name, (old, new) in differ.items()
    )
    refused = [name for name in differ if name not in MAY_CHANGE]
    if refused:
        raise OutputError(
            f"--resume: in {folder} {differences}. Points of one run share {' and '.join(refused)}: give the value of that run, or "
            "another folder with -o."
        )
    return (
        f"--resume: in {folder} {differences}; points measured from here on have the new value." if differences else ""
    )


def _iter_jobs(folder: Path) -> Iterator[Job]:
    """Yield the readable jobs of a run, the newest first."""
    for path in sorted(folder.glob(JOB_FILES), key=lambda p: p.stat().st_mtime, reverse=True):
        with contextlib.suppress(DcpbenchError):
            yield read_job(path)


def _find_last_job(folder: Path) -> Job | None:
    return next(_iter_jobs(folder), None)


def _format_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off" if value is False else "not given"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _has_content(path: Path) -> bool:
    try:
        return path.exists() and path.stat().st_size > 0
    except OSError as e:
        raise OutputError(f"{path.parent} cannot be read ({e.strerror}); give another folder with -o.") from e


def _remove_results(folder: Path, *results: str) -> None:
    """Remove results and jobs of an earlier run, which would speak for this one."""
    try:
        for path in folder.glob(JOB_FILES):
            tag = get_job_tag(path)
            for kept in (folder / "logs" / tag, *(folder / HANGS_FOLDER).glob(f"{tag}-*")):
                shutil.rmtree(kept, ignore_errors=True)
            get_progress_file(folder, tag).unlink(missing_ok=True)
            path.unlink()
        for name in results:
            (folder / name).unlink(missing_ok=True)
    except OSError as e:
        raise OutputError(f"{folder} cannot be emptied ({e.strerror}); give another folder with -o.") from e
