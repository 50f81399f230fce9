"""In what two sides were not the same besides what is compared: machine, software, settings, weights, clocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dcpbench.compare.model import Difference
from dcpbench.records.provenance import origin
from dcpbench.show.text import short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dcpbench.compare.sides import Pair
    from dcpbench.records.record import Record

ENVIRONMENT = (
    ("GPU", "device"),
    ("GPUs", "device_count"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
    ("torch", "torch"),
    ("Triton", "triton"),
    ("NCCL", "nccl"),
    ("FlashInfer", "flashinfer"),
    ("Python", "python"),
    ("dcpbench", "dcpbench"),
    ("commit", "git_commit"),
    ("machine", "host_hash"),
)
HONESTY = (
    ("weights", "weights"),
    ("layers", "layers"),
    ("layers held", "layers_held"),
    ("KV rows", "kv"),
    ("CUDA graph", "cuda_graph"),
)
CLOCK_APART = 0.01
"""Lowest SM clocks further apart than this share are told."""
MOST_SHOWN, LONGEST = 4, 60
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


def differences(pairs: Sequence[Pair]) -> list[Difference]:
    """Everything recorded of matched points that is not the same set of values on both sides."""
    a = [r for pair in pairs for _, records in pair.a for r in records]
    b = [r for pair in pairs for _, records in pair.b for r in records]
    found = [_difference(what, x, y) for what, x, y in _values(a, b) if x != y]
    return found + list(_clocks(a, b))


def marks(records: Iterable[Record]) -> list[str]:
    """All marks of some records, sorted; what throttled is named."""
    return sorted({short(mark, LONGEST) for r in records for mark in r.marks})[:20]


def _values(a: Sequence[Record], b: Sequence[Record]) -> Iterator[tuple[str, set[str], set[str]]]:
    """Each thing that a record says of how it was taken, with what either side says."""
    readers: list[tuple[str, Callable[[Record], Iterable[object]]]] = [
        (what, lambda r, name=name: [getattr(r.environment, name)] if r.environment else [])  # type: ignore[misc]
        for what, name in ENVIRONMENT
    ]
    readers += [
        (what, lambda r, name=name: [getattr(r.honesty, name)] if r.honesty else [])  # type: ignore[misc]
        for what, name in HONESTY
    ]
    readers += [
        (
            f"{name} (value withheld)" if SECRET.search(name) else name,
            lambda r, name=name: [r.environment.settings.get(name)] if r.environment else [],  # type: ignore[misc]
        )
        for name in sorted({n for r in (*a, *b) if r.environment for n in r.environment.settings})
    ]
    readers += [
        (f"setting {name}", lambda r, name=name: [r.measured_with.get(name)] if r.measured_with else [])  # type: ignore[misc]
        for name in sorted({n for r in (*a, *b) for n in r.measured_with})
    ]
    readers += [
        ("measured by", lambda r: [origin(r)]),
        ("auto chose", lambda r: [r.choice] if r.choice else []),
        ("throttled by", lambda r: r.gpu.throttle_reasons if r.gpu else []),
        ("marks", lambda r: r.marks),
    ]
    for what, read in readers:
        yield what, {_text(v) for r in a for v in read(r)}, {_text(v) for r in b for v in read(r)}


def _difference(what: str, a: set[str], b: set[str]) -> Difference:
    if "withheld" in what:
        return Difference(what=short(what, LONGEST), a="one", b="another")
    return Difference(what=short(what, LONGEST), a=_set(a), b=_set(b))


def _clocks(a: Sequence[Record], b: Sequence[Record]) -> Iterator[Difference]:
    low, other = ([r.gpu.sm_clock_mhz_min for r in s if r.gpu and r.gpu.sm_clock_mhz_min] for s in (a, b))
    if low and other and abs(min(low) - min(other)) > CLOCK_APART * max(min(low), min(other)):
        yield Difference(what="lowest SM clock", a=f"{min(low)} MHz", b=f"{min(other)} MHz")


def _set(values: set[str]) -> str:
    ordered = sorted(values)
    more = f" and {len(ordered) - MOST_SHOWN} more" if len(ordered) > MOST_SHOWN else ""
    return (", ".join(short(v, LONGEST) for v in ordered[:MOST_SHOWN]) or "none") + more


def _text(value: object) -> str:
    return "none" if value is None else str(value)
