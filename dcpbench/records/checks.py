"""Whether what a line of records says can have been measured. Types are checked by msgspec; this checks the values.

Reports divide by these numbers, order them and draw them; one that cannot be is refused with its name, before it does
harm far from where it came from.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.layout import DEGREES, MOST_RANKS
from dcpbench.records import checksums
from dcpbench.records.metrics import METRICS
from dcpbench.records.record import Interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized
    from pathlib import Path

    from dcpbench.records.record import Record

LARGEST = 1e15
"""No number of a record is larger but a GPU's rates: a petabyte, or 31,000 years in ms."""
LARGEST_RATE = 1e18
"""Operations in a second, of hundreds of today's fastest GPUs."""
MOST_ENTRIES = 4096
"""Phases, marks, sites, candidates and settings of one record."""
UNUSUAL_NUMBER = re.compile(rb"[:,\[]\s*(?:-|[0-9][0-9.]*[eE]\+?[0-9]{2}|[0-9]{16})")
"""Where a line may hold a number below 0 or a large one: only such lines are walked number by number."""
SIGNED = ("phases.idle_us", "phases.idle_fraction", "serve.idle_fraction")
"""What is left between two measured times, which rounding brings below 0."""
SETTINGS = "measured_with."
"""Options as they were typed, no measurements."""
WITHOUT_SUM = (
    "take the checksums out, in its folder: "
    "jq -c 'del(.checked, .crc32)' records.jsonl > new.jsonl && mv new.jsonl records.jsonl"
)
POSITIVE = tuple(metric for metric in METRICS if metric.positive)
UNKNOWN_OPTION = re.compile(r"unknown field `(.*)` - at `\$\.point(\.load)?`$")
"""What msgspec says of a point that has more fields than this version."""
OUTCOMES = ("ok", "failed", "hung", "rejected")
NOT_RUN = "rejected"


def problem(record: Record, line: bytes) -> str:
    """What of a record cannot be, by the name of its field; empty where all can."""
    if _may_be_unusual(record, line) and (found := _unusual(msgspec.json.decode(line), "")):
        return found
    return _first((_outcome(record), _layout(record), _metrics(record), _entries(record)))


class OtherVersionError(msgspec.ValidationError):
    """A record of another version, whatever else is in it."""


def why(line: bytes, error: Exception) -> str:
    """What is wrong with a line that cannot be read, and what to do about it."""
    return f"{wrong(line, error)}. {advice(line, error)}"


def wrong(line: bytes, error: Exception) -> str:
    """What is wrong with it alone, without a full stop."""
    if isinstance(error, OtherVersionError):
        return str(error)
    if not line.lstrip().startswith(b"{"):
        return "it is no record, as it is no JSON object"
    if option := UNKNOWN_OPTION.search(str(error)):
        return f"its point has the option `{option[1][:80]}`, which this version of dcpbench does not know"
    return "its brackets are nested too deep" if isinstance(error, RecursionError) else str(error)[:300]


def advice(line: bytes, error: Exception) -> str:
    """What to do about it, the same for all lines of its kind."""
    if isinstance(error, OtherVersionError):
        return "Not written by this version of dcpbench: read it with the version that wrote it."
    if not line.lstrip().startswith(b"{"):
        return (
            "Name a run's folder, or its records.jsonl. Where it is one, take the line out, and measure its point again "
            "with --resume."
        )
    if isinstance(error, checksums.RewrittenError):
        return f"To read such lines, {WITHOUT_SUM}."
    if isinstance(error, checksums.DamageError | checksums.UnfinishedError):
        return (
            "Put a copy of the file in its place, or take the line out, and measure its point again with --resume. Where "
            f"it was changed on purpose, {WITHOUT_SUM}."
        )
    if UNKNOWN_OPTION.search(str(error)):
        return "Read it with a version that does, or take the line out."
    if not isinstance(error, msgspec.ValidationError):
        return "Some of it was damaged: take the line out, and measure its point again with --resume."
    return "Not written by this version of dcpbench; take the line out, and measure its point again."


def of_a_record(line: bytes) -> bool:
    """Whether a line that cannot be read was a record once, or is one of another version."""
    return b'"schema_version"' in line


def is_strange(error: Exception) -> bool:
    """Whether a line is JSON as it was written, by someone whose records this version does not read."""
    if isinstance(error, checksums.RewrittenError):
        return True
    return isinstance(error, msgspec.ValidationError) and not isinstance(error, checksums.DamageError)


