"""Read and write `records.jsonl`, the file of records: one JSON object per line, with its checksum. No torch."""

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
from dcpbench.points import redaction
from dcpbench.records import acceptance, checks, checksums, disks
from dcpbench.records.folder import JOB_FILES, LOCK_FILE, RECORDS_FILE, TRUNCATED_LINES_FILE, get_record_file
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import SCHEMA_VERSION, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dcpbench.points.point import Point


class _Version(msgspec.Struct):
    schema_version: int


NUL = b"\0"
READ_BYTES = 1 << 20  # a line has a megabyte where a point has tens of thousands of steps
NAME_A_RUN = "name the folder of a run, such as those in runs/."
SAMPLES = b'"step_samples_ms":['
WAIT_S, POLL_INTERVAL_S = 5.0, 0.01  # maximum wait of an append for another one, and the interval of attempts, in s
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_version_decoder = msgspec.json.Decoder(_Version)


class BadLine(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a line of a file of records that cannot be read."""

    file: str
    line: int  # line number, from 1
    why: str  # problem with the line, without a full stop
    mend: str  # command that removes the line; empty if another version, or a change of the file, can read it


class RecordFile:
    """Append-only `records.jsonl` of one run; each line is on disk before `append` returns. One writer at a time."""

    def __init__(self, folder: Path, name: str = RECORDS_FILE) -> None:
        self.path = folder / name

    def append(self, record: Record) -> Record:
        """Write one record that `read_records` accepts, flushed and synced, and return it as it was written.

        A value that a reader would refuse is replaced, and named in `Record.omitted` (acceptance.py). Secrets are
        redacted, but for those in the point, which `--resume` finds by its key. A last line that a
        crash cut short goes to `records.truncated.txt` first. Raise OutputError if the file cannot be written, if another
        process holds its lock for WAIT_S, or if the file system has no locks.
        """
        kept, line = acceptance.prepare_record(record, decode_record)
        if redaction.list_secrets():
            kept = _remove_secrets(kept)
            line = checksums.add_checksum(_encoder.encode(kept))
        try:
            with self.path.open("ab") as f:
                _wait_for_lock(f, self.path)
                _finish_last_line(self.path)
                f.write(line + b"\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise disks.make_write_error(self.path, e) from e
        return kept

    def get_end_offset(self) -> int:
        """Return the byte at which the next record will begin."""
        if not self.path.exists():
            return 0
        last = _find_last_line(self.path)
        return last.next if last else self.path.stat().st_size

    def read_since(self, begin: int) -> Iterator[Record]:
        """Yield the records that were appended since `end` returned `begin`; errors as of `read_records`."""
        if self.path.exists():
            yield from (record for _, record in iter_records(self.path, begin))


def _remove_secrets(record: Record) -> Record:
    before = msgspec.to_builtins(record)
    after = redaction.redact_values(before) | {"point": before["point"]}
    return record if before == after else msgspec.convert(after, Record)


def check_point(point: Point) -> None:
    """Raise UsageError for a point that no reader of records would accept, before it is measured."""
    acceptance.prepare_record(Record(point=point, outcome=checks.NOT_RUN), decode_record)


def read_records(folder: Path) -> list[Record]:
    """Return all records of a run folder, or of a records.jsonl given directly.

    A last line that was cut short, or ends in the NULs of a power cut, is left out: a crash caused it, or the line is
    being written. Reading never changes the file; the next `RecordFile.append` puts such a line aside.
    Raise RecordsError for a file that is missing or cannot be read, for damage anywhere else, as in a line that its
    checksum (checksums.py) does not fit, for values that cannot be (checks.py) and for records of another
    version.
    """
    return [record for _, record in iter_records(folder)]


def iter_records(
    run: Path, begin: int = 0, *, samples: bool = True, bad: list[BadLine] | None = None
) -> Iterator[tuple[int, Record]]:
    """Yield the records from byte `begin` on, each with the byte at which its line begins; errors as of `read_records`.

    Without `samples`, step samples are left out where a checksum vouches for them. With `bad`, a line that cannot be read is
    added to that list instead of being an error, as long as the file is one of records.
    """
    path = get_record_file(run)
    require_record_file(run)
    try:
        with path.open("rb", buffering=READ_BYTES) as f:
            f.seek(begin)
            yield from parse_records(f, path, begin, samples=samples, bad=bad)
    except OSError as e:
        raise RecordsError(f" cannot be read: {e.strerror or e}; name another folder.", path) from e


def parse_records(
    lines: Iterable[bytes], path: Path, begin: int = 0, *, samples: bool = True, bad: list[BadLine] | None = None
) -> Iterator[tuple[int, Record]]:
    """Yield the records of an open file at byte `begin`; `path` is its name in errors."""
    offset = begin
    read = begin > 0
    for number, whole in enumerate(lines, 1):
        line = whole if whole.endswith(b"\n") else whole.rstrip(NUL)
        if line and not line.isspace():
            try:
                yield offset, decode_record(line, samples=samples)
                read = True
            except UNREADABLE as e:
                if is_cut_short(line, e):
                    return
                before = path.read_bytes().count(b"\n", 0, begin) if begin else 0
                from dcpbench.records.repair import has_record

                read = read or has_record(path)
                if bad is None or not (read or checks.is_record_line(line)):
                    raise RecordsError(_explain_unreadable_line(path, before + number, line, e, read=read), path) from e
                mend = checks.suggest_repair_command(path, e)
                bad.append(
                    BadLine(file=str(path), line=before + number, why=checks.describe_bad_line(line, e), mend=mend)
                )
        offset += len(whole)


def _explain_unreadable_line(path: Path, number: int, line: bytes, error: Exception, *, read: bool) -> str:
    """Return the problem with a line, to follow the path, and the remedy: `repair` only if the file holds a record."""
    where = f", line {number}: "
    if read:
        mend = checks.suggest_repair_command(path, error)
        return f"{where}{checks.explain_bad_line(line, error)}{f' To take it out, and keep a copy of the file: {mend}' if mend else ''}"
    if checks.is_record_line(line):
        return f"{where}{checks.explain_bad_line(line, error)}"
    return f" is not a records file, as none of its lines is a record (line {number}: {checks.describe_bad_line(line, error)}); {NAME_A_RUN}"


def read_record_at(path: Path, offset: int) -> Record | None:
    """Return the record of the line at this byte offset; None if there is no readable record."""
    try:
        with path.open("rb") as f:
            f.seek(offset)
            return decode_record(f.readline().rstrip(NUL))
    except (OSError, *UNREADABLE):
        return None


def require_record_file(run: Path) -> None:
    """Raise RecordsError if a folder or file holds no records."""
    if not get_record_file(run).is_file():
        raise RecordsError(_explain_missing_records(run))


def _explain_missing_records(folder: Path) -> str:
    """Return a message for a path that is not a run, with the command or name to use instead."""
    try:
        inside = [path.name for path in folder.iterdir()] if folder.is_dir() else None
    except OSError as e:
        return f"{folder} cannot be read ({e.strerror}); {NAME_A_RUN}"
    if inside is None:
        return f"{folder} {_describe_other_file(folder)}; {NAME_A_RUN}"
    if RECORDS_FILE in (folder.name, *inside):
        path = folder / RECORDS_FILE if RECORDS_FILE in inside else folder
        return f"{folder} is no run, as its {RECORDS_FILE} {_describe_other_file(path)}; {NAME_A_RUN}"
    if not inside:
        return f"{folder} is empty; `dcpbench sweep -o {shlex.quote(str(folder))}` would fill it, or {NAME_A_RUN}"
    if any(fnmatch.fnmatch(file, begun) for file in inside for begun in (LOCK_FILE, JOB_FILES)):
        return f"{folder} holds no record yet; `dcpbench top {shlex.quote(str(folder))}` shows what its run is at."
    return f"{folder} holds no {RECORDS_FILE}, so it is no run; name the folder of one, such as those in runs/."


def _describe_other_file(path: Path) -> str:
    """Return what a path is that is no regular file, as the predicate of a sentence."""
    if path.is_dir():
        return "is a folder"
    if path.is_symlink() and not path.exists():
        return "is a link to a file that does not exist"
    kinds = ((path.is_fifo, "a FIFO"), (path.is_char_device, "a device"), (path.is_block_device, "a device"))
    kind = next((kind for is_kind, kind in kinds if is_kind()), "a socket" if path.is_socket() else "")
    return f"is {kind}, not a regular file" if kind else "does not exist"


def is_last_line_cut_short(run: Path) -> bool:
    """Return True if the last line of a record file is incomplete and therefore left out."""
    path = get_record_file(run)
    try:
        last = _find_last_line(path)
    except OSError as e:
        raise RecordsError(f" cannot be read: {e.strerror or e}; name another folder.", path) from e
    if last is None or last.error is None:
        return False
    return not last.line or is_cut_short(last.line, last.error)


def is_cut_short(line: bytes, error: Exception) -> bool:
    """Return True if a line that cannot be read is the beginning of a record at the end of its file."""
    return (
        not line.endswith(b"\n") and line.lstrip().startswith(b"{") and not isinstance(error, msgspec.ValidationError)
    )


def decode_record(line: bytes, *, samples: bool = True) -> Record:
    """Decode the record of one line after comparing it with its checksum. Raises UNREADABLE.

    Without `samples`, the step samples of a line with a checksum are neither decoded nor checked: they are nearly all of a
    long line, and `RecordFile.append` checked them.
    """
    if checksums.check(line) and not samples:
        line = _remove_samples(line)
    try:
        record = _decoder.decode(line)
    except msgspec.ValidationError as e:
        _check_version(_version_decoder.decode(line).schema_version)
        if (bad := checks.find_bad_number(line)) is not None:
            raise checks.ImpossibleValueError(bad) from e
        raise
    _check_version(record.schema_version)
    if (problem := checks.find_problem(record)) is not None:
        raise checks.ImpossibleValueError(problem)
    return record


def _remove_samples(line: bytes) -> bytes:
    begin = line.find(SAMPLES)  # only a key can look like this, as strings escape their quotes
    return line if begin < 0 else line[: begin + len(SAMPLES)] + line[line.find(b"]", begin) :]


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise checks.OtherVersionError(f"schema_version {version}, while this dcpbench reads {SCHEMA_VERSION}")


@dataclasses.dataclass(frozen=True)
class _LastLine:
    """Hold the bytes after the last newline of a file."""

    begin: int
    line: bytes  # the line without trailing NULs
    error: Exception | None  # error that reading the line as a record raised; None if it is a record

    @property
    def next(self) -> int:
        """Return the offset at which the next record begins: after this line, or in its place if it is not a record."""
        return self.begin + (0 if self.error else len(self.line))


def _find_last_line(path: Path) -> _LastLine | None:
    """Read from the end of the file; None where that is a newline, as it should be."""
    with path.open("rb") as f:
        end = size = f.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - READ_BYTES)
            f.seek(start)
            tail, end = f.read(end - start) + tail, start
    whole = tail.rpartition(b"\n")[2]
    line = whole.rstrip(NUL)
    try:
        decode_record(line)
    except UNREADABLE as e:
        return _LastLine(size - len(whole), line, e) if whole else None
    return _LastLine(size - len(whole), line, None)


def _wait_for_lock(file: BinaryIO, path: Path) -> None:
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
            time.sleep(POLL_INTERVAL_S)
        except OSError as e:
            raise OutputError(
                f"{path}: the file system gives no lock on it ({e.strerror}), so that a second writer would not be "
                "noticed; give a folder on a local disk with -o."
            ) from e
        else:
            return


def _finish_last_line(path: Path) -> None:
    """Make the file end with a newline: complete a whole last line, move half of one to the file aside."""
    last = _find_last_line(path) if path.exists() else None
    if last is None:
        return
    if last.error:
        with (path.parent / TRUNCATED_LINES_FILE).open("ab") as f:
            f.write(last.line + b"\n")
    os.truncate(path, last.next)
    if not last.error:
        with path.open("ab") as f:
            f.write(b"\n")
