"""Export the tidy table as Parquet with the same typed schema for every run, so that many runs are one data set."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from dcpbench.exports import RenderedFiles
from dcpbench.exports.csv_table import COLUMNS, build_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured_points import MeasuredPoint

FILE = "points.parquet"


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file with every point."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = build_rows(points)
    table = pa.table(
        {c.name: [_convert_to_utf8(row[c.name]) for row in found] for c in COLUMNS}, schema=make_schema(pa)
    )
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return RenderedFiles({FILE: out.getvalue()})


def make_schema(pa: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the schema of all such files."""
    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return pa.schema([pa.field(column.name, kinds[column.kind]) for column in COLUMNS])


def _convert_to_utf8(value: object) -> object:
    """Return text that UTF-8 can represent."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
