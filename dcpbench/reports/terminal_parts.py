"""What tables in a terminal are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

IMPLIED = ("cpu", "oversubscribed")
"""Marks that the title and the layout already say."""


def empty(title: str, numbers: Sequence[str], *, gap: int = 2) -> Table:
    """A table with the layout in its first column, and columns of numbers with `gap` spaces more than one between."""
    table = Table(
        title=plain(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, gap - 1, 0, 1),
        show_edge=False,
    )
    table.add_column("layout", overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def told_marks(points: pd.DataFrame) -> list[str]:
    """Marks of each point that the title and the layout do not say."""
    return [", ".join(m for m in str(marks).split(", ") if m not in IMPLIED) for marks in points["marks"]]


def plain(text: object, style: str = "") -> Text:
    """Text as it is: no markup, and no control characters that would steer the terminal."""
    return Text("".join(c if c.isprintable() else " " for c in str(text)), style=style)
