"""Diagnose disks on which the files of a run cannot be written, and name the remedy. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import DcpbenchError, DiskError, OutputError
from dcpbench.records.folder import RECORDS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO)
DISK_ERRORS = (*FULL, *BROKEN)
MIN_FREE_BYTES = 1 << 20  # bytes that a run needs to go on: records, logs and samples of a point
ANSWER_S = 5.0  # for a write of a few bytes, after which a file system counts as frozen
KILL_S = 0.5
PROBE = "import os, sys, tempfile\nwith tempfile.TemporaryFile(dir=sys.argv[1]) as f:\n f.write(b'x'); f.flush(); os.fsync(f.fileno())"


def get_disk_error_number(error: BaseException) -> int | None:
    """Return the number of an error of the disk, which no point and no server causes; None for any other error."""
    number = error.number if isinstance(error, DiskError) else error.errno if isinstance(error, OSError) else None
    return number if number in DISK_ERRORS else None


def make_write_error(path: Path, error: OSError, run: Path | None = None) -> DcpbenchError:
    """Return the error to raise where a file of a run's folder, by default the file's own, could not be written."""
    folder = path.parent if run is None else run
    if (number := get_disk_error_number(error)) is not None:
        return make_disk_error(folder, number)
    return OutputError(
        f"{path} cannot be written ({error.strerror or error}). Let this user write there, then repeat the command with "
        f"{_format_resume_options(folder)}; or give another folder with -o."
    )


def make_disk_error(folder: Path, number: int, where: str = "") -> DiskError:
    """Return the error to raise if a disk accepts no more data: the disk of a run's folder, or of the file `where`.

    The error states that every earlier record is on the disk of the run.
    """
    what, how = describe_disk_error(number)
    lost = ", so that the last record may be lost" if number == errno.EIO else ""
    return DiskError(
        f"{where or folder}: {what}{lost}. No point is to blame, and what was recorded before is safe: {how}, then repeat the "
        f"command with {_format_resume_options(folder)}; or write its report elsewhere with `dcpbench report {shlex.quote(str(folder))} -o "
        "ELSEWHERE`.",
        number,
    )


def describe_disk_error(number: int) -> tuple[str, str]:
    """Return what is wrong with a disk, as a clause, and what to do about it."""
    return {
        errno.ENOSPC: ("no space is left on its disk", "make room"),
        errno.EDQUOT: ("the disk quota of this user is used up", "make room"),
        errno.EFBIG: ("a file would exceed the limit of its size", "raise the limit (ulimit -f unlimited)"),
        errno.EROFS: ("its file system is read-only", "mount it for writing"),
        errno.EIO: ("its disk reported an I/O error", "check the disk"),
    }.get(number, (f"its disk cannot be written ({os.strerror(number)})", "check the disk"))


def make_output_error(place: Path | str, error: OSError, remedy: str, state: str = "") -> DcpbenchError:
    """Return the error to raise if the output of a command, other than the files of a run, could not be written.

    `remedy` is what else to do, such as `give another folder with -o`; `state` is a sentence on what is not affected.
    """
    after = f" {state}" if state else ""
    if (number := get_disk_error_number(error)) is not None:
        what, how = describe_disk_error(number)
        return DiskError(f"{place}: {what}.{after} {_capitalize(how)}, or {remedy}.", number)
    return OutputError(f"{place} cannot be written ({error.strerror or error}).{after} {_capitalize(remedy)}.")


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


@contextlib.contextmanager
def convert_output_errors(place: Path | str, remedy: str, state: str = "", *, repairs: bool = False) -> Iterator[None]:
    """Convert errors of the operating system in this block, which writes a command's output, with `make_output_error`.

    Raise OutputError before the block if `place` is a file of records, unless the block `repairs` it.
    """
    if not repairs and Path(place).name == RECORDS_FILE and Path(place).is_file():
        raise OutputError(f"{place} holds the records of a run and is not replaced. {_capitalize(remedy)}.")
    try:
        yield
    except OSError as e:
        raise make_output_error(place, e, remedy, state) from e


def check_free_space(folder: Path) -> None:
    """Raise DiskError if the disk of a folder cannot take the next write of a run."""
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(bytes(MIN_FREE_BYTES))
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        if (number := get_disk_error_number(e)) is not None:
            raise make_disk_error(folder, number) from e


def check_answers(folder: Path) -> None:
    """Raise DiskError if the file system of a folder does not answer, for example because it is frozen or its server is
    gone.

    A subprocess tries the write, because a write blocked by such a file system cannot be interrupted.
    """
    probe = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROBE, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        probe.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        probe.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process cannot end before the file system answers
            probe.wait(KILL_S)
        raise DiskError(
            f"{folder}: its file system does not answer, as a file could not be written within {ANSWER_S:g} s. No point is "
            f"to blame: see that it can be written again, then repeat the command with {_format_resume_options(folder)}."
        ) from None


def _format_resume_options(folder: Path) -> str:
    return f"-o {shlex.quote(str(folder))} --resume"
