"""The table that a terminal shows after a sweep. Fits 80 columns, and 40 with less in it; plain text when piped."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group

from dcpbench.reports import opening
from dcpbench.reports.serving.terminal import served
from dcpbench.reports.terminal_parts import Column, Fitted, plain, shown_marks
from dcpbench.show.numbers import ABSENT, missing, number
from dcpbench.show.text import counted

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from dcpbench.reports.frames import Frames

MOST = 2_000
"""Rows of all tables; more would scroll by for minutes."""
MOST_NAMED = 8
"""Loads of a layout that are named where it misses the SLO."""


def render(frames: Frames) -> Group:
    """One table per run and model, what did not run, and the headline."""
    parts: list[RenderableType] = []
    shown = dataclasses.replace(
        frames, points=frames.points.head(MOST), served=frames.served.head(MOST), others=frames.others.head(MOST)
    )
    if len(shown.points):
        several = len(frames.runs) > 1
        for (run, model), group in shown.points.groupby(["run", "model"], sort=False):
            title = f"{model}, run {run}" if several else str(model)
            parts.append(_table(title + (" (CPU: functional run)" if group["cpu"].all() else ""), group))
    parts += served(shown)
    more = sum(len(a) - len(b) for a, b in zip(_tables(frames), _tables(shown), strict=True))
    parts += [plain(f"{more:,} points more; `dcpbench report` writes all into points.csv.", "yellow")] if more else []
    parts += [plain(sentence) for sentence in _misses(shown)]
    same = ["model", "layout", "outcome", "reason"]
    for (model, layout, outcome, reason), group in shown.others.groupby(same, sort=False):
        parts.append(plain(f"{outcome}: {counted(len(group), 'point')} of {model} {layout}: {reason}", "yellow"))
    parts += [plain(f"• {sentence}") for sentence in opening.sentences(frames)]
    return Group(*parts)


def _tables(frames: Frames) -> tuple[pd.DataFrame, ...]:
    return frames.points, frames.served, frames.others


def _misses(frames: Frames) -> list[str]:
    """Points that miss the SLO, those of one layout together."""
    notes = []
    for points in (frames.points, frames.served):
        missed = points[points["slo_excess"] > 1] if len(points) else points
        for (model, mode, label), group in (
            missed.groupby(["model", "mode", "label"], sort=False) if len(missed) else ()
        ):
            loads = list(dict.fromkeys(group["load"]))
            named = "; ".join(loads[:MOST_NAMED]) + (
                f"; {len(loads) - MOST_NAMED:,} more" if loads[MOST_NAMED:] else ""
            )
            who = model if mode == "decode" else f"{model}, {mode}"
            notes.append(f"misses the SLO: {who}: {label} at {named}")
    return notes


def _table(title: str, points: pd.DataFrame) -> Fitted:
    columns = (
        Column("context", [f"{v:,}" for v in points["context"]]),
        Column("conc.", [f"{v:,}" for v in points["concurrency"]]),
        Column("tok/s", [number(v) for v in points["output_tok_s"]]),
        Column("±", [_half_width(p) for _, p in points.iterrows()], drop=3),
        Column("/GPU", [number(v, 3) for v in points["output_tok_s_per_gpu"]], drop=2, said="tok/s per GPU"),
        Column("/user", [number(v, 3) for v in points["tok_s_per_user"]], drop=0, said="tok/s per user"),
        Column("ITL ms", [number(v, 3) for v in points["itl_p50_ms"]]),
        Column("p99", [number(v, 3) for v in points["itl_p99_ms"]], drop=1, said="ITL p99"),
    )
    return Fitted(title, list(points["label"]), columns, shown_marks(points))


def _half_width(point: pd.Series[Any]) -> str:
    """The wider side of the interval, as a share of the median."""
    median, low, high = (point[f"output_tok_s{x}"] for x in ("", "_low", "_high"))
    return ABSENT if missing(median) else f"{max(high - median, median - low) / median * 100:.1f}%"
