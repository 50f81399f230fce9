"""Format sizes in bytes for people. This module is below `show`, because errors about points name sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_size_up(size: float) -> str:
    """Format bytes as `1.6KiB` for an option, rounded up so that the printed size is enough."""
    return _format_rounded(size, math.ceil, "")


def format_size(size: float, space: str = " ") -> str:
    """Format bytes as `600 B`, `1.5 KiB` or `131.0 GiB`, rounded down so that the printed size fits."""
    return _format_rounded(size, int, space)


def _format_rounded(size: float, whole: Callable[[float], int], space: str) -> str:
    """Format a size with one decimal digit, except for bytes."""
    power = 0
    while size >= KIB and power < len(UNITS) - 1:
        size, power = size / KIB, power + 1
    number = f"{whole(size * 10) / 10:.1f}" if power else f"{whole(size)}"
    return f"{number}{space}{UNITS[power]}"
