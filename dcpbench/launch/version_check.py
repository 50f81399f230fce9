"""Ensure that ranks run the same dcpbench files as the command that started them. No torch.

`python -m` searches the working directory first. If a folder `dcpbench` lies there, ranks would run that one instead of
the command's package, and plans and records would describe another program than the measured one.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec

import dcpbench
from dcpbench.errors import WorkerError

SOURCES = (".py", ".cu", ".cuh")


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """Identify an installation of dcpbench by its folder and files."""

    folder: str
    sha256: str  # SHA-256 of its modules and kernels, independent of the folder


def get_folder() -> Path:
    """Return the folder of this process's package."""
    return Path(dcpbench.__file__).parent


def read_package() -> Package:
    """Return this process's package, as it is on the disk now."""
    here, found = get_folder(), hashlib.sha256()
    for path in sorted(path for kind in SOURCES for path in here.rglob(f"[!.]*{kind}")):  # not hidden
        code = path.read_bytes()
        found.update(f"{path.relative_to(here)} {len(code)}\n".encode() + code)
    return Package(folder=str(here), sha256=found.hexdigest())


def find_script_folder() -> str:
    """Return the dcpbench folder used by scripts installed with this Python, such as bin/dcpbench; empty if there is
    none.
    """
    command = [sys.executable, "-P", "-c", "import dcpbench, pathlib; print(pathlib.Path(dcpbench.__file__).parent)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@functools.cache
def get_started_package() -> Package:
    """Return the package of a command as it was on the disk at the first call, before its first rank is started."""
    return read_package()


def get_environment() -> dict[str, str]:
    """Return the variables with which `python -m` ignores the working directory, unless this process's package lies
    there.
    """
    return {} if get_folder().parent.resolve() == Path.cwd() else {"PYTHONSAFEPATH": "1"}


def check_same_package(wanted: Package) -> None:
    """Raise WorkerError if this process has other files than the command that started the job."""
    mine = read_package()
    if mine.sha256 == wanted.sha256:
        return
    if mine.folder == wanted.folder:
        raise WorkerError(
            f"dcpbench's files in {mine.folder} have changed since the command began, or differ from those of another "
            "machine: ranks would measure another program than earlier records did. On several machines install the same version "
            "on all; then repeat the command, for a run of records with `-o RUN --resume`, which continues it."
        )
    raise WorkerError(
        f"the ranks here run the dcpbench in {mine.folder}, whose files are not those of the command, in {wanted.folder}: "
        "they would measure another program than the records name. Install the same dcpbench on all machines; on one "
        "alone, `python -c 'import dcpbench; print(dcpbench.__file__)'` says which comes first: set PYTHONPATH, or leave "
        "the folder that has another."
    )
