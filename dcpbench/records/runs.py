"""Read one run for display or comparison: the last record of each point, without its rarely used parts.

Records are read line by line, and only the requested parts stay in memory: never the samples of steps, which are nearly
all of a long file, and no record that a later one of the same point replaced.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.records.file import BadLine, is_last_line_cut_short, iter_records, read_record_at, read_records
from dcpbench.records.folder import RECORDS_FILE, TRUNCATED_LINES_FILE, get_record_file, get_run_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.records.record import Record


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold the records of one folder."""

    name: str
    folder: Path  # folder of the run's other files
    records: list[Record]  # last record of each point and repeat, which replaces earlier ones, as after --resume
    replaced: int = 0  # records that a later one of the same point replaced
    truncated: bool = False  # true if the last line was incomplete and therefore not counted
    bad_lines: tuple[BadLine, ...] = ()  # lines that cannot be read; none unless `read_run` skips them
    path: Path | None = None  # file of the records; None if `records` is all there is
    places: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)  # offsets of lines by point key

    def load_with_samples(self, record: Record) -> Record:
        """Return one of these records with its step samples, read from the file again.

        Raise RecordsError if its line has changed.
        """
        if record.metrics is None or self.path is None:
            return record
        key = record.point.get_key()
        found = read_record_at(self.path, self.places[key])
        if found is None or compute_measurement_digest(found) != compute_measurement_digest(record):
            raise RecordsError(f"{self.path} was changed while it was read; repeat the command once its run has ended.")
        return found


def remove_samples(record: Record) -> Record:
    """Return the record without its step samples."""
    if record.metrics is None or not record.metrics.step_samples_ms:
        return record
    return msgspec.structs.replace(record, metrics=msgspec.structs.replace(record.metrics, step_samples_ms=[]))


def remove_detail(record: Record) -> Record:
    """Return the record without the details of a failure; its reason stays."""
    return msgspec.structs.replace(record, detail={}) if record.detail else record


def read_run(
    run: Path,
    name: str = "",
    *,
    keep: Callable[[Record], Record] = remove_detail,
    max_points: int | None = None,
    skip_bad_lines: bool = False,
) -> Run:
    """Return the run in a folder, or of a records.jsonl given directly; `name` replaces the path as the run's name.

    `keep` maps each record, without its samples, to the one that stays in memory. Lines that cannot be
    read are an error, or are listed in the run with `skip_bad_lines`, as long as any other line can be read. Raise
    RecordsError as `records.file.read_records` does, and for more than `max_points` points.
    """
    path = get_record_file(run)
    last: dict[str, Record] = {}
    offsets: dict[str, int] = {}
    bad: list[BadLine] | None = [] if skip_bad_lines else None
    read = 0
    for offset, record in iter_records(run, samples=False, bad=bad):
        kept = keep(remove_samples(record))
        key = kept.point.get_key()
        last[key], offsets[key] = kept, offset
        read += 1
        if max_points is not None and len(last) > max_points:
            raise RecordsError(
                f"{path} holds more than {max_points:,} points, the most that is read of one run; put its lines into "
                f"several folders, as with `split -l {max_points}`, and name one."
            )
    if bad and not read:
        read_records(run)  # raises the error of the first line
    folder = get_run_folder(run)
    return Run(
        name=name or str(run),
        folder=folder,
        records=list(last.values()),
        replaced=read - len(last),
        truncated=is_last_line_cut_short(run) or (folder / TRUNCATED_LINES_FILE).exists(),
        bad_lines=tuple(bad or ()),
        path=path,
        places=offsets,
    )


def read_last_records(folder: Path, name: str = RECORDS_FILE, *, bad: list[BadLine] | None = None) -> dict[str, Record]:
    """Return the last record of each point by its key; none where there is no such file.

    Lines that cannot be read are an error, or are added to `bad`.
    """
    path = folder / name
    if not path.exists():
        return {}
    found = iter_records(path, samples=False, bad=bad)
    return {record.point.get_key(): remove_detail(remove_samples(record)) for _, record in found}


def compute_measurement_digest(record: Record) -> bytes:
    """Return a digest of point, time and every figure but the samples; it is the same only for copies of a measurement."""
    point = msgspec.structs.replace(record.point, repeat=0)
    figures = remove_samples(record).metrics or record.serve
    return hashlib.sha256(msgspec.json.encode((point, record.started_at, figures))).digest()
