"""What tables in a terminal are made of: they lose columns where it is narrow, and never cut a number."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from dcpbench.show.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult

IMPLIED = ("cpu", "oversubscribed")
"""Marks that the title and the layout already say."""
LONGEST_WORD = 24
"""Columns at most that a word of a label may claim."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Column:
    """Numbers, ready to print."""

    name: str
    cells: Sequence[str]
    drop: int | None = None
    """Where it is narrow, columns with the lowest of these go first; None: stays."""
    said: str = ""
    """How a column that was left out is called, where its name alone says too little."""

    text: bool = False

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return max(len(self.name), *map(len, self.cells))


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A table with the layout in its first column. Renderable: it takes the shape that fits the terminal."""

    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    marks: Sequence[str] = ()
    """Of each row, as one text; empty strings for rows without. Letters with a legend where the words do not fit."""
    gap: int = 2
    """Spaces between columns, more than one, where there is room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For Rich."""
        yield plain(self.title, "bold")
        marks = dict.fromkeys(mark for text in self.marks for mark in _split(text))
        legend = {mark: LETTERS[i % len(LETTERS)] for i, mark in enumerate(marks)}
        for gap in {self.gap: None, 1: None}:
            columns = [*self.columns, *([Column("marks", self.marks, text=True)] if legend else [])]
            if self._needs(columns, gap) <= options.max_width:
                yield self._table(columns, gap)
                return
        letters = ["".join(legend[mark] for mark in _split(text)) for text in self.marks]
        columns = [*self.columns, *([Column("", letters, text=True)] if legend else [])]
        gap = 1 if self._needs(columns, 1) <= options.max_width else 0
        left_out = self._too_many(columns, options.max_width) if gap == 0 else []
        yield self._table([c for c in columns if c not in left_out], gap)
        if left_out:
            yield plain(f"left out, as it is narrow here: {', '.join(c.said or c.name for c in left_out)}", "dim")
        if legend:
            yield plain(f"marks: {', '.join(f'{letter} {mark}' for mark, letter in legend.items())}")

    def _too_many(self, columns: Sequence[Column], width: int) -> list[Column]:
        """Columns that must go, the least important first."""
        kept, gone = list(columns), []
        for column in sorted((c for c in columns if c.drop is not None), key=lambda c: c.drop or 0):
            if self._needs(kept, 0) <= width:
                break
            kept.remove(column)
            gone.append(column)
        return gone

    def _needs(self, columns: Sequence[Column], gap: int) -> int:
        """Columns of the terminal without cutting a number, or a word of a label."""
        words = [word for label in self.labels for word in str(label).split()]
        first = max(min(max(map(len, words), default=0), LONGEST_WORD), len("layout"))
        return first + sum(c.width + gap + 1 for c in columns)

    def _table(self, columns: Sequence[Column], gap: int) -> Table:
        padding = (0, max(gap - 1, 0), 0, min(gap, 1))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False)
        table.add_column("layout", overflow="fold")
        for column in columns:
            table.add_column(column.name, justify="left" if column.text else "right", no_wrap=True)
        for i, label in enumerate(self.labels):
            table.add_row(plain(label), *(plain(c.cells[i]) for c in columns))
        return table


def shown_marks(points: pd.DataFrame) -> list[str]:
    """Marks of each point that the title and the layout do not say."""
    return [", ".join(m for m in str(marks).split(", ") if m not in IMPLIED) for marks in points["marks"]]


def plain(text: object, style: str = "") -> Text:
    """Text as it is: no markup, and no control characters that would steer the terminal."""
    return Text(printable(str(text)), style=style)


def _split(marks: str) -> list[str]:
    return [mark for mark in marks.split(", ") if mark]
