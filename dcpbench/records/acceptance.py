"""Convert a record to one that its reader accepts, before it is written. No torch.

Servers and clocks set many values of a record. An invalid value must cost neither the point nor the other records of
its file: it becomes null, or, if a metric depends on it, the point becomes a failed one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError
from dcpbench.records import checksums
from dcpbench.records.bounds_check import REFUSED, drop_refused_parts, get_record_type
from dcpbench.records.checks import MAX_ENTRIES, ImpossibleValueError
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import OmittedValue, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    Decode = Callable[[bytes], Record]

MEASURED = ("metrics", "serve")  # parts without which a point has no result
SEAL = ("checked", "crc32")  # fields that a checksum adds to a line
OMITTED_WARNING = "values_omitted"
NOT_WRITABLE = (OverflowError, UnicodeEncodeError)  # raised for integers beyond 64 bits and for lone surrogates


def prepare_record(record: Record, decode: Decode) -> tuple[Record, bytes]:
    """Return the record as its reader accepts it, and its line with a checksum.

    Raise UsageError for a point that no reader would accept, which `file.check_point` finds before anything is measured.
    """
    found = _encode_line(record, decode)
    if found is None:
        record = _remove_bad_numbers(record)
        found = _encode_line(record, decode)
    if found is None:
        record = _remove_problems(record, decode)
        found = _encode_line(record, decode)
    assert found is not None, record
    return record, found


def drop_invalid_values(line: bytes, decode: Decode) -> tuple[Record, bytes] | None:
    """Return the record that `prepare_record` makes of a refused line, and its line; None if its point is invalid."""
    data = msgspec.json.decode(line)
    omitted: list[OmittedValue] = []
    fields = drop_refused_parts(
        {name: value for name, value in data.items() if name not in SEAL}, get_record_type(), (), omitted
    )
    if any(one.field.startswith("point.") for one in omitted):
        return None
    try:
        before = msgspec.convert(fields, Record)
        lost = [part for part in MEASURED if data.get(part) is not None and getattr(before, part) is None]
        return prepare_record(_add_omitted(before, lost, omitted) if omitted else before, decode)
    except (msgspec.ValidationError, UsageError):
        return None


def _encode_line(record: Record, decode: Decode) -> bytes | None:
    """Return the line of a record, or None if its reader would refuse it or read something else."""
    try:
        line = checksums.add_checksum(msgspec.json.encode(record))
        return line if _has_same_values(decode(line), record) else None
    except (*UNREADABLE, *NOT_WRITABLE):
        return None


def _has_same_values(one: Record, other: Record) -> bool:
    """Return whether two records hold the same values. NaN and infinity, which JSON writes as null, make them differ."""
    return one == other or bool(msgspec.to_builtins(one) == msgspec.to_builtins(other))


def _remove_bad_numbers(record: Record) -> Record:
    omitted: list[OmittedValue] = []
    data = drop_refused_parts(msgspec.to_builtins(record), get_record_type(), (), omitted)
    if wrong := next((one for one in omitted if one.field.startswith("point.")), None):
        raise UsageError(f"{wrong}, which no record can hold; give another value.")
    assert data is not REFUSED, omitted
    try:
        found = msgspec.convert(data, Record)
    except msgspec.ValidationError as e:  # a value of another type, wherever it came from
        omitted.append(OmittedValue(field="record", what=f"cannot be read back: {e}"))
        found = Record(point=record.point, outcome="failed", reason=record.reason, advice=record.advice)
    return _add_omitted(found, _list_lost_parts(record, found), omitted) if omitted else found


def _remove_problems(record: Record, decode: Decode) -> Record:
    """Return the record without the values that `checks.find_problem` reports: surplus entries and impossible metrics."""
    found = record
    while True:
        try:
            decode(checksums.add_checksum(msgspec.json.encode(found)))
        except ImpossibleValueError as e:
            problem = e.problem
        else:
            return found
        part, _, name = problem.field.partition(".")
        value = getattr(found, part)
        changes: dict[str, Any]
        if part != "point" and (name or part in MEASURED):
            changes = {part: None}
        elif isinstance(value, dict):
            changes = {part: dict(list(value.items())[:MAX_ENTRIES])}
        elif isinstance(value, list):
            changes = {part: value[:MAX_ENTRIES]}
        else:  # a value that no record can lack
            raise UsageError(f"{problem}; give another value.")
        now = msgspec.structs.replace(found, **changes)
        found = _add_omitted(now, _list_lost_parts(found, now), [problem])


def _list_lost_parts(before: Record, now: Record) -> list[str]:
    """Return the names of the measured parts that the record has lost."""
    return [part for part in MEASURED if getattr(before, part) is not None and getattr(now, part) is None]


def _add_omitted(now: Record, lost: list[str], omitted: list[OmittedValue]) -> Record:
    """Return the record with `omitted` added; mark it as failed if it has lost a measured part."""
    warnings = now.warnings[: MAX_ENTRIES - 1]
    changes: dict[str, Any] = {"omitted": [*(now.omitted or []), *omitted][:MAX_ENTRIES]}
    changes["warnings"] = warnings if OMITTED_WARNING in warnings else [*warnings, OMITTED_WARNING]
    if lost:
        why = f"its result cannot be recorded: {'; '.join(map(str, omitted[:3]))}."
        changes |= {"outcome": "failed", "reason": f"{now.reason} {why}" if now.reason else why}
    return msgspec.structs.replace(now, **changes)
