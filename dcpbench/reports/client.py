"""Report, for points served by real servers, the cost of the client that sent the requests and its share in the
measured times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.reports.tables import Table, make_table
from dcpbench.show.numbers import format_number, format_percent

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames

HOW = (
    "After each load the client read as many streams of a server that does nothing, which sends a first token at once and "
    "the others at even gaps: TTFT alone is how long those first tokens took, ITL alone how much longer the gaps were at "
    "p99. That server shares the machine, so that both are upper bounds of what the client adds."
)


def describe_client(frames: Frames) -> list[str]:
    """Describe how the client was measured, if it was."""
    clients = (r.server.client for run in frames.runs for r in run.records if r.server and r.server.client)
    return [HOW] if any(client.null_streams for client in clients) else []


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
            ("streams alone", lambda r: format_number(r["null_streams"], 3)),
            ("CPU for an event alone µs", lambda r: format_number(r["null_event_us"], 3)),
            ("TTFT alone p50 ms", lambda r: format_number(r["null_ttft_p50_ms"], 3)),
            ("ITL alone p99 ms", lambda r: format_number(r["null_lag_p99_ms"], 3)),
        ],
        optional=(
            "read late p99 ms",
            "without a core",
            "streams alone",
            "CPU for an event alone µs",
            "TTFT alone p50 ms",
            "ITL alone p99 ms",
        ),
        fold=True,
    )
