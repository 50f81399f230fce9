"""Baseline file: the sites that a project has today and how often they occur per step, sorted so that it diffs well."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.show.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dcpbench.syncs.model import Site

VERSION = 1
AGAIN = "make it again with `dcpbench syncs baseline TRACE -o {path} --force`"
DIGITS = 4
"""Decimals of a count per step: once in ten thousand steps is still a difference."""


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Known site. Only `fingerprint` and the counts are compared; the rest is for readers."""

    fingerprint: str
    rule: str
    kind: str = ""
    file: str = ""
    function: str = ""
    op: str = ""
    direction: str = ""
    range: str = ""
    count_per_step: float | None = None
    count_per_phase: dict[str, float] = {}
    outside: int = 0
    count: int | None = None
    """Only where there were no steps: it depends on how long was recorded."""


class Baseline(msgspec.Struct, kw_only=True):
    """Contents of the file."""

    baseline_version: int
    """Has no default: a report also holds `sites`, and would let all of them pass."""
    sites: list[Entry] = []


def make(sites: Iterable[Site]) -> Baseline:
    """Return the baseline of sites that count; sites with the same fingerprint are one entry."""
    entries = [entry(group) for group in by_fingerprint(sites).values()]
    entries.sort(key=lambda e: (e.file, e.function, e.rule, e.op, e.fingerprint))
    return Baseline(baseline_version=VERSION, sites=entries)


def by_fingerprint(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Group sites by fingerprint, which lines of one function may share."""
    same: dict[str, list[Site]] = {}
    for site in sites:
        same.setdefault(site.fingerprint, []).append(site)
    return same


def entry(sites: Sequence[Site]) -> Entry:
    """Return the baseline entry of sites that share a fingerprint."""
    first = sites[0]
    steps = [s.count_per_step for s in sites if s.count_per_step is not None]
    texts = {name: printable(getattr(first, name)) for name in ("file", "function", "op", "direction", "range")}
    return Entry(
        fingerprint=first.fingerprint,
        rule=first.rule,
        kind=first.kind,
        **texts,
        count_per_step=round(sum(steps), DIGITS) if steps else None,
        count_per_phase=_add_phases(sites),
        outside=sum(s.outside for s in sites),
        count=None if steps else sum(s.count for s in sites),
    )


def _add_phases(sites: Iterable[Site]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for site in sites:
        for phase, count in site.count_per_phase.items():
            totals[phase] = totals.get(phase, 0.0) + count
    return {phase: round(count, DIGITS) for phase, count in sorted(totals.items())}


def read(path: Path) -> Baseline:
    """Read a baseline. Raises UsageError where there is none or where it cannot be understood."""
    quoted = shlex.quote(str(path))
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError as e:
        raise UsageError(
            f"There is no baseline {path}: write one with `dcpbench syncs baseline TRACE -o {quoted}`."
        ) from e
    except OSError as e:
        raise UsageError(f"The baseline {path} cannot be read ({e.strerror}).") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(f"{path} is no baseline ({e}); {AGAIN.format(path=quoted)}.") from e
    if baseline.baseline_version != VERSION:
        raise UsageError(
            f"{path} is a baseline of version {baseline.baseline_version}, this program reads version {VERSION}; "
            f"{AGAIN.format(path=quoted)}."
        )
    return baseline
