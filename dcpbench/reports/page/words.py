"""Strings of records as a page can show them: none is endless, however long a name or an error was."""

from __future__ import annotations

LONGEST = 4000
"""Characters of a sentence or a cell; records.jsonl has all."""
LONGEST_NAME = 200
"""Characters of a name in the page's data, where each point repeats it."""


def brief(text: object, most: int = LONGEST) -> str:
    """The beginning of a text, and how much of it is left out."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}… ({len(whole) - most:,} more characters)"
