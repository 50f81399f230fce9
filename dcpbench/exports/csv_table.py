"""CSV: the tidy table as text. An absent value is empty; what a spreadsheet would run starts with an apostrophe."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from dcpbench.exports import Rendered
from dcpbench.exports.columns import COLUMNS, Cell, rows
from dcpbench.show.text import spreadsheet_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured import Measured

FILE = "points.csv"


def render(points: Sequence[Measured]) -> Rendered:
    """One file with every point."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in COLUMNS])
    writer.writerows([_text(row[column.name]) for column in COLUMNS] for row in rows(list(points)))
    return Rendered({FILE: out.getvalue().encode("utf-8", "backslashreplace")})


def _text(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return spreadsheet_cell(value)
    return repr(value)
