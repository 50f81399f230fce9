"""Sizes in bytes as people read and type them. Below `show`, as errors about points name sizes."""

from __future__ import annotations

import math

KIB = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_that_holds(size: float) -> str:
    """Bytes as `1.6KiB`, to be typed: rounded up, so that what is typed is enough."""
    power = 0
    while size >= KIB and power < len(UNITS) - 1:
        size, power = size / KIB, power + 1
    number = f"{math.ceil(size * 10) / 10:.1f}" if power else f"{math.ceil(size)}"
    return f"{number}{UNITS[power]}"


def size_text(size: float, space: str = " ") -> str:
    """Bytes as `600 B`, `1.5 KiB` or `131.0 GiB`, rounded down, so that what fits also fits when it is typed."""
    power = 0
    while size >= KIB and power < len(UNITS) - 1:
        size, power = size / KIB, power + 1
    number = f"{int(size * 10) / 10:.1f}" if power else f"{int(size)}"
    return f"{number}{space}{UNITS[power]}"
