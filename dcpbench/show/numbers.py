"""Format numbers with their units for people; an absent value is a dash, never 0. Bytes: points.sizes.format_size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

from dcpbench.points.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ABSENT = "—"
MICROSECONDS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B"))  # largest first, with sizes; decimal units for bytes
MINUTE, HOUR = 60, 3600
WHOLE_FROM = 10  # per cents without decimals
MIN_PERCENT = 0.01  # smallest per cent that is written as a number


def is_missing(value: object) -> bool:
    """Return True if a value was not measured: None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def drop_non_finite(value: object) -> object:
    """Return a JSON value with null for each number that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): drop_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [drop_non_finite(item) for item in value]
    return value


def format_text(value: object) -> str:
    """Return a string, or the dash."""
    return ABSENT if is_missing(value) or value == "" else str(value)


def format_number(value: float | None, digits: int = 4) -> str:
    """Return `12.50`: a number to `digits` significant digits, for even columns; thousands are separated, large numbers are whole."""
    if not _is_known(value):
        return ABSENT
    value = float(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals > digits + 2:
        return f"{value:.{digits - 1}g}"
    return f"{value:,.{max(decimals, 0)}f}"


def format_short_number(value: float | None, digits: int = 3) -> str:
    """Return `12.5`: a number without trailing zeros, for sentences and narrow tables."""
    if not _is_known(value):
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def format_integer(value: float | None) -> str:
    """Return `128,000`: an integer with separators."""
    return f"{value:,.0f}" if _is_known(value) else ABSENT


def format_percent(value: float | None) -> str:
    """Return `2.5 %` for 0.025: a share, to two digits, as an integer from 10; `< 0.01 %` for smaller ones."""
    if not _is_known(value):
        return ABSENT
    share = value * 100
    if 0 < share < MIN_PERCENT:
        return f"< {MIN_PERCENT} %"
    return f"{share:,.0f} %" if WHOLE_FROM <= abs(share) < math.inf else f"{share:.2g} %"


def format_ratio(ratio: float | None, decimals: int = 3) -> str:
    """Return `1.031×`."""
    return f"{ratio:.{decimals}f}×" if _is_known(ratio) else ABSENT


def format_gib(value: float | None) -> str:
    """Return bytes in GiB, for a column that names the unit."""
    if not _is_known(value):
        return ABSENT
    return f"{value / GIB:,.1f}" if value >= GIB else format_number(value / GIB, 2)


def format_with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a value as `36.2 µs` or `4.38 TB/s`: three digits, in the largest unit that does not exceed it."""
    scale, unit = next((each for each in units if abs(value) >= each[0]), units[-1])
    scaled = value / scale
    return f"{scaled:.3g} {unit}" if abs(scaled) < 100 else f"{scaled:.0f} {unit}"  # noqa: PLR2004 - three digits


def format_duration(seconds: float | None) -> str:
    """Return `8 s`, `12 min`, `3 h 20 min`."""
    if not _is_known(seconds):
        return ABSENT
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.0f} min"
    return f"{seconds // HOUR:,.0f} h {seconds % HOUR // MINUTE:.0f} min"


def format_with_interval(value: float | None, low: float | None, high: float | None, digits: int = 4) -> str:
    """Return `12.50 [12.41–12.60]`: a median and its interval, for a table cell."""
    return (
        ABSENT
        if is_missing(value)
        else f"{format_number(value, digits)} [{format_number(low, digits)}–{format_number(high, digits)}]"
    )


def format_value_range(values: Iterable[float], form: str = "{:.2f}×") -> str:
    """Return `1.02–1.06×`, or a single value if both look the same."""
    known = sorted(values)
    low, high = form.format(known[0]), form.format(known[-1])
    return high if low == high else f"{low.rstrip('×')}–{high}"


def format_with_range(value: float, low: float, high: float) -> str:
    """Return `1.12× [1.10–1.14]`; the interval is left out if it looks the same as the value, as without repeats."""
    middle, *ends = (f"{number:.2f}" for number in (value, low, high))
    return f"{middle}×" if set(ends) == {middle} else f"{middle}× [{'–'.join(ends)}]"


def format_tok_s(value: float, low: float, high: float, unit: str = " tok/s") -> str:
    """Return `286 tok/s [285–286]`."""
    middle, ends = format_number(value, 3), (format_number(low, 3), format_number(high, 3))
    return f"{middle}{unit}" + ("" if set(ends) == {middle} else f" [{ends[0]}–{ends[1]}]")


def _is_known(value: float | None) -> TypeGuard[float]:
    return not is_missing(value)
