"""What each exchange, with its options, makes of the ITL that the plain `ag_rs` has in the same layout and load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.points.axes import COMPUTES, Role, words
from dcpbench.points.names import EXCHANGES
from dcpbench.points.point import OPTIONS, point_axes
from dcpbench.reports.findings import verdict
from dcpbench.reports.tables import Table, make_table
from dcpbench.show.numbers import number, with_interval

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames

PLAIN = EXCHANGES[0]
"""What the others are compared with: NCCL's collectives as the first implementation used them."""
SAME = ["run", *(axis.name for axis in point_axes(COMPUTES | Role.LOAD, but=Role.EXCHANGE))]
"""What two points have in common that differ in their exchange alone."""
STEPS = ("step_ms", "step_ms_low", "step_ms_high")


def frame(timed: pd.DataFrame) -> pd.DataFrame:
    """One row per point whose twin with the plain exchange was measured, too: `ratio` of their ITL, and its reach.

    `verdict` is `shorter` or `longer` only where the intervals lie apart and the ratio differs from 1 by more than
    repeats may.
    """
    if timed.empty:
        return pd.DataFrame()
    bare = (timed["exchange"] == PLAIN) & ~timed[list(OPTIONS)].any(axis=1)
    names = {name: f"plain_{name}" for name in STEPS}
    plain = timed[bare].drop_duplicates(SAME).set_index(SAME)[list(STEPS)].rename(columns=names)
    others = timed[(timed["dcp"] > 1) & ~bare].join(plain, on=SAME)
    others = others[others["plain_step_ms"].notna()]
    if others.empty:
        return pd.DataFrame()
    found = others[[*SAME, "label", "step_ms"]].copy()
    rows = others[["exchange", *OPTIONS]].to_dict("records")
    found["with"] = [" ".join(words(point_axes(Role.EXCHANGE), {str(k): v for k, v in row.items()})) for row in rows]
    found["plain_ms"] = others["plain_step_ms"]
    found["ratio"] = others["step_ms"] / others["plain_step_ms"]
    found["low"] = others["step_ms_low"] / others["plain_step_ms_high"]
    found["high"] = others["step_ms_high"] / others["plain_step_ms_low"]
    rows = found[["ratio", "low", "high"]].to_dict("records")
    found["verdict"] = [verdict({str(k): v for k, v in row.items()}, above="longer", below="shorter") for row in rows]
    return found.reset_index(drop=True)


def sentences(found: pd.DataFrame, frames: Frames) -> list[str]:
    """How much each exchange changes the ITL, from the least to the most over all loads and layouts of a model."""
    said = []
    for (run, model), of_model in found.groupby(["run", "model"], sort=False) if len(found) else ():
        where = f"{model}, run {run}" if len(frames.runs) > 1 else str(model)
        parts = []
        for name, rows in of_model.groupby("with", sort=False):
            low, high = rows["ratio"].min(), rows["ratio"].max()
            parts.append(f"{name} {low:.3f}" + (f" to {high:.3f}" if len(rows) > 1 else ""))
        said.append(f"{where}: ITL over that with {PLAIN}, everything else being the same: {', '.join(parts)}.")
    return said


def table(found: pd.DataFrame) -> Table:
    """The same for people; empty where the plain exchange has no twin."""
    return make_table(
        f"ITL with each exchange over that with {PLAIN}",
        found,
        [
            ("layout", lambda r: str(r["label"])),
            ("exchange", lambda r: str(r["with"])),
            ("verdict", lambda r: str(r["verdict"])),
            ("ITL ms", lambda r: number(r["step_ms"])),
            (f"{PLAIN} ms", lambda r: number(r["plain_ms"])),
            ("ratio [widest]", lambda r: with_interval(r["ratio"], r["low"], r["high"], 3)),
        ],
        load=True,
        text_columns=3,
    )
