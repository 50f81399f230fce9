"""Report the cost of the client that sent the requests, for points served by real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.reports.tables import Table, make_table
from dcpbench.show.numbers import format_number, format_percent

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames


def build_table(frames: Frames) -> Table:
    """Build a table with one row for each point that a real server served."""
    rows = [
        {
            "run": run.name,
            "layout": record.point.layout_name,
            "concurrency": record.point.concurrency,
            **{name: getattr(record.server.client, name) for name in record.server.client.__struct_fields__},
        }
        for run in frames.runs
        for record in run.records
        if record.server and record.server.client
    ]
    return make_table(
        "What the client took",
        pd.DataFrame(rows),
        [
            ("layout", "layout"),
            ("concurrency", lambda r: f"{r['concurrency']:,}"),
            ("processes", lambda r: f"{r['processes']:,}"),
            ("CPU of the busiest", lambda r: format_percent(r["cpu_share"])),
            ("sent late p99 ms", lambda r: format_number(r["late_p99_ms"], 3)),
            ("lag p99 ms", lambda r: format_number(r["lag_p99_ms"], 3)),
            ("read late p99 ms", lambda r: format_number(r["read_late_p99_ms"], 3)),
            ("without a core", lambda r: format_percent(r["starved_share"])),
        ],
        optional=("read late p99 ms", "without a core"),
        fold=True,
    )
