"""One run as those who show or compare it read it: the last record of each point, without what few of them need.

Records are read line by line, and of each only what is asked for stays in memory: never a step's samples, which are nearly
all of a long file, and no record that a later one of the same point replaced.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.records.file import BadLine, cut_short, placed_records, read_records, record_at
from dcpbench.records.folder import ASIDE_FILE, RECORDS_FILE, record_file, run_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.records.record import Record


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of one folder."""

    name: str
    folder: Path
    """Where its other files lie."""
    records: list[Record]
    """The last record of each point, its repeats apart: a later one replaces what --resume measured again."""
    replaced: int = 0
    """Records that a later one of the same point replaced."""
    truncated: bool = False
    """Whether a last line was cut short, and so is not counted."""
    bad_lines: tuple[BadLine, ...] = ()
    """Lines that cannot be read, and so are not counted; always empty where `read_run` was not told to go on."""
    path: Path | None = None
    """Of the file that the records were read from; None: they are all there is."""
    places: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)
    """Where the line of each record begins in it, by the point's key."""

    def whole(self, record: Record) -> Record:
        """One of these records with its step samples, read anew.

        Raises RecordsError where its line is not what it was.
        """
        if record.metrics is None or self.path is None:
            return record
        key = record.point.key()
        found = record_at(self.path, self.places[key])
        if found is None or measurement(found) != measurement(record):
            raise RecordsError(f"{self.path} was changed while it was read; repeat the command once its run has ended.")
        return found


def without_samples(record: Record) -> Record:
    """The record without its step samples."""
    if record.metrics is None or not record.metrics.step_samples_ms:
        return record
    return msgspec.structs.replace(record, metrics=msgspec.structs.replace(record.metrics, step_samples_ms=[]))


def without_detail(record: Record) -> Record:
    """The record without what is known of a failure beside its reason."""
    return msgspec.structs.replace(record, detail={}) if record.detail else record


def read_run(
    run: Path,
    name: str = "",
    *,
    keep: Callable[[Record], Record] = without_detail,
    most: int | None = None,
    skip_bad_lines: bool = False,
) -> Run:
    """Return the run in a folder, or of a records.jsonl given directly; `name` instead of the path as it was given.

    `keep` makes of each record, which has no samples any more, what stays in memory. Lines that cannot be read are an error,
    or with `skip_bad_lines` listed in the run, as long as any other can be read. Raises RecordsError as
    `records.file.read_records` does, and for more than `most` points.
    """
    path = record_file(run)
    last: dict[str, Record] = {}
    places: dict[str, int] = {}
    bad: list[BadLine] | None = [] if skip_bad_lines else None
    read = 0
    for place, record in placed_records(run, samples=False, bad=bad):
        kept = keep(without_samples(record))
        key = kept.point.key()
        last[key], places[key] = kept, place
        read += 1
        if most is not None and len(last) > most:
            raise RecordsError(
                f"{path} holds more than {most:,} points, the most that is read of one run; put its lines into "
                f"several folders, as with `split -l {most}`, and name one."
            )
    if bad and not read:
        read_records(run)  # raises the error of the first line
    folder = run_folder(run)
    return Run(
        name=name or str(run),
        folder=folder,
        records=list(last.values()),
        replaced=read - len(last),
        truncated=cut_short(run) or (folder / ASIDE_FILE).exists(),
        bad_lines=tuple(bad or ()),
        path=path,
        places=places,
    )


def last_records(folder: Path, name: str = RECORDS_FILE, *, bad: list[BadLine] | None = None) -> dict[str, Record]:
    """Return the last record of each point by its key; none where there is no such file.

    Lines that cannot be read are an error, or are added to `bad`.
    """
    path = folder / name
    if not path.exists():
        return {}
    found = placed_records(path, samples=False, bad=bad)
    return {record.point.key(): without_detail(without_samples(record)) for _, record in found}


def measurement(record: Record) -> bytes:
    """The same for a measurement and its copies alone: what was measured, when, and every figure but the samples."""
    point = msgspec.structs.replace(record.point, repeat=0)
    figures = without_samples(record).metrics or record.serve
    return hashlib.sha256(msgspec.json.encode((point, record.started_at, figures))).digest()
