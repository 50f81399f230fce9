"""The file that records lie in, `records.jsonl`: one JSON object per line, sealed with its checksum. No torch."""

from __future__ import annotations

import dataclasses
import fcntl
import fnmatch
import os
import shlex
import time
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from dcpbench.errors import OutputError, RecordsError
from dcpbench.points import older
from dcpbench.records import checks, checksums
from dcpbench.records.folder import ASIDE_FILE, JOB_FILES, LOCK_FILE, RECORDS_FILE, record_file
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import SCHEMA_VERSION, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class _Version(msgspec.Struct):
    schema_version: int


NUL = b"\0"
NAME_A_RUN = "name the folder of a run, such as those in runs/."
WAIT_S, LOOK_S = 5.0, 0.01
"""How long an append waits for another, and how often it looks."""
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_version_decoder = msgspec.json.Decoder(_Version)


class RecordFile:
    """Append-only `records.jsonl` of one run; each line is on disk before `append` returns. One writer at a time."""

    def __init__(self, folder: Path, name: str = RECORDS_FILE) -> None:
        self.path = folder / name

    def append(self, record: Record) -> None:
        """Write one record, flushed and synced.

        A last line that a crash cut short goes to `records.truncated.txt` first, never lost. Raises OutputError where
        another process is at the same for WAIT_S, or the file system has no locks.
        """
        with self.path.open("ab") as f:
            _lock(f, self.path)
            _end_last_line(self.path)
            f.write(checksums.seal(_encoder.encode(record)) + b"\n")
            f.flush()
            os.fsync(f.fileno())

    def end(self) -> int:
        """The byte at which the next record will begin."""
        if not self.path.exists():
            return 0
        last = _last_line(self.path)
        return last.next if last else self.path.stat().st_size

    def since(self, begin: int) -> Iterator[Record]:
        """The records that were appended since `end` was `begin`; errors as of `read_records`."""
        if self.path.exists():
            yield from (record for _, record in placed_records(self.path, begin))


def read_records(folder: Path) -> list[Record]:
    """All records of a run folder, or of a records.jsonl given directly.

    A last line that was cut short, or ends in the NULs of a power cut, is left out: a crash did it, or the line is
    being written right now. Reading never changes the file; the next `RecordFile.append` puts such a line aside.
    Raises RecordsError for a file that is missing or cannot be read, for damage anywhere else, as in a line that its
    checksum (checksums.py) does not fit, for values that cannot be (checks.py) and for records of another
    version.
    """
    return [record for _, record in placed_records(folder)]


def placed_records(run: Path, begin: int = 0) -> Iterator[tuple[int, Record]]:
    """The same one by one, each with the byte at which its line begins; only those from byte `begin` on."""
    path = record_file(run)
    check_there_are_records(run)
    try:
        with path.open("rb") as f:
            f.seek(begin)
            yield from records_in(f, path, begin)
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e.strerror or e}; name another folder.") from e


def records_in(lines: Iterable[bytes], path: Path, begin: int = 0) -> Iterator[tuple[int, Record]]:
    """The same of an open file that stands at byte `begin`, called `path` where something is wrong with it."""
    place = begin
    read = begin > 0
    for number, whole in enumerate(lines, 1):
        line = whole if whole.endswith(b"\n") else whole.rstrip(NUL)
        if line.strip():
            try:
                yield place, decode(line)
                read = True
            except UNREADABLE as e:
                if is_cut_short(line, e):
                    return
                before = path.read_bytes().count(b"\n", 0, begin) if begin else 0
                raise RecordsError(_unreadable(path, before + number, line, e, read=read)) from e
        place += len(whole)


def _unreadable(path: Path, number: int, line: bytes, error: Exception, *, read: bool) -> str:
    """What is wrong with a line of a file, and what to type: `repair` only where it finds a record, `read` or to come."""
    from dcpbench.records.repair import holds_record

    where = f"{path}, line {number}: "
    if read or holds_record(path):
        return f"{where}{checks.why(line, error)}{checks.how_to_mend(path, error)}"
    if checks.of_a_record(line):
        return f"{where}{checks.why(line, error)}"
    return f"{path} is no file of records, as no line of it is one (line {number}: {checks.wrong(line, error)}); {NAME_A_RUN}"


def record_at(path: Path, place: int) -> Record | None:
    """The record whose line begins at this byte; None where no such line can be read any more."""
    try:
        with path.open("rb") as f:
            f.seek(place)
            return decode(f.readline().rstrip(NUL))
    except (OSError, *UNREADABLE):
        return None


