"""Read single fields of a Hugging Face config.json. Errors are ValueErrors that name the field. No torch."""

from __future__ import annotations

import reprlib
from typing import Any

MAX_INT = (1 << 31) - 1
"""Maximum of integers: some kernels count sizes of tensors in 32 bits."""
FP32_RANGE = (1e-38, 1e38)
"""Sizes of numbers that fp32 holds with all its digits."""


def parse_int(
    config: dict[str, Any], field: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INT
) -> int:
    """Return a field that must be an integer within limits; raise KeyError if it is missing and has no default."""
    value = config[field] if default is None else config.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(
            f"{field!r} is {format_value(value)}, which is not a {'positive' if minimum else 'non-negative'} integer"
        )
    if value > maximum:
        raise ValueError(f"{field!r} is {format_value(value)}; it can be up to {maximum:,}")
    return value


def parse_number(
    config: dict[str, Any], field: str, default: float | None = None, *, minimum: float | None = None
) -> float:
    """Return a field that must be a number in the range of fp32; raise KeyError if it is missing and has no default."""
    value = config[field] if default is None else config.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{field!r} is {format_value(value)}, which is not a number")  # noqa: TRY004 - input, not a bug
    if value != 0 and not FP32_RANGE[0] <= abs(value) <= FP32_RANGE[1]:
        raise ValueError(f"{field!r} is {format_value(value)}, which fp32 cannot hold")
    if minimum is not None and value < minimum:
        raise ValueError(f"{field!r} is {format_value(value)}, which is below {minimum:g}")
    return float(value)


def parse_positive(config: dict[str, Any], field: str, default: float | None = None) -> float:
    """Return a field that must be a number above 0, as `parse_number` does."""
    value = parse_number(config, field, default)
    if value <= 0:
        raise ValueError(f"{field!r} is {value:g}, which is not a positive number")
    return value


def parse_bool(config: dict[str, Any], field: str, *, default: bool) -> bool:
    """Return a field that must be true or false, or the default if it is missing."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ValueError(f"{field!r} is {format_value(value)}, which is neither true nor false")  # noqa: TRY004 - input
    return value


def format_value(value: object) -> str:
    """Format a value of a file for a sentence; long ones are shortened in the middle."""
    return reprlib.repr(value)
