"""Read the SQLite export of nsys: `nsys export --type sqlite`."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import quote

from dcpbench.errors import TraceError
from dcpbench.syncs.nsys import schema
from dcpbench.syncs.nsys.schema import ABSENT, BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dcpbench.syncs.nsys.schema import Block, Ints
    from dcpbench.syncs.traces.reading import ReadProblems

MAGIC = b"SQLite format 3\0"
AGAIN = "export it again with `nsys export --type sqlite`"
_AT_ONCE = 500  # strings that one query asks for
_HEADER_BYTES = 100


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
        there = {name.decode("utf-8", "replace") for _, name, *_ in self._db.execute(f"PRAGMA table_info('{table}')")}
        if schema.CHAINS not in self.tables:
            there.discard("callchainId")
        columns = [f'"{name}"' if name in there else "NULL" for name in (*ints, *texts)]
        cursor = self._db.execute(f'SELECT {", ".join(columns)} FROM "{table}"')  # noqa: S608 -- names of ours
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
