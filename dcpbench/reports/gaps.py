"""Whether the layouts of a load were measured with equal gaps between kernels: later graphs of a process have longer ones,
whatever they hold (docs/methodology.md), so that the order of measuring looks like a difference between layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports.findings import RIVAL_OF
from dcpbench.reports.rule import load_words
from dcpbench.show.numbers import percent

if TYPE_CHECKING:
    import pandas as pd

UNEQUAL = 0.01
"""Of a step: by how much gaps may differ between two layouts."""
LONGEST_US = 1.0
"""Of a gap between kernels of a graph, on average; where it is longer the GPU waits for something else."""


def words(points: pd.DataFrame) -> str:
    """By how much unequal gaps set layouts apart at most, and where; empty where they do not."""
    if points.empty:
        return ""
    gaps_us = points["idle_us"] / points["kernels"]
    known = points.assign(gap_us=gaps_us)[(gaps_us < LONGEST_US) & ~points["cpu"].astype(bool)]
    found = []
    for _, rivals in known.groupby(RIVAL_OF, dropna=False, sort=False):
        apart_ms = (rivals["idle_us"].max() - rivals["idle_us"].min()) / 1e3
        found.append((apart_ms / rivals["step_ms"].min(), rivals))
    most, where = max(found, default=(0.0, known), key=lambda load: load[0])
    if most <= UNEQUAL:
        return ""
    return (
        f"Gaps between kernels are {where['gap_us'].min():.2f} µs in one layout and {where['gap_us'].max():.2f} in another,"
        f" which is up to {percent(most)} of a step ({load_words(where.iloc[0])}) and may be the order of measuring: the first"
        " graphs of a process have the shortest (docs/methodology.md)."
    )
