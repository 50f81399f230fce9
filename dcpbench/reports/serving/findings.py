"""What is found of served requests alone: points that were short of KV, replay's error, and repeats.

Live runs and replays are compared with each other in `replay_against_live` alone, which is there to do so.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dcpbench.points.axes import COMPUTES
from dcpbench.points.names import CLOSED, LIVE, REPLAY
from dcpbench.points.point import point_axes
from dcpbench.records.metrics import REPLAYED
from dcpbench.show.numbers import missing

SAME_BUT_MODE = ["device", "same_load", *(axis.name for axis in point_axes(COMPUTES))]
"""What a replay and the live run that it stands for have in common."""
SHOWN = ["run", "model", "mode", "load", "arrival", "rest", "concurrency", "input_typical", "label", "layout", "tp"]

NAMES = [metric.name for metric in REPLAYED]


def pressure(points: pd.DataFrame) -> pd.DataFrame:
    """Points whose KV cache was short: requests were preempted, or fewer fit than were in flight."""
    if points.empty:
        return points
    short = (points["load_arrival"] == CLOSED) & (points["kv_capacity_requests"] < points["concurrency"])
    return points[(points["preemptions"] > 0) | short]


def replay_against_live(served: pd.DataFrame) -> pd.DataFrame:
    """Each replay beside the live run of the same point and load: `…_error` = replay / live - 1."""
    if served.empty:
        return pd.DataFrame()
    known = served[served["output_tok_s"].notna()]
    live = known[known["mode"] == LIVE].drop_duplicates(SAME_BUT_MODE, keep="last").set_index(SAME_BUT_MODE)
    rows: list[dict[str, Any]] = []
    for _, point in known[known["mode"] == REPLAY].iterrows():
        key = tuple(point[SAME_BUT_MODE])
        if key in live.index:
            of = live.loc[key]
            row = {name: point[name] for name in (*SHOWN, "cpu")} | {"cpu": bool(point["cpu"] or of["cpu"])}
            row |= {name: of[name] for name in NAMES}
            row |= {f"{name}_replay": point[name] for name in NAMES}
            ratios = {name: _over(point[name], of[name]) for name in NAMES}
            rows.append(row | {f"{name}_error": None if r is None else r - 1 for name, r in ratios.items()})
    return pd.DataFrame(rows)


def repeats(served: pd.DataFrame) -> pd.DataFrame:
    """Live points that were run more than once; a replay repeats itself exactly, which says nothing."""
    if served.empty:
        return pd.DataFrame()
    again = served[served["spread"].notna() & (served["mode"] == LIVE)]
    return again.rename(columns={"spread": "apart"})


def _over(value: float | None, base: float | None) -> float | None:
    if value is None or base is None or missing(value) or missing(base) or not base:
        return None
    return float(value) / float(base)
