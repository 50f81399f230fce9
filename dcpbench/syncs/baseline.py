"""The baseline: which sites a project has today and how often per step, as a file that is committed and diffs well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.syncs.words import plain

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from dcpbench.syncs.model import Report, Site

VERSION = 1
AGAIN = "make it again with `dcpbench syncs baseline TRACE -o {path} --force`"
DIGITS = 4
"""Decimals of a count per step: once in ten thousand steps is still a difference."""


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One site that is known. Only `fingerprint` and the counts are compared; the rest is for people."""

    fingerprint: str
    rule: str
    kind: str = ""
    file: str = ""
    function: str = ""
    op: str = ""
    direction: str = ""
    range: str = ""
    count_per_step: float | None = None
    count: int | None = None
    """Only where there were no steps: it depends on how long was recorded."""


class Baseline(msgspec.Struct, kw_only=True):
    """The file."""

    baseline_version: int = VERSION
    sites: list[Entry] = []


def make(report: Report, allowed: Collection[str]) -> Baseline:
    """Baseline of a report: its sites of steady state, but for the profiler's own and those that are allowed anyway.

    Args:
        report: What was found.
        allowed: Fingerprints that have a reason of their own, which may expire.
    """
    sites = [s for s in report.sites if not s.own and not s.warmup_only and s.fingerprint not in allowed]
    entries = [_entry(site) for site in sites]
    return Baseline(sites=sorted(entries, key=lambda e: (e.file, e.function, e.rule, e.op, e.fingerprint)))


def _entry(site: Site) -> Entry:
    steps = None if site.count_per_step is None else round(site.count_per_step, DIGITS)
    return Entry(
        fingerprint=site.fingerprint, rule=site.rule, kind=site.kind, file=plain(site.file),
        function=plain(site.function), op=plain(site.op), direction=plain(site.direction), range=plain(site.range),
        count_per_step=steps, count=site.count if steps is None else None,
    )  # fmt: skip


def encode(baseline: Baseline) -> str:
    """The file's text: one field a line, so that a change shows as the lines that changed."""
    return msgspec.json.format(msgspec.json.encode(baseline), indent=2).decode() + "\n"


def read(path: Path) -> Baseline:
    """Read a baseline. Raises UsageError where there is none or where it cannot be understood."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError as e:
        raise UsageError(
            f"There is no baseline {path}: write one with `dcpbench syncs baseline TRACE -o {path}`."
        ) from e
    except OSError as e:
        raise UsageError(f"The baseline {path} cannot be read ({e.strerror}).") from e
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is no baseline ({e}); {AGAIN.format(path=path)}.") from e
    if baseline.baseline_version != VERSION:
        raise UsageError(
            f"{path} is a baseline of version {baseline.baseline_version}, this program reads version {VERSION}; "
            f"{AGAIN.format(path=path)}."
        )
    return baseline
