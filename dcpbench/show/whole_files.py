"""Writes files and folders whole or not at all: whoever looks meanwhile sees what was there before. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PART = ".part"
"""How the name of what is not whole yet ends, hidden beside its place; nobody globs for it."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux' renameat2."""


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file of which a reader sees the old one or the new one, never a part. Raises OSError.

    The file is on disk then, unless it need not be `durable` because it can be made again.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-", suffix=PART)
    half = Path(name)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            if durable:
                os.fsync(f.fileno())  # a disk says here, and nowhere else, that it could not keep them
        half.chmod(0o644)  # mkstemp keeps it to its owner, and the collector of a node runs as another user
        half.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink()
        raise


@contextlib.contextmanager
def whole_folder(folder: Path, *, last: Sequence[str], ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` at the end, at once; after an error it is gone.

    Where `folder` holds anything that is not `ours`, where someone of this process works in it, and on file systems
    that cannot exchange two folders, files are moved one by one: those named in `last` go first and come last, so that
    none of them ever stands beside parts of another whole. Raises OSError.
    """
    place = folder.resolve()
    half = _half(place)
    try:
        yield half
        _put(half, place, last, ours)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _half(place: Path) -> Path:
    """An empty folder beside the place, or in it where beside it nothing may be written."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    name = f".{place.name[:40]}-{secrets.token_hex(4)}{PART}"
    try:
        (place.parent / name).mkdir()
    except OSError:
        if not place.is_dir():
            raise
        (place / name).mkdir()
        return place / name
    return place.parent / name


def _put(half: Path, place: Path, last: Sequence[str], ours: Callable[[Path], bool]) -> None:
    if half.parent != place and not place.exists():
        half.rename(place)
        return
    here = Path.cwd()
    if half.parent != place and place not in (here, *here.parents) and all(map(ours, place.iterdir())):
        shutil.copymode(place, half)
        with contextlib.suppress(OSError):
            _exchange(half, place)
            return
    _move_in(half, place, last)


def _exchange(one: Path, other: Path) -> None:
    """Each gets the name of the other, at once. Raises OSError where the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _move_in(half: Path, place: Path, last: Sequence[str]) -> None:
    for name in last:
        (place / name).unlink(missing_ok=True)
    found = [path.relative_to(half) for path in half.rglob("*") if path.is_file()]
    for path in sorted(found, key=lambda path: (str(path) in last, str(path))):
        _arrives(half / path, place / path)


def _arrives(new: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new.replace(path)
