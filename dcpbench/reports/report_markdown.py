"""Render the report as Markdown for pull requests and READMEs: the answer first, long tables folded, pictures next to them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dcpbench.reports.sections import FOLDED
from dcpbench.reports.tables import MANY_ROWS
from dcpbench.show.text import format_markdown_text

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.reports.plots import Picture
    from dcpbench.reports.sections import Section
    from dcpbench.reports.tables import Table

MAX_CHARACTERS = 900_000  # GitHub shows no larger file than 1 MB: long tables lose their last rows


def render(title: str, sections: list[Section], folder: Path) -> str:
    """Return the complete report; pictures are linked relative to `folder`."""
    parts = [f"# {format_markdown_text(title)}"]
    rows = _count_rows_that_fit(sections)
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [f"**{format_markdown_text(section.lead)}**"] if section.lead else []
        parts += [f"*{format_markdown_text(section.aside)}.*"] if section.aside else []
        parts += [_format_picture(p, folder) for p in section.first]
        parts += [format_markdown_text(p) for p in section.paragraphs]
        if section.bullets:
            parts.append(_format_bullets(section.bullets))
        if section.folded:
            parts.append(f"<details><summary>{FOLDED}</summary>\n\n{_format_bullets(section.folded)}\n\n</details>")
        for text in section.commands:  # in a fence that is longer than any run of backticks inside
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            parts.append(f"{fence}\n{text}\n{fence}")
        parts += [_format_picture(p, folder) for p in section.pictures]
        parts += [_format_table(table, rows) for table in section.tables]
        parts += [format_markdown_text(p) for p in section.notes]
    return "\n\n".join(parts) + "\n"


def _format_bullets(texts: list[str]) -> str:
    return "\n".join(f"- {format_markdown_text(text)}" for text in texts)


def _format_picture(picture: Picture, folder: Path) -> str:
    return f"![{format_markdown_text(picture.alt)}]({picture.png.relative_to(folder).as_posix()})"


def _count_rows_that_fit(sections: list[Section]) -> int:
    """Return the number of rows that each table may have so that the file stays below MAX_CHARACTERS."""
    tables = [table for section in sections for table in section.tables]
    sizes = [sum(map(len, row)) + 4 * len(row) for table in tables for row in table.rows]
    if sum(sizes) < MAX_CHARACTERS:
        return max((len(table.rows) for table in tables), default=0)
    return max(MANY_ROWS, int(MAX_CHARACTERS / len(tables) / (sum(sizes) / len(sizes))))


def _format_table(table: Table, most: int) -> str:
    align = [":--" if i < table.text_columns else "--:" for i in range(len(table.columns))]
    shown = table.rows[:most]
    lines = [
        [format_markdown_text(c) for c in table.columns],
        align,
        *([format_markdown_text(c) for c in row] for row in shown),
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(shown) < len(table.rows):
        text += f"\n\n{len(table.rows) - len(shown):,} rows more in points.csv."
    if not table.fold and len(table.rows) <= MANY_ROWS:
        return f"**{format_markdown_text(table.title)}**\n\n{text}"
    return f"<details><summary>{format_markdown_text(table.summary)}</summary>\n\n{text}\n\n</details>"
