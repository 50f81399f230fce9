"""Check that the values of a record are possible, and advise on lines that cannot be read.

msgspec checks types and the bounds of single numbers. Reports divide by these numbers, order them and draw them, so an
impossible value is refused by name before it does harm far from its origin.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.layout import DEGREES, MAX_RANKS, OUTER_DEGREES
from dcpbench.records import checksums
from dcpbench.records.bounds_check import drop_refused_parts, get_record_type
from dcpbench.records.metrics import METRICS
from dcpbench.records.record import Interval, OmittedValue, get_origin, is_imported_origin

if TYPE_CHECKING:
    from collections.abc import Sized
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

MAX_ENTRIES = 4096  # phases, warnings, sites, candidates and settings of one record
WITHOUT_SUM = (
    "take the checksums out, in its folder: "
    "jq -c 'del(.checked, .crc32)' records.jsonl > new.jsonl && mv new.jsonl records.jsonl"
)
POSITIVE = tuple(metric for metric in METRICS if metric.positive)
UNKNOWN_OPTION = re.compile(r"unknown field `(.*)` - at `\$\.point(\.load)?`$")
"""Message of msgspec for a point that has a field unknown to this version."""
OUTCOMES = ("ok", "failed", "hung", "rejected")
NOT_RUN = "rejected"


class ImpossibleValueError(msgspec.ValidationError):
    """Report a value that cannot have been measured."""

    def __init__(self, problem: OmittedValue) -> None:
        super().__init__(str(problem))
        self.problem = problem


class OtherVersionError(msgspec.ValidationError):
    """Report a record of another version."""


def find_problem(record: Record) -> OmittedValue | None:
    """Return the first thing in a decoded record that cannot be, beyond the bounds of single numbers."""
    found = (check(record) for check in (_check_outcome, _check_layout, _check_metrics, _check_entry_counts))
    return next((problem for problem in found if problem is not None), None)


def find_bad_number(line: bytes) -> OmittedValue | None:
    """Return the first number of a line that is outside of the bounds of its field."""
    found: list[OmittedValue] = []
    drop_refused_parts(msgspec.json.decode(line), get_record_type(), (), found)
    return found[0] if found else None


def explain_bad_line(line: bytes, error: Exception) -> str:
    """Return the problem with a line that cannot be read, and the remedy."""
    return f"{describe_bad_line(line, error)}. {suggest_remedy(line, error)}"


def describe_bad_line(line: bytes, error: Exception) -> str:
    """Return the problem with a line alone, without a full stop."""
    if isinstance(error, OtherVersionError):
        return str(error)
    if not line.lstrip().startswith(b"{"):
        return "it is no record, as it is not a JSON object"
    if option := UNKNOWN_OPTION.search(str(error)):
        return f"its point has the option `{option[1][:80]}`, which this version of dcpbench does not know"
    return "its brackets are nested too deep" if isinstance(error, RecursionError) else str(error)[:300]


def suggest_remedy(line: bytes, error: Exception) -> str:
    """Return the remedy for a line that cannot be read; it is the same for all lines of its kind."""
    if isinstance(error, OtherVersionError):
        return "Not written by this version of dcpbench: read it with the version that wrote it."
    if not line.lstrip().startswith(b"{"):
        return (
            "Name a run's folder, or its records.jsonl. If it is one, remove the line, and measure its point again "
            "with --resume."
        )
    if isinstance(error, checksums.RewrittenError):
        return f"To read such lines, {WITHOUT_SUM}."
    if isinstance(error, checksums.DamageError | checksums.UnfinishedError):
        return (
            "Put a copy of the file in its place, or remove the line, and measure its point again with --resume. Where "
            f"it was changed on purpose, {WITHOUT_SUM}."
        )
    if UNKNOWN_OPTION.search(str(error)):
        return "Read it with a version that does, or remove the line."
    if not isinstance(error, msgspec.ValidationError):
        return "The line is damaged: remove the line, and measure its point again with --resume."
    return "Not written by this version of dcpbench; remove the line, and measure its point again."


def is_record_line(line: bytes) -> bool:
    """Return True if a line that cannot be read was once a record, or is a record of another version."""
    return b'"schema_version"' in line


def is_strange(error: Exception) -> bool:
    """Return True if a line is intact JSON with a record that this version does not read."""
    if isinstance(error, checksums.RewrittenError):
        return True
    return isinstance(error, msgspec.ValidationError) and not isinstance(error, checksums.DamageError)


def format_repair_command(path: Path, *, strange: bool) -> str:
    """Return the command that removes the unreadable lines from a file of records."""
    return shlex.join(["dcpbench", "records", "repair", *(["--strange"] if strange else []), str(path)])


def suggest_repair_command(path: Path, error: Exception) -> str:
    """Return the command that removes a line; empty if another version, or a change of the file, can read it."""
    if isinstance(error, OtherVersionError | checksums.RewrittenError):
        return ""
    return format_repair_command(path, strange=is_strange(error))


def _check_outcome(record: Record) -> OmittedValue | None:
    if record.outcome in OUTCOMES:
        return None
    return OmittedValue(field="outcome", what=f"is {record.outcome[:40]!r}, none of {', '.join(OUTCOMES)}")


def _check_layout(record: Record) -> OmittedValue | None:
    """Check that the parallel degrees nest. An import may have none, and a rejected point has the requested ones."""
    tp, dp, dcp = degrees = record.point.tp, record.point.dp, record.point.dcp
    if record.outcome == NOT_RUN or not any(degrees):
        return None
    for name, degree in zip(DEGREES, degrees, strict=True):
        if not 1 <= degree <= MAX_RANKS:
            return OmittedValue(field=f"point.{name}", what=f"is {degree}, which no layout that ran has")
    if tp % dp:
        return OmittedValue(field="point.dp", what=f"{dp} does not divide tp {tp}, so that it cannot have run")
    if outer := _check_outer_degrees(record.point):
        return outer
    ranks = tp // dp * record.point.pcp  # DCP can span PCP ranks
    if ranks % dcp:
        of = "tp / dp" if record.point.pcp == 1 else "tp · pcp / dp"
        return OmittedValue(field="point.dcp", what=f"{dcp} does not divide {of} = {ranks}, so that it cannot have run")
    return _check_instances(record)


def _check_outer_degrees(point: Point) -> OmittedValue | None:
    """Check the degrees that multiply the GPUs of an imported server."""
    for name in OUTER_DEGREES:
        if not 1 <= getattr(point, name) <= MAX_RANKS:
            return OmittedValue(field=f"point.{name}", what=f"is {getattr(point, name)}, which no layout that ran has")
    return None


def _check_instances(record: Record) -> OmittedValue | None:
    """Check the number of instances and the speed of their links, which is unknown for an imported result."""
    point = record.point
    try:
        split = point.instances.disaggregated
    except UsageError:
        return OmittedValue(
            field="point.disaggregate", what=f"is {point.disaggregate[:40]!r}, which no instances that ran are"
        )
    if split and not point.transfer_gb_s > 0 and not is_imported_origin(get_origin(record)):
        return OmittedValue(
            field="point.transfer_gb_s", what=f"is {point.transfer_gb_s:g}, at which no KV can have crossed"
        )
    return None


def _check_metrics(record: Record) -> OmittedValue | None:
    """Check that metrics are above 0 and that intervals hold their medians."""
    for metric in POSITIVE:
        found = metric.get_recorded(record)
        if found is None:
            continue
        name = f"{'serve' if record.serve else 'metrics'}.{metric.name}"
        if not isinstance(found, Interval):
            if not found > 0:
                return OmittedValue(field=name, what=f"is {found:g}, not above 0")
        elif not 0 < found.low <= found.median <= found.high:
            order = f"0 < low {found.low:g} ≤ median {found.median:g} ≤ high {found.high:g}"
            return OmittedValue(field=name, what=f"is not in order: {order} does not hold")
    return None


def _check_entry_counts(record: Record) -> OmittedValue | None:
    many: dict[str, Sized] = {
        "warnings": record.warnings,
        "sync_sites": record.sync_sites,
        "detail": record.detail,
        "phases.phase_us": record.phases.phase_us if record.phases else (),
        "floor.phase_floor_us": record.floor.phase_floor_us if record.floor else (),
        "choice.candidates": record.choice.candidates if record.choice else (),
    }
    over = next((name for name, found in many.items() if len(found) > MAX_ENTRIES), None)
    if over is None:
        return None
    return OmittedValue(field=over, what=f"has {len(many[over]):,} entries, more than {MAX_ENTRIES:,}")
