"""The table that a terminal shows after a sweep. Fits 80 columns; plain text when piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dcpbench.reports.findings import headline
from dcpbench.reports.tables import ABSENT, missing, number

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from dcpbench.reports.frames import Frames


IMPLIED = ("cpu", "oversubscribed")
"""Marks that the title and the layout already say."""


def render(frames: Frames) -> Group:
    """One table per run and model, what did not run, and the headline."""
    parts: list[RenderableType] = []
    if len(frames.points):
        several = len(frames.runs) > 1
        for (run, model), group in frames.points.groupby(["run", "model"], sort=False):
            title = f"{model}, run {run}" if several else str(model)
            parts.append(_table(title + (" (CPU: functional run)" if group["cpu"].all() else ""), group))
    same = ["model", "layout", "outcome", "reason"]
    for (model, layout, outcome, reason), group in frames.others.groupby(same, sort=False):
        points = "1 point" if len(group) == 1 else f"{len(group)} points"
        parts.append(_text(f"{outcome}: {points} of {model} {layout}: {reason}", "yellow"))
    parts += [_text(f"• {sentence}") for sentence in headline(frames)]
    return Group(*parts)


def _table(title: str, points: pd.DataFrame) -> Table:
    table = Table(
        title=_text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        show_edge=False,
    )
    table.add_column("layout", overflow="fold")
    for name in ("context", "conc.", "tok/s", "±", "/GPU", "/user", "ITL ms", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    marks = [", ".join(m for m in str(marks).split(", ") if m not in IMPLIED) for marks in points["marks"]]
    if any(marks):
        table.add_column("marks", overflow="fold")
    for mark, (_, p) in zip(marks, points.iterrows(), strict=True):
        table.add_row(
            _text(p["label"]),
            f"{p['context']:,}",
            f"{p['concurrency']:,}",
            number(p["output_tok_s"]),
            _half_width(p),
            number(p["output_tok_s_per_gpu"], 3),
            number(p["tok_s_per_user"], 3),
            number(p["itl_p50_ms"], 3),
            number(p["itl_p99_ms"], 3),
            *([_text(mark)] if any(marks) else []),
        )
    return table


def _half_width(point: pd.Series[Any]) -> str:
    """The wider side of the interval, as a share of the median."""
    median, low, high = (point[f"output_tok_s{x}"] for x in ("", "_low", "_high"))
    return ABSENT if missing(median) else f"{max(high - median, median - low) / median * 100:.1f}%"


def _text(text: object, style: str = "") -> Text:
    """Text as it is: no markup, and no control characters that would steer the terminal."""
    return Text("".join(c if c.isprintable() else " " for c in str(text)), style=style)
