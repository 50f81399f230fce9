"""What commands write to a terminal, a pipe or a log: Rich's console, and single lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160
"""Columns where nobody's terminal says how many there are: room for the widest table."""


def console(*, error: bool = False) -> Console:
    """Rich's console, on stderr with `error`."""
    from rich.console import Console

    found = Console(stderr=error)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
