"""Says what is wrong where the files of a run cannot be written, and what to do about it. No torch."""

from __future__ import annotations

import errno
import os
import shlex
from typing import TYPE_CHECKING

from dcpbench.errors import DcpbenchError, DiskError, OutputError

if TYPE_CHECKING:
    from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO)
DISK_ERRORS = (*FULL, *BROKEN)


def is_disk_error(error: BaseException) -> bool:
    """Return whether an error is one of the disk, which no point and no server causes."""
    return isinstance(error, OSError) and error.errno in DISK_ERRORS


def write_error(path: Path, error: OSError, run: Path | None = None) -> DcpbenchError:
    """Return the error to raise where a file of a run's folder, by default the file's own, could not be written."""
    folder = path.parent if run is None else run
    return (
        disk_error(folder, error.errno)
        if is_disk_error(error)
        else OutputError(
            f"{path} cannot be written ({error.strerror or error}). Let this user write there, then repeat the command with "
            f"{_resume(folder)}; or give another folder with -o."
        )
    )


def disk_error(folder: Path, number: int | None) -> DiskError:
    """Return the error to raise where the disk of a run's folder takes nothing more. Every earlier record is on it."""
    what = {
        errno.ENOSPC: "no space is left on its disk. What was measured is safe: make room",
        errno.EDQUOT: "the disk quota of this user is used up. What was measured is safe: make room",
        errno.EROFS: "its file system is read-only. What was measured is safe: mount it for writing",
        errno.EIO: "its disk reported an I/O error, so the last record may not be on it. Check the disk",
    }.get(number or 0, f"its disk cannot be written ({os.strerror(number or errno.EIO)}). Check the disk")
    return DiskError(
        f"{folder}: {what}, then repeat the command with {_resume(folder)}; or write its report elsewhere with "
        f"`dcpbench report {shlex.quote(str(folder))} -o ELSEWHERE`."
    )


def _resume(folder: Path) -> str:
    return f"-o {shlex.quote(str(folder))} --resume"
