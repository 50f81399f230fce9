"""Write the points for other programs: as CSV with one row per point and units in the column names, and as JSON for scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dcpbench.reports import answer, floors
from dcpbench.reports.dataframes import LOST
from dcpbench.reports.load_labels import list_rows
from dcpbench.show.numbers import drop_non_finite
from dcpbench.show.text import format_spreadsheet_cell

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from dcpbench.reports.dataframes import Frames

INNER = (  # columns that only distinguish points from each other and are not exported
    "record",
    "same_load",
    "in_step",
    "engine",
    "precisions",
    "run_label",
    "launches",
    "kv_tokens_of_all",
    "phase_sum_error",
    "slo_missed",
    "load_with_any_chunk",
    "rest_parts",
    "drawn_layout",
    "shape_parts",
    "load_trace_facts",
)


def write_csv(frames: Frames, path: Path) -> None:
    """Write every point that ran, then every point that did not run with its outcome and reason; absent values are empty."""
    import pandas as pd

    ran = [table.assign(outcome="ok") for table in (frames.points, frames.served) if len(table)]
    others = [frames.others.drop(columns=[*LOST[2:]])] if len(frames.others) else []
    if len(parts := [*ran, *others]) > 1:
        table = pd.concat([part.astype(object) for part in parts]).infer_objects().reset_index(drop=True)
    else:
        table = parts[0] if parts else frames.others
    table = table.drop(columns=[c for c in table if _is_inner(str(c))])
    words = [c for c in table.columns if not pd.api.types.is_numeric_dtype(table[c])]
    for column in words:
        table[column] = pd.Series([_format_cell(v) for v in table[column]], index=table.index, dtype=object)
    table.to_csv(path, index=False, lineterminator="\n")


def _format_cell(value: object) -> object:
    value = _join_names(value)
    return format_spreadsheet_cell(value) if isinstance(value, str) else value


def _join_names(value: object) -> object:
    return ", ".join(value) if isinstance(value, tuple) else value


def format_json(frames: Frames) -> str:
    """Return the report as JSON text in ASCII, so that no string in it can control a terminal."""
    return json.dumps(drop_non_finite(build_json(frames)), indent=2, allow_nan=False)


def build_json(frames: Frames) -> dict[str, Any]:
    """Return `runs`, `cpu`, `points`, `served`, `others` and `findings`, as docs/reading-a-report.md describes.

    Rows have the columns of points.csv. Values that are unknown or not finite are null.
    """
    return {
        "runs": [
            {
                "name": run.name,
                "records": len(run.records) + run.replaced,
                "replaced": run.replaced,
                "cut_short": run.truncated,
                "bad_lines": [{"line": bad.line, "why": bad.why} for bad in run.bad_lines],
            }
            for run in frames.runs
        ],
        "cpu": frames.cpu,
        "points": _list_rows(frames.points),
        "served": _list_rows(frames.served),
        "others": _list_rows(frames.others),
        "findings": answer.format_top_sentences(frames) + floors.format_floor_sentences(frames),
    }


def _list_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    shown = table[[name for name in table if not _is_inner(str(name))]]
    return [{name: _join_names(value) for name, value in row.items()} for row in list_rows(shown)]


def _is_inner(name: str) -> bool:
    return name in INNER or name.startswith("slo_limit")
