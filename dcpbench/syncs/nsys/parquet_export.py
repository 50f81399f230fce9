"""Read the folder of Parquet files that nsys writes: `nsys export --type parquetdir`, a file for each table.

pyarrow is imported when a folder is read.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from dcpbench.syncs.nsys import schema
from dcpbench.syncs.nsys.schema import ABSENT, BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dcpbench.syncs.nsys.schema import Block, Ints
    from dcpbench.syncs.traces.reading import ReadProblems

SUFFIX = ".parquet"
AGAIN = "export it again with `nsys export --type parquetdir`"


def is_folder(path: Path) -> bool:
    """Return True if a folder holds tables of nsys as Parquet; False if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.is_dir() and any((path / f"{table}{SUFFIX}").exists() for table in (*schema.EVENTS, schema.STRINGS))
    return False


class ParquetExport:
    """Give the tables of a folder of Parquet files."""

    def __init__(self, path: Path, problems: ReadProblems) -> None:
        self.path, self.problems = path, problems
        self._strings: tuple[Ints, Any] | None = None

    def read_blocks(self, table: str, texts: Sequence[str] = ()) -> Iterator[Block]:
        """Yield the rows of a table, its COLUMNS and columns of texts or bytes; nothing if it is not there."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        ints, path = schema.COLUMNS[table], self.path / f"{table}{SUFFIX}"
        if not path.exists():
            return
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                there = [name for name in (*ints, *texts) if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=BLOCK_ROWS * 4, columns=there):
                    yield self._convert(batch, ints, texts)
        except (pa.ArrowException, OSError, ValueError) as e:
            what = " ".join(str(e).split())
            self.problems.lost.append(f"has a table {path.name} that cannot be read to its end ({what}): {AGAIN}")

    def _convert(self, batch: Any, ints: Sequence[str], texts: Sequence[str]) -> Block:  # noqa: ANN401 - pyarrow has no types
        import pyarrow as pa

        block: Block = {}
        for name in ints:
            column = batch.column(name) if name in batch.schema.names else None
            if column is None:
                block[name] = np.full(batch.num_rows, ABSENT)
            elif pa.types.is_integer(column.type) and column.type != pa.uint64():
                block[name] = column.cast(pa.int64()).fill_null(ABSENT).to_numpy(zero_copy_only=False)
            else:
                block[name], odd = schema.make_ints(column.to_pylist())
                self.problems.unreadable_events += odd
        for name in texts:
            column = batch.column(name) if name in batch.schema.names else None
            block[name] = [None] * batch.num_rows if column is None else column.to_pylist()
        return block

    def read_strings(self, ids: Ints) -> dict[int, str]:
        """Return the strings with these ids, as far as they are there."""
        known, texts = self._load_strings()
        if not len(known):
            return {}
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        there = np.flatnonzero(known[at] == ids)
        return {int(ids[i]): str(text) for i in there.tolist() if (text := texts[at[i]].as_py()) is not None}

    def _load_strings(self) -> tuple[Ints, Any]:
        """Return the ids of all strings, in order, and the strings."""
        if self._strings is None:
            import pyarrow as pa
            import pyarrow.parquet as pq

            path = self.path / f"{schema.STRINGS}{SUFFIX}"
            try:
                table = pq.read_table(path, columns=["id", "value"], page_checksum_verification=True).sort_by("id")
                ids = table["id"].cast(pa.int64()).fill_null(ABSENT).to_numpy()
                self._strings = (ids, table["value"].combine_chunks())
            except FileNotFoundError:
                self._strings = (np.zeros(0, np.int64), None)
            except (pa.ArrowException, OSError, ValueError, KeyError) as e:
                what = " ".join(str(e).split())
                self.problems.lost.append(f"has a table {path.name} that cannot be read ({what}): {AGAIN}")
                self._strings = (np.zeros(0, np.int64), None)
        return self._strings
