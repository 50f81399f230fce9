"""Read the SQLite export of nsys: `nsys export --type sqlite`."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from dcpbench.errors import TraceError
from dcpbench.syncs.nsys import schema
from dcpbench.syncs.nsys.schema import ABSENT, BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dcpbench.syncs.nsys.schema import Block, Ints
    from dcpbench.syncs.traces.reading import ReadProblems

MAGIC = b"SQLite format 3\0"
AGAIN = "export it again with `nsys export --type sqlite`"
_AT_ONCE = 500  # strings that one query asks for
_HEADER_BYTES = 100
_FETCHED_ROWS = 1 << 11


_PACKED: dict[str, tuple[tuple[tuple[str, int], ...], ...]] = {
    schema.CALLS: ((("eventClass", 8), ("nameId", 22), ("correlationId", 32)),),
    schema.KERNELS: (
        (("end", 40), ("streamId", 22)),
        (("deviceId", 6), ("demangledName", 24), ("correlationId", 32)),
    ),
    schema.RANGES: ((("eventType", 8), ("domainId", 22), ("textId", 32)),),
}
"""Columns of the largest tables that are fetched as one number each, with their bits; `end` as the time since the start.

Fetching a number from SQLite takes most of the time of a scan.
"""


class _NotPackedError(Exception):
    """End a query of packed columns at a row with other numbers."""


class SqliteExport:
    """Give the tables of an SQLite export. The file is not changed, and no other file is made."""

    def __init__(self, path: Path, problems: ReadProblems) -> None:
        self.path, self.problems = path, problems
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES:
            raise TraceError(f"{path} ends within its first {_HEADER_BYTES} bytes: {AGAIN}")
        for suffix in ("-journal", "-wal"):
            rest = path.with_name(path.name + suffix)
            with contextlib.suppress(OSError):
                if rest.stat().st_size:
                    problems.lost.append(
                        f"was not written to its end, as {rest.name} in the same folder shows: {AGAIN}"
                    )
        self._db = _connect(path)
        try:
            self.tables = _read_table_names(self._db)
        except sqlite3.Error as e:
            self.close()
            raise TraceError(f"{path} is an SQLite database that is damaged or ends early ({e}): {AGAIN}") from None

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def read_blocks(self, table: str, texts: Sequence[str] = ()) -> Iterator[Block]:
        """Yield the rows of a table, its COLUMNS and columns of texts or bytes; nothing if it is not there."""
        if table not in self.tables:
            return
        try:
            self._check(table)
            yield from self._read_rows(table, schema.COLUMNS[table], texts)
        except sqlite3.Error as e:
            self.problems.lost.append(f"has a table {table} that cannot be read to its end ({e}): {AGAIN}")

    def _check(self, table: str) -> None:
        """Note damage to the structure of a table; pages that were lost would otherwise be rows that never were."""
        (found,) = self._db.execute(f"PRAGMA quick_check('{table}')").fetchone()
        if found != b"ok":
            what = " ".join(found.decode("utf-8", "replace").split())
            self.problems.lost.append(f"has a damaged table {table} ({what}): {AGAIN}")

    def _read_rows(self, table: str, ints: Sequence[str], texts: Sequence[str]) -> Iterator[Block]:
        """Yield the rows, small columns packed into one where the numbers allow it."""
        there = {name.decode("utf-8", "replace") for _, name, *_ in self._db.execute(f"PRAGMA table_info('{table}')")}
        if schema.CHAINS not in self.tables:
            there.discard("callchainId")
        groups, done = _PACKED.get(table, ()), 0
        if groups and {name for group in groups for name, _ in group} | {"start", *texts} <= there:
            with contextlib.suppress(_NotPackedError):
                for block in self._query_packed(table, [name for name in ints if name in there], texts, groups):
                    count = len(block["start"])
                    done += count
                    yield {name: block[name] if name in block else np.full(count, ABSENT) for name in (*ints, *texts)}
                return
        yield from self._query(table, ints, texts, there, done)

    def _query_packed(
        self, table: str, ints: Sequence[str], texts: Sequence[str], groups: Sequence[Sequence[tuple[str, int]]]
    ) -> Iterator[Block]:
        packed = [name for group in groups for name, _ in group]
        plain = [name for name in ints if name not in packed]
        columns = [f'ifnull("{name}", {ABSENT})' for name in plain]
        columns += [_format_group(group) for group in groups]
        columns += [f'"{name}"' for name in texts]
        cursor = self._db.execute(f'SELECT {", ".join(columns)} FROM "{table}"')  # noqa: S608 -- names of ours
        numbers = [f"group {i}" for i in range(len(groups))]
        row_type = np.dtype(
            [*((name, np.int64) for name in (*plain, *numbers)), *((name, np.object_) for name in texts)]
        )
        while parts := _fetch_block(cursor, row_type):
            block = np.concatenate(parts)
            found: Block = {name: block[name] for name in plain} | {name: block[name].tolist() for name in texts}
            for number, group in zip(numbers, groups, strict=True):
                found |= _unpack(block[number], group)
            if "end" in packed:
                found["end"] = np.where(found["end"] == ABSENT, ABSENT, found["start"] + found["end"])
            yield found

    def _query(
        self, table: str, ints: Sequence[str], texts: Sequence[str], there: set[str], skipped: int
    ) -> Iterator[Block]:
        columns = [f'"{name}"' if name in there else "NULL" for name in (*ints, *texts)]
        query = f'SELECT {", ".join(columns)} FROM "{table}" LIMIT -1 OFFSET {skipped}'  # noqa: S608 -- names of ours
        cursor = self._db.execute(query)
        while rows := cursor.fetchmany(BLOCK_ROWS):
            values = list(zip(*rows, strict=True))
            yield {**self._make_ints(ints, values), **dict(zip(texts, map(list, values[len(ints) :]), strict=True))}

    def _make_ints(self, names: Sequence[str], columns: Sequence[Sequence[object]]) -> Block:
        block: Block = {}
        for name, values in zip(names, columns, strict=False):
            block[name], odd = schema.make_ints(values)
            self.problems.unreadable_events += odd
        return block

    def read_strings(self, ids: Ints) -> dict[int, str]:
        """Return the strings with these ids, as far as they are there."""
        found: dict[int, str] = {}
        wanted = [int(i) for i in ids.tolist() if i != ABSENT]
        if schema.STRINGS not in self.tables:
            return found
        try:
            for first in range(0, len(wanted), _AT_ONCE):
                some = wanted[first : first + _AT_ONCE]
                marks = ",".join("?" * len(some))
                query = f"SELECT id, value FROM {schema.STRINGS} WHERE id IN ({marks})"  # noqa: S608 -- marks alone
                found |= {i: text.decode("utf-8", "replace") for i, text in self._db.execute(query, some) if text}
        except sqlite3.Error as e:
            self.problems.lost.append(f"has strings that cannot be read ({e}): {AGAIN}")
        return found


def _fetch_block(cursor: sqlite3.Cursor, row_type: np.dtype[Any]) -> list[NDArray[Any]]:
    """Return the next rows in small parts: tuples are the faster to make and to convert the fewer of them there are at once."""
    parts: list[NDArray[Any]] = []
    try:
        while len(parts) < BLOCK_ROWS // _FETCHED_ROWS and (rows := cursor.fetchmany(_FETCHED_ROWS)):
            parts.append(np.array(rows, row_type))
    except (TypeError, ValueError, OverflowError):
        raise _NotPackedError from None
    return parts


def _format_group(group: Sequence[tuple[str, int]]) -> str:
    """Return the expression of one number for several columns, NULL where one of them does not fit; all bits are none."""
    shift, parts, within = 0, [], []
    for name, bits in group:
        column = '"end" - "start"' if name == "end" else f'"{name}"'
        value, most = f"ifnull({column}, {(1 << bits) - 1})", (1 << bits) - 1
        parts.append(f"({value} << {shift})")
        within.append(f"{value} BETWEEN 0 AND {most}")
        shift += bits
    return f"CASE WHEN {' AND '.join(within)} THEN {' | '.join(parts)} END"


def _unpack(numbers: Ints, group: Sequence[tuple[str, int]]) -> Block:
    found: Block = {}
    shift = 0
    for name, bits in group:
        most = (1 << bits) - 1
        values = numbers >> shift & most
        found[name] = np.where(values == most, ABSENT, values)
        shift += bits
    return found


def find_tables(path: Path) -> set[str] | None:
    """Return the names of the tables of an SQLite database; None if it cannot be read."""
    try:
        with contextlib.closing(_connect(path)) as db:
            return _read_table_names(db)
    except sqlite3.Error:
        return None


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database so that no file is changed or made; its texts are bytes."""
    db = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
    db.text_factory = bytes
    return db


def _read_table_names(db: sqlite3.Connection) -> set[str]:
    rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {name.decode("utf-8", "replace") for (name,) in rows}
