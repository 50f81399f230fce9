"""The points as CSV, one row each, with the units in the column names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points import point
from dcpbench.show.text import spreadsheet_cell

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.reports.frames import Frames

INNER = ("same_load", "slo_recorded")
"""Columns that only tell points apart."""
LATER = point.LATER | {f"load_{name}": default for name, default in point.LOADS_LATER.items()}
"""Columns that are left out where all points have this: tables once were without."""


def write_csv(frames: Frames, path: Path) -> None:
    """Every point that ran, then every point that did not with its outcome and reason. Absent values are empty."""
    import pandas as pd

    ran = [*frames.points.to_dict("records"), *frames.served.to_dict("records")]
    others = frames.others.drop(columns="detail").to_dict("records")
    table = pd.DataFrame([*({**row, "outcome": "ok"} for row in ran), *others])
    if table.empty:
        table = frames.others
    usual = [name for name, default in LATER.items() if name in table and set(table[name].dropna()) <= {default}]
    table = table.drop(columns=[c for c in table if str(c) in (*INNER, *usual) or str(c).startswith("slo_limit")])
    words = [c for c in table.columns if not pd.api.types.is_numeric_dtype(table[c])]
    for column in words:
        table[column] = pd.Series([_cell(v) for v in table[column]], index=table.index, dtype=object)
    table.to_csv(path, index=False, lineterminator="\n")


def _cell(value: object) -> object:
    return spreadsheet_cell(value) if isinstance(value, str) else value
