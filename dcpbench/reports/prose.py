"""Small words that the sentences of a report are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports.serving.words import SEPARATOR
from dcpbench.reports.tables import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def listed(parts: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def reach(values: Iterable[float], form: str = "{:.2f}×") -> str:
    """`1.02–1.06×`, or one of them where they look the same."""
    known = sorted(values)
    low, high = form.format(known[0]), form.format(known[-1])
    return high if low == high else f"{low.rstrip('×')}–{high}"


def capital(text: str) -> str:
    """With a capital letter where it begins with a word."""
    return text[:1].upper() + text[1:]


def counted(n: int, what: str) -> str:
    """`1 point`, `2 points`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def with_reach(value: float, low: float, high: float, form: str = "{:.2f}×") -> str:
    """`1.12× [1.10–1.14]`; the reach is left out where it looks the same, as where nothing was repeated."""
    said, ends = form.format(value), (form.format(low).rstrip("×"), form.format(high).rstrip("×"))
    return said if set(ends) == {said.rstrip("×")} else f"{said} [{ends[0]}–{ends[1]}]"


def tok_s(value: float, low: float, high: float) -> str:
    """`286 tok/s [285–286]`."""
    ends = (number(low, 3), number(high, 3))
    said = number(value, 3)
    return f"{said} tok/s" + ("" if set(ends) == {said} else f" [{ends[0]}–{ends[1]}]")


def short_shapes(rests: Iterable[str]) -> dict[str, str]:
    """What tells lengths of requests apart: `4,000 in` of `4,000 in · 500 out` where all have 500 out."""
    known = list(dict.fromkeys(rests))
    parts = {rest: rest.split(SEPARATOR) for rest in known}
    shared = set.intersection(*(set(p) for p in parts.values())) if len(known) > 1 else set()
    return {rest: SEPARATOR.join(p for p in parts[rest] if p not in shared) or rest for rest in known}


def shared_shape(rests: Iterable[str]) -> str:
    """What all of them have in common: `500 out`; empty where there is one, or nothing."""
    known = list(dict.fromkeys(rests))
    if len(known) < 2:  # noqa: PLR2004 - one shares everything with itself
        return ""
    parts = [rest.split(SEPARATOR) for rest in known]
    return SEPARATOR.join(p for p in parts[0] if all(p in other for other in parts))
