"""The table that a terminal shows after a sweep. Fits 80 columns, and 40 with less in it; plain text when piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group

from dcpbench.reports import opening
from dcpbench.reports.merge import missing
from dcpbench.reports.serving.terminal import served
from dcpbench.reports.tables import ABSENT, number
from dcpbench.reports.terminal_parts import Column, Fitted, plain, told_marks

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from dcpbench.reports.frames import Frames


def render(frames: Frames) -> Group:
    """One table per run and model, what did not run, and the headline."""
    parts: list[RenderableType] = []
    if len(frames.points):
        several = len(frames.runs) > 1
        for (run, model), group in frames.points.groupby(["run", "model"], sort=False):
            title = f"{model}, run {run}" if several else str(model)
            parts.append(_table(title + (" (CPU: functional run)" if group["cpu"].all() else ""), group))
    parts += served(frames)
    same = ["model", "layout", "outcome", "reason"]
    for (model, layout, outcome, reason), group in frames.others.groupby(same, sort=False):
        points = "1 point" if len(group) == 1 else f"{len(group)} points"
        parts.append(plain(f"{outcome}: {points} of {model} {layout}: {reason}", "yellow"))
    parts += [plain(f"• {sentence}") for sentence in opening.sentences(frames)]
    return Group(*parts)


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
    return Fitted(title, list(points["label"]), columns, told_marks(points))


def _half_width(point: pd.Series[Any]) -> str:
    """The wider side of the interval, as a share of the median."""
    median, low, high = (point[f"output_tok_s{x}"] for x in ("", "_low", "_high"))
    return ABSENT if missing(median) else f"{max(high - median, median - low) / median * 100:.1f}%"
