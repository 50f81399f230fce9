"""Compare the ITL of each exchange and its options with the ITL of plain `ag_rs` for the same layout and load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.axes import Role, format_changed_values
from dcpbench.points.names import EXCHANGES
from dcpbench.points.point import OPTIONS, select_point_axes
from dcpbench.reports.findings import SAME_BUT_EXCHANGE, add_ratios, compute_verdicts
from dcpbench.reports.load_labels import list_rows
from dcpbench.reports.tables import Table, make_table, make_text_columns
from dcpbench.show.numbers import format_number, format_with_interval

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.reports.dataframes import Frames

PLAIN = EXCHANGES[0]  # exchange that the others are compared with: NCCL's collectives, as in the first implementation


def compare_exchanges(timed: pd.DataFrame) -> pd.DataFrame:
    """Return one row per point for which the same point with the plain exchange was measured too.

    `ratio` is the ratio of their ITL, with its interval. `verdict` is `shorter` or `longer` only if the intervals do
    not overlap and the ratio differs from 1 by more than repeats may.
    """
    if timed.empty:
        return timed
    bare = (timed["exchange"] == PLAIN) & ~timed[list(OPTIONS)].any(axis=1)
    found = add_ratios(timed[(timed["dcp"] > 1) & ~bare], timed[bare], SAME_BUT_EXCHANGE, "step_ms")
    found = found[found["ratio"].notna()]
    exchange_axes = select_point_axes(Role.EXCHANGE)
    rows = list_rows(found[[axis.name for axis in exchange_axes]])
    found["with"] = [" ".join(format_changed_values(exchange_axes, row)) for row in rows]
    return found.assign(verdict=compute_verdicts(found, above="longer", below="shorter")).reset_index(drop=True)


def describe_ratios(found: pd.DataFrame, frames: Frames) -> list[str]:
    """Return the range by which each exchange changes the ITL over all loads and layouts of a model."""
    texts = []
    for (run, model), of_model in found.groupby(["run", "model"], sort=False) if len(found) else ():
        where = frames.format_scope(str(run), str(model))
        parts = []
        for name, rows in of_model.groupby("with", sort=False):
            low, high = rows["ratio"].min(), rows["ratio"].max()
            parts.append(f"{name} {low:.3f}" + (f" to {high:.3f}" if len(rows) > 1 else ""))
        texts.append(f"{where}: ITL over that with {PLAIN}, everything else being the same: {', '.join(parts)}.")
    return texts


def build_table(found: pd.DataFrame) -> Table:
    """Build the table of the comparison for people; empty if no point has a counterpart with the plain exchange."""
    return make_table(
        f"ITL with each exchange over that with {PLAIN}",
        found,
        [
            ("layout", "label"),
            ("exchange", "with"),
            *make_text_columns("verdict"),
            ("ITL ms", lambda r: format_number(r["step_ms"])),
            (f"{PLAIN} ms", lambda r: format_number(r["over_step_ms"])),
            ("ratio [widest]", lambda r: format_with_interval(r["ratio"], r["low"], r["high"], 3)),
        ],
        load=True,
        text_columns=3,
    )
