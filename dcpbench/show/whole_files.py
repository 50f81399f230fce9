"""Write files and folders atomically: concurrent readers see the old state or the new one. No torch."""

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

PART = ".part"  # suffix of incomplete files, which are hidden next to their destination; no pattern matches it
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of Linux' renameat2


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part. Raise OSError on failure.

    The file is then on disk, unless `durable` is False because it can be made again.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-", suffix=PART)
    half = Path(name)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            if durable:
                os.fsync(f.fileno())  # the only call that reports that a disk could not keep the data
        half.chmod(0o644)  # mkstemp keeps it to its owner, and the collector of a node runs as another user
        half.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink()
        raise


def write_output_file(path: Path, text: str) -> None:
    """Write a command's output as `write_file` does, or in place if `path` is a link or a device, such as /dev/stdout."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_file(path, text.encode())


@contextlib.contextmanager
def write_folder(folder: Path, *, last: Sequence[str], ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a new folder to write into, which atomically replaces `folder` at the end; after an error it is removed.

    If `folder` holds files that are not `ours`, if the working directory of this process is in it, and on file
    systems that cannot exchange two folders, files are moved one by one: those named in `last` are removed first and
    added last, so that none of them is ever visible together with parts of another version. Raise OSError on failure.
    """
    place = folder.resolve()
    half = _make_partial_folder(place)
    try:
        yield half
        _move_folder(half, place, last, ours)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _make_partial_folder(place: Path) -> Path:
    """Return an empty folder next to `place`, or in it if its parent is not writable."""
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


def _move_folder(half: Path, place: Path, last: Sequence[str], ours: Callable[[Path], bool]) -> None:
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
    """Exchange the names of two paths atomically. Raise OSError if the file system does not support it."""
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
        _move_file(half / path, place / path)


def _move_file(new: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new.replace(path)
