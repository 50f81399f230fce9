"""What each exchange, with its options, makes of the ITL that the plain `ag_rs` has in the same layout and load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.choices import EXCHANGES, OPTIONS, with_options
from dcpbench.reports.findings import verdict
from dcpbench.reports.tables import Table, make_table, number, with_interval

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames

PLAIN = EXCHANGES[0]
"""What the others are compared with: NCCL's collectives as the first implementation used them."""
SAME = [
    "run", "model", "workload", "context", "concurrency", "tp", "dp", "dcp", "backend", "dtype", "page_size", "weights",
    "all_reduce",
]  # fmt: skip
"""What two points have in common that differ in their exchange alone."""


def frame(timed: pd.DataFrame) -> pd.DataFrame:
    """One row per point whose twin with the plain exchange was measured, too: `ratio` of their ITL, and its reach.

    `verdict` is `shorter` or `longer` only where the intervals lie apart and the ratio differs from 1 by more than
    repeats may.
    """
    if timed.empty:
        return pd.DataFrame()
    plain = (
        timed[(timed["exchange"] == PLAIN) & ~timed[list(OPTIONS)].any(axis=1)].drop_duplicates(SAME).set_index(SAME)
    )
    rows: list[dict[str, Any]] = []
    for _, point in timed[timed["dcp"] > 1].iterrows():
        key = tuple(point[SAME])
        if key not in plain.index or (point["exchange"] == PLAIN and not point[list(OPTIONS)].any()):
            continue
        base = plain.loc[key]
        row = {name: point[name] for name in (*SAME, "label", "step_ms")} | {
            "with": with_options(point["exchange"], [name for name in OPTIONS if point[name]]),
            "plain_ms": base["step_ms"],
            "ratio": point["step_ms"] / base["step_ms"],
            "low": point["step_ms_low"] / base["step_ms_high"],
            "high": point["step_ms_high"] / base["step_ms_low"],
        }
        rows.append(row | {"verdict": verdict(row, above="longer", below="shorter")})
    return pd.DataFrame(rows)


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
