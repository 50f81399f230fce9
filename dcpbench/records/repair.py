"""Audit a file of records line by line, and repair it by removing damaged lines. No torch.

{"checked":"crc32",…}           whole: the line matches its checksum and is a record
{"schema_version":1,…}          whole without a checksum: it is a record, and later changes cannot be detected
{"checked":"crc32",…x…}         damaged: the line does not match its checksum or is not JSON
{"schema_version":2,…}          strange: there is no sign of damage, but this version cannot read the line
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import OutputError, RecordsError
from dcpbench.records import acceptance, checks, checksums
from dcpbench.records.disks import convert_output_errors
from dcpbench.records.file import NUL, decode_record, is_cut_short, require_record_file
from dcpbench.records.folder import get_record_file, get_run_folder
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

SEALED, UNSEALED, CUT_SHORT, DAMAGED, STRANGE = "sealed", "unsealed", "cut short", "damaged", "strange"
MAX_BROKEN_OBJECTS = 64  # objects without an end tried per damaged line: a record has 20, and each costs a search
_BEGIN, _VALUE = re.compile(r'\{\s*"'), json.JSONDecoder()
COPY_FIRST = "copy the folder to another disk and repair the copy"  # remedy if the disk of the file cannot be written
BACKUP = ".before-repair"  # suffix of the copy of a file of records made before the repair


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a line that is not a record."""

    line: int  # line number, from 1
    kind: str  # `cut short`, `damaged` or `strange`
    why: str  # problem with the line, without a full stop
    length_bytes: int
    whole_records: int = 0  # whole records found inside it; 1 for a record with an invalid value left out


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of the audit of a file of records."""

    file: str
    records: int  # number of whole lines
    unsealed: int  # number of whole lines without a checksum, as written before checksums were added
    points: int
    faults: list[Fault]
    advice: list[str]  # remedies, each once; without a record only for lines that were some, or of another version
    samples_missing: list[str]  # files of requests that records name and that are missing from the folder


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of the repair of a file of records."""

    file: str
    kept: int  # number of records kept, including those found inside damaged lines
    taken_out: list[Fault]
    left: list[Fault] = []  # strange lines, which stay unless their removal was requested
    backup: str = ""  # path of the copy of the original file; empty if nothing was changed


def audit_file(run: Path) -> Audit:
    """Check the records of a run's folder, or of a file given directly, without changing anything.

    Raise RecordsError if there is no such file or it cannot be read.
    """
    path = get_record_file(run)
    faults, keys, missing = [], set(), set()
    advice: dict[str, bool] = {}
    records = unsealed = 0
    for line in _iter_lines(path):
        if line.fault:
            faults.append(line.fault)
            advice[line.advice] = advice.get(line.advice, False) or line.was_record
        for record in line.records if not line.fault else []:
            records, unsealed = records + 1, unsealed + (line.kind == UNSEALED)
            keys.add(record.point.get_key())
            named = record.serve.samples_file if record.serve else ""
            if named and not (get_run_folder(run) / named).is_file():
                missing.add(named)
    mends = records > 0 or any(fault.whole_records for fault in faults)
    return Audit(
        file=str(path),
        records=records,
        unsealed=unsealed,
        points=len(keys),
        faults=faults,
        advice=[text for text, of_a_record in advice.items() if text and (mends or of_a_record)],
        samples_missing=sorted(missing),
    )


def repair_file(run: Path, *, strange: bool = False) -> Repair:
    """Remove damaged lines from a file, and keep a copy of the original. Whole lines are unchanged.

    Complete records between damage in one line, as after a lost newline, get lines of their own. Strange lines stay
    unless `strange` is given. The caller holds the folder's lock, so that no other process writes meanwhile. Raise
    RecordsError if no line is a record or the file cannot be read, and OutputError or DiskError if the folder cannot be written; the
    file is then unchanged.
    """
    path = get_record_file(run)
    found = audit_file(run)
    require_records(found)
    left = [fault for fault in found.faults if fault.kind == STRANGE and not strange]
    taken_out = [fault for fault in found.faults if fault not in left]
    if not taken_out:
        return Repair(file=str(path), kept=found.records, taken_out=[], left=left)
    with convert_output_errors(path, COPY_FIRST, "The file is unchanged.", repairs=True):
        backup = _create_backup(path)
        kept = _write_repaired_file(path, strange=strange)
    return Repair(file=str(path), kept=kept, taken_out=taken_out, left=left, backup=str(backup))


def has_record(path: Path) -> bool:
    """Return True if any line of a file is a record or has one inside its damage, so that the file can be repaired."""
    return any(line.records for line in _iter_lines(path))


def require_records(found: Audit) -> None:
    """Raise RecordsError if no record was found, not even inside damaged lines."""
    if not found.records and not any(fault.whole_records for fault in found.faults):
        raise RecordsError(
            f"{found.file} holds no record that this version can read; put a copy of the run in its place, or name another run."
        )


