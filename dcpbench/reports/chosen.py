"""What `auto` stood for at each point, and by how much the others were slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.reports.tables import Table, make_table, named
from dcpbench.show.numbers import ABSENT, number

if TYPE_CHECKING:
    from dcpbench.records.record import Choice
    from dcpbench.reports.frames import Frames


def frame(frames: Frames) -> pd.DataFrame:
    """One row per measured point that left its backend or exchange open, each repeat by itself."""
    return pd.DataFrame(
        [
            {
                "run": run.name,
                "model": record.point.model,
                "context": record.point.context,
                "concurrency": record.point.concurrency,
                "layout": record.point.layout_name,
                "asked": f"{record.point.backend} {record.point.exchange_label()}".rstrip(),
                "chosen": str(record.choice),
                **_times(record.choice),
            }
            for run in frames.runs
            for record in run.records
            if record.choice
        ]
    )


def table(frames: Frames) -> Table:
    """The same for people; empty where every point named its backend and its exchange."""
    return make_table(
        "What auto chose: q's exchange, attention and merge of one layer",
        frame(frames),
        [
            *named("layout"),
            ("asked for", "asked"),
            *named("chosen", "others"),
            ("µs per layer", lambda r: number(r["layer_us"], 3)),
            ("next slower by", lambda r: ABSENT if pd.isna(r["lead"]) else f"{r['lead'] * 100:.1f} %"),
        ],
        load=True,
        text_columns=4,
    )


def _times(choice: Choice) -> dict[str, object]:
    timed = sorted((c.layer_us, str(c)) for c in choice.candidates if c.layer_us is not None)
    refused = [f"{c}: {c.reason}" for c in choice.candidates if c.layer_us is None]
    others = [f"{name} {number(us, 3)} µs" for us, name in timed[1:]]
    return {
        "layer_us": timed[0][0],
        "lead": timed[1][0] / timed[0][0] - 1 if len(timed) > 1 else None,
        "others": "; ".join(others + refused) or ABSENT,
    }
