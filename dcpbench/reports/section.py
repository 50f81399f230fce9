"""One part of a report, as plain text, tables and pictures; Markdown and HTML only differ in how they print it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.tables import Table


@dataclasses.dataclass(kw_only=True)
class Section:
    """One part of a report. All strings are plain text: whoever prints them escapes them."""

    slug: str
    title: str
    paragraphs: list[str] = dataclasses.field(default_factory=list)
    bullets: list[str] = dataclasses.field(default_factory=list)
    commands: list[str] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    pictures: list[Picture] = dataclasses.field(default_factory=list)

    def is_more_than_tables(self) -> bool:
        """Whether it says or shows anything besides tables."""
        return bool(self.paragraphs or self.bullets or self.commands or self.pictures)