def repair_command(path: Path, *, strange: bool) -> str:
    """What to type so that a file of records is without the lines that cannot be read."""
    return shlex.join(["dcpbench", "records", "repair", *(["--strange"] if strange else []), str(path)])


def how_to_mend(path: Path, error: Exception) -> str:
    """A sentence behind why a line cannot be read; none where another version, or a change of the file, reads it."""
    if isinstance(error, OtherVersionError | checksums.RewrittenError):
        return ""
    return f" To take it out, and keep a copy of the file: {repair_command(path, strange=is_strange(error))}"


def _outcome(record: Record) -> str:
    if record.outcome in OUTCOMES:
        return ""
    return f"outcome is {record.outcome[:40]!r}, none of {', '.join(OUTCOMES)}"


def _may_be_unusual(record: Record, line: bytes) -> bool:
    """Whether a number of the line may be below 0 or too large.

    Step samples, nearly all of a long line, are compared as numbers: the search would take ten times as long as
    everything else that reads the line.
    """
    samples = record.metrics.step_samples_ms if record.metrics else []
    if not samples:
        return bool(UNUSUAL_NUMBER.search(line))
    before, _, rest = line.partition(b'"step_samples_ms":[')  # only a key of that name can look like this
    after = rest[rest.find(b"]") :]
    return min(samples) < 0 or max(samples) > LARGEST or any(map(UNUSUAL_NUMBER.search, (before, after)))


def _layout(record: Record) -> str:
    """Degrees that nest, or of an import none at all; a point that was rejected has those that were asked for."""
    tp, dp, dcp = degrees = record.point.tp, record.point.dp, record.point.dcp
    if record.outcome == NOT_RUN or not any(degrees):
        return ""
    for name, degree in zip(DEGREES, degrees, strict=True):
        if not 1 <= degree <= MOST_RANKS:
            return f"point.{name} is {degree}, which no layout that ran has"
    if tp % dp:
        return f"point.dp {dp} does not divide tp {tp}, so that it cannot have run"
    try:
        split = record.point.instances.disaggregated
    except UsageError:
        return f"point.disaggregate is {record.point.disaggregate[:40]!r}, which no instances that ran are"
    if split and not 0 < record.point.transfer_gb_s <= LARGEST:
        return f"point.transfer_gb_s is {record.point.transfer_gb_s:g}, at which no KV can have crossed"
    if tp // dp % dcp:
        return f"point.dcp {dcp} does not divide tp / dp = {tp // dp}, so that it cannot have run"
    return ""


def _metrics(record: Record) -> str:
    """Metrics above 0, whose intervals hold their medians."""
    said = ""
    for metric in POSITIVE:
        found, name = metric.held(record), f"{'serve' if record.serve else 'metrics'}.{metric.name}"
        if not isinstance(found, Interval):
            said = _positive(name, found)
        elif not 0 < found.low <= found.median <= found.high:
            said = f"{name}: 0 < low {found.low:g} ≤ median {found.median:g} ≤ high {found.high:g} does not hold"
        if said:
            return said
    samples = record.metrics.step_samples_ms if record.metrics else []
    return _positive("metrics.step_samples_ms", min(samples, default=None))


def _entries(record: Record) -> str:
    many: dict[str, Sized] = {
        "marks": record.marks,
        "sync_sites": record.sync_sites,
        "detail": record.detail,
        "phases.phase_us": record.phases.phase_us if record.phases else (),
        "floor.phase_floor_us": record.floor.phase_floor_us if record.floor else (),
        "choice.candidates": record.choice.candidates if record.choice else (),
    }
    over = [name for name, found in many.items() if len(found) > MOST_ENTRIES]
    return f"{over[0]} has {len(many[over[0]]):,} entries, more than {MOST_ENTRIES:,}" if over else ""


def _positive(name: str, value: float | None) -> str:
    return f"{name} is {value:g}, not above 0" if value is not None and not value > 0 else ""


def _first(found: Iterable[str]) -> str:
    return next((text for text in found if text), "")


def _unusual(value: object, name: str) -> str:
    if isinstance(value, dict):
        return _first(_unusual(v, f"{name}.{k}".lstrip(".")[:80]) for k, v in value.items())
    if isinstance(value, list):
        return _first(_unusual(v, name) for v in value)
    if not isinstance(value, int | float):
        return ""
    largest = LARGEST_RATE if name.startswith("rates.") else LARGEST
    if abs(value) > largest:
        return f"{name} is above {largest:g}"
    if value < 0 and name not in SIGNED and not name.startswith(SETTINGS):
        return f"{name} is {value:g}, below 0"
    return ""
