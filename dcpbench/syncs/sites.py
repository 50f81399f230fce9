"""Blocking calls grouped into the places in code that make them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.records.stats import percentile
from dcpbench.syncs.model import Example, Site
from dcpbench.syncs.rules import (
    ALLOCATION,
    BY_ID,
    COPY,
    DEVICE,
    DRIVER,
    EVENT,
    SCALAR,
    SCALAR_OPS,
    SHAPE,
    SHAPE_OPS,
    STREAM,
    TIMING,
    Rule,
    op_name,
    rule_of_copy,
)
from dcpbench.syncs.steps import per_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_UNSTABLE = re.compile(r"\b(?=\w*\d)\w{20,}\b|\d+")
"""Hashes and numbers in names such as `## Call CompiledFxGraph f7xq… ##` and `Torch-Compiled Region: 3/0`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What two occurrences must share to be one site."""

    rule: str
    file: str
    function: str
    op_chain: tuple[str, ...]
    direction: str
    may_block: bool
    own: bool
    range: str = ""
    """Only where there is no function to tell places apart."""

    @property
    def fingerprint(self) -> str:
        """The same from run to run and from machine to machine."""
        where = self.function or (f"range {self.range}" if self.range else "")
        return fingerprint(self.rule, self.file, where, self.op_chain, self.direction)


@dataclasses.dataclass(frozen=True, slots=True)
class Occurrence:
    """One blocking call."""

    place: Place
    ts: float
    wait: float
    bubble: float | None
    step: int | None
    thread: str
    range: str
    bytes: int | None
    waited_for: str
    line: int | None
    line_is: str
    stack: tuple[str, ...]
    call: str
    explicit: bool
    waited: bool | None
    called_from: str
    cause: str


def fingerprint(rule: str, file: str, function: str, op_chain: Sequence[str], direction: str) -> str:
    """Sixteen hexadecimal digits that name a site: no lines, no addresses, no numbers of threads.

    Args:
        rule: Id, such as SYNC001.
        file: Relative to the repository.
        function: The user's innermost function; where a trace has none, `range ` and the name of the range.
        op_chain: Operators, outermost first.
        direction: Of the copy.
    """
    ops = [op if "::" in op else _UNSTABLE.sub("#", op) for op in op_chain]
    text = "\0".join([rule, file, function, ">".join(ops), direction])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def rule_of(
    kind: str | None, op_chain: Sequence[str], direction: str, *, copied: bool, waited: bool, called: bool, timed: bool
) -> Rule:
    """Rule of a blocking call.

    Args:
        kind: What it waits for, as in blocking.py.
        op_chain: Operators around it, outermost first.
        direction: Of the copy.
        copied: Whether it waits for a copy.
        waited: Whether a synchronisation follows the copy, rather than the copy blocking by itself.
        called: Whether a runtime call was seen, rather than a `cuda_sync` event alone.
        timed: Whether the time between two events is read right behind it.
    """
    if kind in ("free", "pin"):
        return ALLOCATION
    if copied or kind in ("copy", "async copy"):
        return rule_of_copy(op_chain, direction, waited=waited or kind == "copy")
    names = [op_name(op) for op in op_chain]
    if any(name in SHAPE_OPS for name in names):
        return SHAPE
    if names and names[-1] in SCALAR_OPS:
        return SCALAR
    if not called:
        return DRIVER
    if timed:
        return TIMING
    if waited and kind == "stream":
        return COPY
    return {"stream": STREAM, "event": EVENT}.get(kind or "", DEVICE)


def make_sites(trace: str, occurrences: Iterable[Occurrence], steps: int) -> list[Site]:
    """The sites of one trace, in order of first occurrence."""
    places: dict[Place, list[Occurrence]] = {}
    for occurrence in sorted(occurrences, key=lambda o: o.ts):
        places.setdefault(occurrence.place, []).append(occurrence)
    groups: dict[tuple[str, bool, bool], list[Occurrence]] = {}
    for place, group in places.items():
        groups.setdefault((place.fingerprint, place.may_block, place.own), []).extend(group)
    return [_site(trace, group, steps) for group in groups.values()]


def _site(trace: str, group: list[Occurrence], steps: int) -> Site:
    first = group[0]
    place = first.place
    worst = max(group, key=lambda o: (o.bubble or 0.0, o.wait))
    mean, warmup = per_step([o.step for o in group], steps)
    waits = [o.wait for o in group]
    bubbles = [o.bubble for o in group if o.bubble is not None]
    sizes = [o.bytes for o in group if o.bytes is not None]
    return Site(
        fingerprint=place.fingerprint,
        rule=place.rule,
        kind=BY_ID[place.rule].kind,
        op=place.op_chain[-1] if place.op_chain else "",
        op_chain=list(place.op_chain),
        function=place.function,
        file=place.file,
        line=first.line,
        line_is=first.line_is,  # type: ignore[arg-type]
        stack=list(first.stack),
        called_from=first.called_from,
        cause=first.cause,
        range=first.range,
        direction=place.direction,
        call=first.call,
        threads=sorted({o.thread for o in group if o.thread}),
        count=len(group),
        waited=_waited(group),
        count_per_step=mean,
        warmup_only=warmup,
        wait_us=float(np.sum(waits)),
        wait_median_us=float(np.median(waits)),
        wait_p99_us=percentile(waits, 99),
        bubble_us=float(np.sum(bubbles)) if bubbles else None,
        bytes=sum(sizes) if sizes else None,
        may_block=place.may_block,
        explicit=all(o.explicit for o in group),
        own=place.own,
        example=_example(trace, first),
        worst=_example(trace, worst),
        traces=[trace],
    )


def _waited(group: list[Occurrence]) -> int | None:
    """How many of them found something to wait for, where the trace can tell."""
    known = [o.waited for o in group if o.waited is not None]
    return sum(known) if known else None


def _example(trace: str, o: Occurrence) -> Example:
    return Example(trace=trace, ts=o.ts, wait_us=o.wait, bubble_us=o.bubble, step=o.step, waited_for=o.waited_for)


def merge(per_trace: Sequence[Sequence[Site]]) -> list[Site]:
    """Sites of several traces as one list: the same place on several ranks is one site.

    Counts, waits and bubbles add up. Count per step is that of the worst trace, as is the median wait: a step is as
    slow as its slowest rank. A p99 needs the samples, which several traces no longer have together, so it is the worst
    one's.
    """
    merged: dict[tuple[str, bool, bool], Site] = {}
    for sites in per_trace:
        for site in sites:
            key = (site.fingerprint, site.may_block, site.own)
            merged[key] = _add(merged[key], site) if key in merged else site
    return list(merged.values())


def _add(a: Site, b: Site) -> Site:
    """One site of the same place in two traces."""
    a.count += b.count
    for name in ("wait_us", "bubble_us", "bytes", "waited"):
        setattr(a, name, _sum(getattr(a, name), getattr(b, name)))
    for name in ("count_per_step", "wait_median_us", "wait_p99_us"):
        setattr(a, name, _max(getattr(a, name), getattr(b, name)))
    a.warmup_only &= b.warmup_only
    a.explicit &= b.explicit
    a.called_from, a.cause = a.called_from or b.called_from, a.cause or b.cause
    a.threads = sorted({*a.threads, *b.threads})
    a.traces = [*a.traces, *b.traces]
    if a.worst and b.worst:
        a.worst = max(a.worst, b.worst, key=lambda e: (e.bubble_us or 0.0, e.wait_us or 0.0))
    return a


def _sum(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else a + b


def _max(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)
