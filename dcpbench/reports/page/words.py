"""Strings of records as a page can show them: none is endless, however long a name or an error was."""

from __future__ import annotations

LONGEST = 4000
"""Characters of a sentence or a cell; records.jsonl has all."""
LONGEST_NAME = 200
"""Characters of a name in the page's data, where each point repeats it."""
LONGEST_COMMAND = 2000
"""Characters of a command; a longer one has a name that reports cut (clip.py), and would ask for another point."""


def brief(text: object, most: int = LONGEST) -> str:
    """The beginning of a text, and how much of it is left out."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}… ({len(whole) - most:,} more characters)"