def check_there_are_records(run: Path) -> None:
    """Raise RecordsError where a folder or file that was taken for a run is none."""
    if not record_file(run).is_file():
        raise RecordsError(_no_records(run))


def _no_records(folder: Path) -> str:
    """What a folder or file is that was taken for a run, and what to type."""
    try:
        inside = [path.name for path in folder.iterdir()] if folder.is_dir() else None
    except OSError as e:
        return f"{folder} cannot be read ({e.strerror}); {NAME_A_RUN}"
    if inside is None:
        return (
            f"{folder} is no file of records; {NAME_A_RUN}"
            if folder.exists()
            else f"{folder} does not exist; {NAME_A_RUN}"
        )
    if RECORDS_FILE in (folder.name, *inside):
        return f"{folder} is no run, as its {RECORDS_FILE} is a folder; {NAME_A_RUN}"
    if not inside:
        return f"{folder} is empty; `dcpbench sweep -o {shlex.quote(str(folder))}` would fill it, or {NAME_A_RUN}"
    if any(fnmatch.fnmatch(file, begun) for file in inside for begun in (LOCK_FILE, JOB_FILES)):
        return f"{folder} holds no record yet; `dcpbench top {shlex.quote(str(folder))}` shows what its run is at."
    return f"{folder} holds no {RECORDS_FILE}, so it is no run; name the folder of one, such as those in runs/."


def cut_short(run: Path) -> bool:
    """Whether the last line of a record file is not whole, and so is left out."""
    path = record_file(run)
    try:
        last = _last_line(path)
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e.strerror or e}; name another folder.") from e
    if last is None or last.error is None:
        return False
    return not last.line or is_cut_short(last.line, last.error)


def is_cut_short(line: bytes, error: Exception) -> bool:
    """Whether a line that cannot be read is the beginning of a record at the end of its file."""
    return (
        not line.endswith(b"\n") and line.lstrip().startswith(b"{") and not isinstance(error, msgspec.ValidationError)
    )


def decode(line: bytes) -> Record:
    """The record of one line, held against its checksum before anything else. Raises UNREADABLE."""
    checksums.check(line)
    try:
        record = older.decode(line, _decoder)
    except msgspec.ValidationError:
        _check_version(_version_decoder.decode(line).schema_version)
        raise
    _check_version(record.schema_version)
    if found := checks.problem(record, line):
        raise msgspec.ValidationError(found)
    return record


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise checks.OtherVersionError(f"schema_version {version}, while this dcpbench reads {SCHEMA_VERSION}")


@dataclasses.dataclass(frozen=True)
class _LastLine:
    """What follows the last newline of a file."""

    begin: int
    line: bytes
    """Without NULs behind it."""
    error: Exception | None
    """Why it is no record."""

    @property
    def next(self) -> int:
        """Where the next record will begin: behind it, or in its place."""
        return self.begin + (0 if self.error else len(self.line))


def _last_line(path: Path, block: int = 1 << 20) -> _LastLine | None:
    """Read from the end of the file; None where that is a newline, as it should be."""
    with path.open("rb") as f:
        end = size = f.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - block)
            f.seek(start)
            tail, end = f.read(end - start) + tail, start
    whole = tail.rpartition(b"\n")[2]
    line = whole.rstrip(NUL)
    try:
        decode(line)
    except UNREADABLE as e:
        return _LastLine(size - len(whole), line, e) if whole else None
    return _LastLine(size - len(whole), line, None)


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep every other append out until the file is closed; its folder's lock (launch/folders.py) keeps other runs out."""
    refused = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            if time.monotonic() > refused:
                raise OutputError(
                    f"{path}: another process has been writing a record for {WAIT_S:g} s; end it, or give another folder "
                    "with -o."
                ) from e
            time.sleep(LOOK_S)
        except OSError as e:
            raise OutputError(
                f"{path}: the file system gives no lock on it ({e.strerror}), so that a second writer would not be "
                "noticed; give a folder on a local disk with -o."
            ) from e
        else:
            return


def _end_last_line(path: Path) -> None:
    """Make the file end with a newline: complete a whole last line, move half of one to the file aside."""
    last = _last_line(path) if path.exists() else None
    if last is None:
        return
    if last.error:
        with (path.parent / ASIDE_FILE).open("ab") as f:
            f.write(last.line + b"\n")
    os.truncate(path, last.next)
    if not last.error:
        with path.open("ab") as f:
            f.write(b"\n")
