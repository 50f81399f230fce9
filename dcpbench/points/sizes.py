"""Sizes in bytes as people read and type them. Below `show`, as errors about points name sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_that_holds(size: float) -> str:
    """Bytes as `1.6KiB`, to be typed: rounded up, so that what is typed is enough."""
    return _rounded(size, math.ceil, "")


def size_text(size: float, space: str = " ") -> str:
    """Bytes as `600 B`, `1.5 KiB` or `131.0 GiB`, rounded down, so that what fits also fits when it is typed."""
    return _rounded(size, int, space)


def _rounded(size: float, whole: Callable[[float], int], space: str) -> str:
    """With one digit behind the point, but for bytes."""
    power = 0
    while size >= KIB and power < len(UNITS) - 1:
        size, power = size / KIB, power + 1
    number = f"{whole(size * 10) / 10:.1f}" if power else f"{whole(size)}"
    return f"{number}{space}{UNITS[power]}"
