"""What `dcpbench show` prints, for a script: rows of points and the sentences about them as one JSON object."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from dcpbench.reports import opening
from dcpbench.reports.export import INNER
from dcpbench.show.numbers import missing

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.reports.frames import Frames


def dumps(frames: Frames) -> str:
    """The object as text, in ASCII, so that no string in it steers a terminal."""
    return json.dumps(as_json(frames), indent=2, allow_nan=False)


def as_json(frames: Frames) -> dict[str, Any]:
    """`runs`, `cpu`, `points`, `served`, `others` and `findings`; docs/reading-a-report.md says what they hold.

    Rows have the columns of points.csv. What is not known, or not finite, is null.
    """
    return {
        "runs": [
            {
                "name": run.name,
                "records": len(run.records) + run.replaced,
                "replaced": run.replaced,
                "cut_short": run.truncated,
            }
            for run in frames.runs
        ],
        "cpu": frames.cpu,
        "points": _rows(frames.points),
        "served": _rows(frames.served),
        "others": _rows(frames.others),
        "findings": opening.sentences(frames),
    }


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(name): _value(value) for name, value in row.items() if not _inner(str(name))}
        for row in table.to_dict("records")
    ]


def _inner(name: str) -> bool:
    return name in INNER or name.startswith("slo_limit")


def _value(value: Any) -> Any:  # noqa: ANN401 -- a cell of any table
    """As JSON has it: numpy's numbers are Python's, and absent ones null."""
    if isinstance(value, str | bool):
        return value
    if isinstance(value, dict):
        return {str(name): _value(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple | set):
        return [_value(inside) for inside in value]
    if missing(value):
        return None
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
