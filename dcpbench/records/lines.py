"""Read the lines appended to a file since the last read: progress, records and checks of a run in progress."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")
UNREADABLE = (
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)  # errors of msgspec for no JSON, no UTF-8, deep nesting


def decode_or_none(data: bytes, kind: type[T]) -> T | None:
    """Return the JSON of some bytes as a value of this type; None if they are malformed, or another type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE:
        return None


class Tail:
    """Follow a growing file of lines. A line that is still being written is left for the next read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unread = 0  # lines that `decode_lines` could not read, or 1 for a file that cannot be opened
        self._read = 0
        self._inode = 0

    def reset_if_replaced(self) -> bool:
        """Return True if the file was replaced or has become shorter, so that it has to be read from its start."""
        found = _get_regular_stat(self.path)
        if not self._inode or (found and found.st_ino == self._inode and found.st_size >= self._read):
            return False
        self._read = self._inode = 0
        return True

    def read_lines(self) -> Iterator[bytes]:
        """Yield the complete new lines, without their ends; none if the file is missing or unreadable."""
        found = _get_regular_stat(self.path)
        if found is None or (self._inode and found.st_size == self._read):
            return
        try:
            file = self.path.open("rb")
        except OSError:
            self.unread = self.unread or 1
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield line[:-1]

    def decode_lines(self, decode: Callable[[bytes], T]) -> Iterator[T]:
        """Yield the decoded new lines; leave out and count lines that raise UNREADABLE."""
        for line in self.read_lines():
            try:
                found = decode(line)
            except UNREADABLE:
                self.unread += bool(line.strip())
            else:
                yield found


def _get_regular_stat(path: Path) -> os.stat_result | None:
    """Return the file's status, or None for a file that could block a reader, such as a pipe."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None
