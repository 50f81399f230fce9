"""The report as Markdown, for pull requests and READMEs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.reports.section import Section
    from dcpbench.reports.tables import Table


def render(title: str, sections: list[Section], folder: Path) -> str:
    """The whole report; pictures are linked relative to `folder`."""
    parts = [f"# {escape(title)}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [escape(p) for p in section.paragraphs]
        if section.bullets:
            parts.append("\n".join(f"- {escape(b)}" for b in section.bullets))
        parts += [_code(command) for command in section.commands]
        parts += [f"![{escape(p.alt)}]({p.png.relative_to(folder).as_posix()})" for p in section.pictures]
        parts += [_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: on one line, no markup, no HTML."""
    text = re.sub(r"\s+", " ", text).strip()
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)


def _code(text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _table(table: Table) -> str:
    align = [":--" if i < table.text_columns else "--:" for i in range(len(table.columns))]
    lines = [[escape(c) for c in table.columns], align, *([escape(c) for c in row] for row in table.rows)]
    return f"**{escape(table.title)}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
