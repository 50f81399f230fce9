"""Read and write the baseline file: the current sites of a project and their counts per step, sorted for short diffs.

Detectors describe a site differently: in a trace it has the operators that the profiler recorded, in a dry run those that
reach the virtual GPU. A baseline is therefore compared only with reports of the detector that made it.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Literal

import msgspec

from dcpbench.errors import UsageError
from dcpbench.records.lines import UNREADABLE
from dcpbench.show.text import make_printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dcpbench.syncs.sync_report import Site

VERSION = 1
DIGITS = 4  # decimals of a count per step: once in ten thousand steps is still a difference
Detector = Literal["scan", "dry-run"]
COMMANDS: dict[Detector, str] = {  # what writes a baseline
    "scan": "dcpbench syncs baseline TRACE -o {path}{force}",
    "dry-run": "dcpbench syncs dry-run --write-baseline {path}{force} -- python script.py",
}
KEYS: dict[Detector, str] = {"scan": "baseline", "dry-run": "dry-run-baseline"}  # of pyproject.toml
SOURCES: dict[Detector, str] = {"scan": "traces", "dry-run": "a dry run"}


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Hold a known site. Only `fingerprint` and the counts are compared; the rest is for readers."""

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
    count: int | None = None  # only where there were no steps: it depends on how long was recorded


class Baseline(msgspec.Struct, kw_only=True):
    """Hold the contents of the file."""

    baseline_version: int  # has no default: a report also holds `sites`, and would let all of them pass
    detector: Detector  # detector that made it
    sites: list[Entry] = []
    unmeasured: list[str] = []  # operators that a dry run accepts although it was never measured whether they wait


def build_baseline(sites: Iterable[Site], detector: Detector = "scan", unmeasured: Iterable[str] = ()) -> Baseline:
    """Return the baseline of sites that count; sites with the same fingerprint are one entry."""
    entries = [build_entry(group) for group in group_by_fingerprint(sites).values()]
    entries.sort(key=lambda e: (e.file, e.function, e.rule, e.op, e.fingerprint))
    return Baseline(baseline_version=VERSION, detector=detector, sites=entries, unmeasured=sorted(set(unmeasured)))


def group_by_fingerprint(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Group sites by fingerprint, which lines of one function may share."""
    same: dict[str, list[Site]] = {}
    for site in sites:
        same.setdefault(site.fingerprint, []).append(site)
    return same


def build_entry(sites: Sequence[Site]) -> Entry:
    """Return the baseline entry of sites that share a fingerprint."""
    first = sites[0]
    steps = [s.count_per_step for s in sites if s.count_per_step is not None]
    texts = {name: make_printable(getattr(first, name)) for name in ("file", "function", "op", "direction", "range")}
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
    """Return the counts of each phase; none if a site has steps of unknown phases."""
    counted = [site.count_per_phase for site in sites if site.count_per_step is not None]
    totals: dict[str, float] = {}
    for counts in counted if all(counted) else ():
        for phase, count in counts.items():
            totals[phase] = totals.get(phase, 0.0) + count
    return {phase: round(count, DIGITS) for phase, count in sorted(totals.items())}


def read_baseline(path: Path, detector: Detector = "scan") -> Baseline:
    """Read a baseline. Raise UsageError if it does not exist, cannot be understood or is another detector's."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError as e:
        raise UsageError(f"There is no baseline {path}: write one with `{_format_command(path, detector)}`.") from e
    except OSError as e:
        raise UsageError(f"The baseline {path} cannot be read ({e.strerror}).") from e
    except UNREADABLE as e:
        written = COMMANDS[detector].format(path="FILE", force="")
        raise UsageError(f"{path} is no baseline ({e}); give a file that `{written}` has written.") from e
    if baseline.baseline_version != VERSION:
        raise UsageError(
            f"{path} is a baseline of version {baseline.baseline_version}, this program reads version {VERSION}; "
            f"make it again with `{_format_command(path, baseline.detector, ' --force')}`."
        )
    if baseline.detector != detector:
        other = path.with_name(f"{path.stem}-{detector}{path.suffix}")
        raise UsageError(
            f"{path} is a baseline of {SOURCES[baseline.detector]}, which names operators and copies differently from "
            f"{SOURCES[detector]}: write another one with `{_format_command(other, detector)}` and give it with --baseline, or in "
            f"pyproject.toml as {KEYS[detector]}."
        )
    return baseline


def _format_command(path: Path, detector: Detector, force: str = "") -> str:
    return COMMANDS[detector].format(path=shlex.quote(str(path)), force=force)