class _Line(msgspec.Struct, frozen=True):
    """Hold a line with the records in it, and the bytes of each."""

    kind: str
    records: list[Record]
    texts: list[bytes]
    fault: Fault | None = None
    advice: str = ""  # remedy for the fault; empty if the line was cut short
    was_record: bool = True
    whole: bytes = b""  # original line of a fault


def _iter_lines(path: Path) -> Iterator[_Line]:
    """Yield all lines but blank ones."""
    require_record_file(path)
    try:
        with path.open("rb") as f:
            for number, whole in enumerate(f, 1):
                line = whole if whole.endswith(b"\n") else whole.rstrip(NUL)
                if line.strip() or line != whole:
                    yield _parse_line(number, line)
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e.strerror or e}; name another folder.") from e


def _parse_line(number: int, line: bytes) -> _Line:
    try:
        record = decode_record(line)
    except UNREADABLE as error:
        e = _find_json_error(line) or error if isinstance(error, checksums.RewrittenError) else error
        kind = CUT_SHORT if not line or is_cut_short(line, e) else STRANGE if checks.is_strange(e) else DAMAGED
        inside = list(_find_inner_records(line)) if kind != STRANGE else _drop_invalid_value(line, e)
        unwritten = ("the end of the file was never written", "")
        why, advice = (
            unwritten if kind == CUT_SHORT else (checks.describe_bad_line(line, e), checks.suggest_remedy(line, e))
        )
        fault = Fault(line=number, kind=kind, why=why, length_bytes=len(line), whole_records=len(inside))
        records, texts = [record for record, _ in inside], [text for _, text in inside]
        return _Line(kind, records, texts, fault, advice, checks.is_record_line(line), line.rstrip(b"\n") + b"\n")
    kind = SEALED if line.lstrip().startswith(checksums.HEAD) else UNSEALED
    return _Line(kind, [record], [line.strip(b"\r\n")])


def _drop_invalid_value(line: bytes, error: Exception) -> list[tuple[Record, bytes]]:
    """Return the record of a line that is refused for one value, without that value; none if its point cannot be."""
    mended = (
        acceptance.drop_invalid_values(line, decode_record) if isinstance(error, checks.ImpossibleValueError) else None
    )
    return [] if mended is None else [mended]


def _find_json_error(line: bytes) -> Exception | None:
    """Return the error if a line is not a single JSON value, as where damage joined two; else None."""
    try:
        msgspec.json.decode(line)
    except UNREADABLE as e:
        return e
    return None


def _find_inner_records(line: bytes) -> Iterator[tuple[Record, bytes]]:
    """Yield whole records inside a damaged line, with their bytes: sealed ones, and unsealed ones between them."""
    for text in _split_damaged_line(line):
        try:
            yield decode_record(text), text
        except UNREADABLE:
            continue


def _split_damaged_line(line: bytes) -> Iterator[bytes]:
    rest = line
    for sealed in checksums.find_sealed_parts(line):
        before, _, rest = rest.partition(sealed)
        yield from _scan_objects(before)
        yield sealed
    yield from _scan_objects(rest)


def _scan_objects(text: bytes) -> Iterator[bytes]:
    """Yield JSON objects in a text, and those inside an unfinished one. Stop after MAX_BROKEN_OBJECTS invalid ones."""
    chars = text.decode("latin-1")  # a character for each byte, so that places are the same
    end = broken = 0
    while broken < MAX_BROKEN_OBJECTS and (begun := _BEGIN.search(chars, end)):
        try:
            _, end = _VALUE.raw_decode(chars, begun.start())
        except RecursionError:
            return  # no record is nested this deeply, and deeper values would be tried from each of their levels
        except ValueError:
            end, broken = begun.end(), broken + 1
        else:
            yield text[begun.start() : end]


def _create_backup(path: Path) -> Path:
    """Copy the file durably to an unused name, and return the copy."""
    names = (path.with_name(f"{path.name}{BACKUP}{n}") for n in ("", *(f"-{n}" for n in range(2, 10_000))))
    for backup in names:
        try:
            with backup.open("xb") as out, path.open("rb") as f:
                shutil.copyfileobj(f, out)
                out.flush()
                os.fsync(out.fileno())
        except FileExistsError:
            continue
        return backup
    raise OutputError(f"{path.parent} holds 9,999 copies of {path.name} by earlier repairs; move them elsewhere.")


def _write_repaired_file(path: Path, *, strange: bool) -> int:
    """Put a file of all whole records in the place of the file, and return how many there are. Strange lines stay, or go."""
    kept = 0
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            for line in _iter_lines(path):
                texts = [line.whole.rstrip(b"\n")] if line.kind == STRANGE and not strange else line.texts
                for text in texts:
                    out.write(text + b"\n")
                    kept += 1
            out.flush()
            os.fsync(out.fileno())
        shutil.copymode(path, name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    return kept
