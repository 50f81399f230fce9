"""Build tables of parts of records that the frames do not have: clients, turns of sessions, and choices of `auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pandas as pd

from dcpbench.reports import load_labels
from dcpbench.reports.tables import FOLD_ABOVE, Table, make_table, make_text_columns
from dcpbench.show.numbers import format_number, format_percent

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames


def build_client_table(frames: Frames) -> Table:
    """Build a table of the cost of the client, with one row for each point that a real server served."""
    rows = [
        {"run": run.name, "layout": record.point.layout_name, "concurrency": record.point.concurrency}
        | msgspec.structs.asdict(record.server.client)
        for run in frames.runs
        for record in run.records
        if record.server and record.server.client
    ]
    return make_table(
        "Overhead of the client",
        pd.DataFrame(rows),
        [
            *make_text_columns("layout"),
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


def build_turns_table(frames: Frames, mode: str) -> Table:
    """Build a table of prefix cache hits and TTFT of each turn of the points of a mode; empty if no load has several."""
    rows = [
        {
            "load": load_labels.format_served_load(record.point),
            "layout": record.point.layout_name,
            "turn": _format_turn(turn.turn, subagents=bool(record.point.load.subagents)),
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
            *make_text_columns("load", "layout"),
            ("turn", "turn"),
            ("requests", lambda r: f"{r['requests']:,}"),
            ("prompt tokens", lambda r: f"{r['prompt']:,.0f}"),
            ("cached", lambda r: format_percent(r["cached"])),
            ("TTFT p50 ms", lambda r: format_number(r["ttft"])),
        ],
        text_columns=2,
        fold=len(rows) > FOLD_ABOVE,
    )


def _format_turn(number: int, *, subagents: bool) -> str:
    """Return the number of a turn as --sessions counts; the sub-agents of a turn have the number after its own."""
    if not subagents:
        return f"{number:,}"
    turn, behind = divmod(number + 1, 2)
    return f"{turn:,}, sub-agents" if behind else f"{turn:,}"


def build_choice_table(frames: Frames) -> Table:
    """Build a table of what `auto` chose at each point and repeat, and by how much the other candidates were slower."""
    rows = []
    for name, record in ((run.name, record) for run in frames.runs for record in run.records):
        if record.choice is None:
            continue
        point, candidates = record.point, record.choice.candidates
        timed = sorted((c.layer_us, str(c)) for c in candidates if c.layer_us is not None)
        refused = [f"{c}: {c.reason}" for c in candidates if c.layer_us is None]
        others = [f"{other} {format_number(us, 3)} µs" for us, other in timed[1:]]
        rows.append(
            {
                "run": name,
                "model": frames.format_model(point.model),
                "context": point.context,
                "concurrency": point.concurrency,
                "routing": point.routing,
                "layout": point.layout_name,
                "requested": f"{point.backend} {point.format_exchange_label()}".rstrip(),
                "chosen": str(record.choice),
                "others": "; ".join(others + refused),
                "µs per layer": format_number(timed[0][0], 3),
                "next slower by": f"{(timed[1][0] / timed[0][0] - 1) * 100:.1f} %" if timed[1:] else "",
            }
        )
    title = "Choices of auto: exchange of q, attention and merge of one layer"
    shown = make_text_columns("layout", "requested", "chosen", "others", "µs per layer", "next slower by")
    return make_table(title, pd.DataFrame(rows), shown, load=True, text_columns=4)
