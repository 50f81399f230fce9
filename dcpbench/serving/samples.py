"""Read and write the Parquet file of a `serve` record: one row per request, with the fields of outcome.Row.

pyarrow is imported when a file is written or read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.redaction import redact
from dcpbench.records.disks import make_write_error
from dcpbench.serving.outcome import Row
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point

SAMPLES_VERSION = 2  # files of version 1 have no checksum, and else are the same
FOLDER = "samples"  # below the run's folder
VERSION_KEY, POINT_KEY, SUM_KEY = b"dcpbench.samples_version", b"dcpbench.point", b"dcpbench.crc32"
"""Keys of the file's metadata; the checksum covers the rows and the point."""
MAX_INT = 2**31 - 1  # of a column
TIMES = "token_s.list.element"  # path of the column with the times of tokens
ENCODING = {"compression": "zstd", "compression_level": 15, "use_dictionary": False, "use_byte_stream_split": [TIMES]}
"""Options of pyarrow's write_table: a dictionary of times, which all differ, makes a file 1.6 times as large."""
SELDOM = ("chunk_tokens", "session", "turn", "instance", "prefilled_by", "kv_sent_s", "kv_arrived_s")
"""Columns that are written only if a row has a value in them."""
AGAIN = "repeat the sweep of this run"


def make_samples_name(point: Point) -> str:
    """Return the file's path below the run's folder: `samples/kimi-k2-tp4-dcp4-live-0123456789ab.parquet`.

    It is the same for the same point; those of others differ in the hash of the point's key and repeat.
    """
    mode = point.load.mode if point.load else point.workload
    words = re.sub(r"[^A-Za-z0-9]+", "-", f"{point.model}-{point.layout_name}-{mode}").strip("-")
    return f"{FOLDER}/{words[:60]}-{hashlib.sha256(point.get_key().encode()).hexdigest()[:12]}.parquet"


def find_samples(folder: Path, name: str) -> Path | None:
    """Return the file of samples that a record of the run in `folder` names; None if it does not exist.

    Raise RecordsError for a file outside the folder.
    """
    if not name:
        return None
    path = folder / name
    try:
        inside, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return None
    if not inside:
        raise RecordsError(f"{folder}: a record names samples outside its folder; that was not written by dcpbench.")
    return path if there else None


def write_samples(folder: Path, point: Point, rows: Sequence[Row]) -> str:
    """Write the rows of a point below a run's `folder`, and return the file's place there, for the record.

    A file of the same point is replaced, and only by a whole one. Raises UsageError for a count beyond 32 bits, and
    OutputError or DiskError if the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dataclasses.replace(row, reason=redact(row.reason)) if row.reason else row for row in rows]
    left_out = [name for name in SELDOM if not any(getattr(row, name) not in (None, []) for row in rows)]
    key, schema = point.get_key(), _make_schema(pa, left_out)
    try:
        table = pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema=schema)
    except (OverflowError, pa.ArrowInvalid) as e:
        raise UsageError(_find_overflow(rows) or f"samples cannot hold what came of its requests: {e}") from e
    file_metadata = {
        VERSION_KEY: str(SAMPLES_VERSION),
        POINT_KEY: key,
        SUM_KEY: _compute_checksum(table.to_pylist(), key),
    }
    table = table.replace_schema_metadata(file_metadata)
    name = make_samples_name(point)
    path, whole = folder / name, pa.BufferOutputStream()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, whole, **ENCODING)
        write_file(path, whole.getvalue().to_pybytes())
    except OSError as e:
        raise make_write_error(path, e, run=folder) from e
    return name


def _find_overflow(rows: Sequence[Row]) -> str:
    """Return a sentence about the first count that exceeds the columns' range, or an empty string."""
    for row in rows:
        for name, value in dataclasses.asdict(row).items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and abs(number) > MAX_INT:
                    return f"{name} of request {row.number} is {min(number, 10**300):.3g}, which no server can have counted."
    return ""


def read_samples(path: Path) -> list[Row]:
    """Return the rows of a file. Raise RecordsError for a missing or damaged file, and for one of another version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        file_metadata = {name: value.decode() for name, value in (table.schema.metadata or {}).items()}
        version = file_metadata.get(VERSION_KEY, "none")
        if version != str(SAMPLES_VERSION):
            raise RecordsError(f"{path} holds samples of version {version}, and this dcpbench reads {SAMPLES_VERSION}.")
        found = table.to_pylist()
        rows = [Row(**row) for row in found]
        as_written = file_metadata.get(SUM_KEY) == _compute_checksum(found, file_metadata.get(POINT_KEY, ""))
    except (OSError, pa.ArrowException, ValueError, TypeError, OverflowError, MemoryError) as e:
        raise RecordsError(f"{path} cannot be read as samples of requests: {str(e)[:300]}; {AGAIN}.") from e
    if not as_written:
        raise RecordsError(f"{path}: its checksum (crc32) is not that of its samples: some were damaged; {AGAIN}.")
    return rows


def _compute_checksum(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Return the CRC-32 of the point's key and of the rows as JSON, in eight hex digits."""
    return f"{zlib.crc32(msgspec.json.encode(rows), zlib.crc32(key.encode())):08x}"


def _make_schema(pa: Any, left_out: Collection[str]) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the schema with the fields of outcome.Row, except the omitted ones; fields that may be None are nullable."""
    kinds = {"int": pa.int32(), "float": pa.float64(), "str": pa.string()}
    kinds |= {f"list[{name}]": pa.list_(kinds[name]) for name in ("int", "float")}
    typed = [(f.name, *str(f.type).partition(" | None")) for f in dataclasses.fields(Row) if f.name not in left_out]
    return pa.schema([pa.field(name, kinds[kind], nullable=bool(optional)) for name, kind, optional, _ in typed])
