"""Check that the layouts of a load were measured with equal gaps between kernels.

CUDA graphs have longer gaps once a process has used two streams, regardless of their content (docs/methodology.md), so
that the order of measuring looks like a difference between layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports.findings import RIVAL_OF
from dcpbench.reports.recommendation import format_load
from dcpbench.show.numbers import format_percent

if TYPE_CHECKING:
    import pandas as pd

UNEQUAL = 0.01  # maximum difference of gaps between two points, as a share of a step
MAX_GAP_US = 1.0  # maximum mean gap between kernels of a graph in µs; with longer gaps the GPU waits for something else


def describe_unequal_gaps(points: pd.DataFrame) -> str:
    """Describe the two points of one load that unequal gaps separate most; empty if gaps are equal enough."""
    if points.empty:
        return ""
    gaps_us = points["idle_us"] / points["kernels"]
    known = points.assign(gap_us=gaps_us)[(gaps_us < MAX_GAP_US) & ~points["cpu"].astype(bool)]
    if len(known) < 2:  # noqa: PLR2004 - a pair
        return ""
    most, message = UNEQUAL, ""
    for _, rivals in known.groupby(RIVAL_OF, dropna=False, sort=False):
        if len(rivals) == 1:
            continue
        least, longest = (rivals.loc[rivals["gap_us"].agg(which)] for which in ("idxmin", "idxmax"))
        apart = (longest["gap_us"] - least["gap_us"]) * least["kernels"] / (least["step_ms"] * 1e3)
        if apart > most:
            most = apart
            message = (
                f"Gaps between kernels are {least['gap_us']:.2f} µs with {least['label']} and {longest['gap_us']:.2f} with"
                f" {longest['label']} at {format_load(least)}: {format_percent(apart)} of a step, which may be the order of measuring, as"
                " the first graphs of a process have the shortest (docs/methodology.md)."
            )
    return message
