"""Report which backend or exchange `auto` selected at each point, and by how much the other candidates were slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.reports.tables import Table, make_table, make_text_columns
from dcpbench.show.numbers import format_number

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames


def build_table(frames: Frames) -> Table:
    """Build a table with one row per measured point that left its backend or exchange to `auto`; each repeat has its
    own row.
    """
    rows = []
    for run in frames.runs:
        for record in run.records:
            if record.choice is None:
                continue
            point, candidates = record.point, record.choice.candidates
            timed = sorted((c.layer_us, str(c)) for c in candidates if c.layer_us is not None)
            refused = [f"{c}: {c.reason}" for c in candidates if c.layer_us is None]
            others = [f"{name} {format_number(us, 3)} µs" for us, name in timed[1:]]
            rows.append(
                {
                    "run": run.name,
                    "model": frames.format_model(point.model),
                    "context": point.context,
                    "concurrency": point.concurrency,
                    "layout": point.layout_name,
                    "asked for": f"{point.backend} {point.format_exchange_label()}".rstrip(),
                    "chosen": str(record.choice),
                    "others": "; ".join(others + refused),
                    "µs per layer": format_number(timed[0][0], 3),
                    "next slower by": f"{(timed[1][0] / timed[0][0] - 1) * 100:.1f} %" if timed[1:] else "",
                }
            )
    title = "What auto chose: q's exchange, attention and merge of one layer"
    shown = make_text_columns("layout", "asked for", "chosen", "others", "µs per layer", "next slower by")
    return make_table(title, pd.DataFrame(rows), shown, load=True, text_columns=4)
