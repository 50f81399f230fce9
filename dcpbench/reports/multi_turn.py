"""Report, for loads of sessions, each turn's prefix cache hits and time to first token, by layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.reports import load_labels
from dcpbench.reports.tables import FOLD_ABOVE, Table, make_table
from dcpbench.show.numbers import ABSENT, format_number, format_percent

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames


def build_table(frames: Frames, mode: str) -> Table:
    """Build a table with a row for each turn of each point of a mode; empty if no load has several turns."""
    rows = [
        {
            "load": load_labels.format_served_load(record.point),
            "layout": record.point.layout_name,
            "turn": turn.turn,
            "requests": turn.requests,
            "prompt": turn.input_tokens / turn.requests,
            "cached": None if turn.cached_tokens is None else turn.cached_tokens / turn.input_tokens,
            "ttft": turn.ttft_ms.p50,
        }
        for record in frames.records
        if record.serve and record.point.load and record.point.load.mode == mode
        for turn in record.serve.turns
    ]
    return make_table(
        f"Turns of sessions, {mode}",
        pd.DataFrame(rows),
        [
            ("load", "load"),
            ("layout", "layout"),
            ("turn", lambda r: f"{r['turn']:,}"),
            ("requests", lambda r: f"{r['requests']:,}"),
            ("prompt tokens", lambda r: f"{r['prompt']:,.0f}"),
            ("cached", lambda r: format_percent(r["cached"]) if pd.notna(r["cached"]) else ABSENT),
            ("TTFT p50 ms", lambda r: format_number(r["ttft"]) if pd.notna(r["ttft"]) else ABSENT),
        ],
        text_columns=2,
        fold=len(rows) > FOLD_ABOVE,
    )
