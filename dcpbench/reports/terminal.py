"""The table that a terminal shows after a sweep. Fits 80 columns; plain text when piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group

from dcpbench.reports import opening
from dcpbench.reports.merge import missing
from dcpbench.reports.serving.terminal import served
from dcpbench.reports.tables import ABSENT, number
from dcpbench.reports.terminal_parts import empty, plain, told_marks

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from rich.table import Table

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


def _table(title: str, points: pd.DataFrame) -> Table:
    table = empty(title, ("context", "conc.", "tok/s", "±", "/GPU", "/user", "ITL ms", "p99"))
    marks = told_marks(points)
    if any(marks):
        table.add_column("marks", overflow="fold")
    for mark, (_, p) in zip(marks, points.iterrows(), strict=True):
        table.add_row(
            plain(p["label"]),
            f"{p['context']:,}",
            f"{p['concurrency']:,}",
            number(p["output_tok_s"]),
            _half_width(p),
            number(p["output_tok_s_per_gpu"], 3),
            number(p["tok_s_per_user"], 3),
            number(p["itl_p50_ms"], 3),
            number(p["itl_p99_ms"], 3),
            *([plain(mark)] if any(marks) else []),
        )
    return table


def _half_width(point: pd.Series[Any]) -> str:
    """The wider side of the interval, as a share of the median."""
    median, low, high = (point[f"output_tok_s{x}"] for x in ("", "_low", "_high"))
    return ABSENT if missing(median) else f"{max(high - median, median - low) / median * 100:.1f}%"
