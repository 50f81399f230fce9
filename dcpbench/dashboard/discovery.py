"""Find the runs below a folder: every record file that can be read, and a sentence about every one that cannot."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.dashboard import series
from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.point import AXES
from dcpbench.records import metrics
from dcpbench.records.file import is_last_line_cut_short
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.garbage_collection import stop_garbage_collector
from dcpbench.records.record import format_hardware
from dcpbench.records.runs import read_run
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcpbench.dashboard.series import Entry, Line
    from dcpbench.records.file import BadLine
    from dcpbench.records.record import Record

STATE_FILE = "site.json"  # state file in a folder that the dashboard wrote; its copies of records are not runs
MAX_BYTES = 1 << 30  # maximum size of a record file; a larger one holds samples of more points than a page can show
MAX_POINTS = 200_000
PIECE = 1 << 20
MAX_SLUG_CHARS = 80
COMMIT = 12  # number of characters of a git commit that are shown
HEADLINE = metrics.DASHBOARD[0].name


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Hold a record file's metadata, to detect changes without reading it."""

    path: Path
    size: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class RunData:
    """Hold one run, without its samples."""

    name: str  # path of the run's folder below the given one
    slug: str  # name of the run's folder in the site, made of safe characters
    path: Path
    sha256: str  # SHA-256 of the record file
    date: str | None  # start of its first point, UTC, ISO 8601; null if no record has it
    commit: str
    hardware: str
    driver: str
    version: str
    workloads: str
    models: str
    outcomes: dict[str, int]
    cpu: bool
    headline: str
    entries: dict[Line, Entry]
    cut_short: bool = False  # True if the last line of its record file is incomplete
    bad_lines: tuple[BadLine, ...] = ()


@dataclasses.dataclass(frozen=True)
class FoundRuns:
    """Hold everything found below a folder."""

    runs: list[RunData]  # runs, oldest first; those without a date come before all others
    skipped: list[str]  # sentence for each record file that was left out, or of which the last line was


def list_stamps(root: Path, on_error: Callable[[OSError], object] | None = None) -> list[Stamp]:
    """Return all record files below `root`, in order of their paths; links to folders are not followed.

    `on_error` is called for each folder that cannot be read. Raise UsageError if `root` is no folder.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is no folder; name the one that holds your runs, such as runs.")
    found = []
    for path in _walk_record_files(root, on_error):
        try:
            stat = path.stat()
        except OSError:
            continue  # gone meanwhile
        found.append(Stamp(path, stat.st_size, stat.st_mtime_ns))
    return found


@stop_garbage_collector()
def load_runs(root: Path, known: dict[Stamp, RunData], on_progress: Callable[[str], None]) -> FoundRuns:
    """Read every run below `root`; unchanged runs are taken from `known`, which is updated."""
    runs: list[RunData] = []
    skipped: list[str] = []
    by_digest: dict[str, str] = {}
    now = list_stamps(root, lambda e: skipped.append(f"{e.filename}: its runs are left out ({e.strerror})"))
    for number, stamp in enumerate(now, 1):
        name = _make_name(root, stamp.path)
        try:
            run = known.get(stamp) or _load_run(stamp, name)
        except RecordsError as e:
            skipped.append(f"{name}: {fit_line(f'{RECORDS_FILE}{e.problem}')}")
            continue
        known[stamp] = run
        if run.sha256 in by_digest:
            skipped.append(f"{name}: the same records as {by_digest[run.sha256]}")
            continue
        by_digest[run.sha256] = name
        runs.append(run)
        if run.cut_short:
            skipped.append(f"{name}: the last line of its record file was cut short; the others are read")
        if run.bad_lines:
            first, more = run.bad_lines[0], len(run.bad_lines) - 1
            several = f" and {more:,} more" if more else ""
            message = f"line {first.line} of its record file{several} cannot be read ({first.why}); the others are read"
            skipped.append(f"{name}: {fit_line(message)}")
        on_progress(f"read {number} of {len(now)}")
    for gone in set(known) - set(now):
        del known[gone]
    points = sum(len(run.entries) for run in runs)
    if points > MAX_POINTS:
        raise UsageError(
            f"{root} holds {points:,} points in {len(runs):,} runs, and a site takes {MAX_POINTS:,}; name a folder "
            "below it that holds fewer."
        )
    return FoundRuns(sorted(runs, key=lambda run: (run.date or "", run.name)), skipped)


def _walk_record_files(root: Path, on_error: Callable[[OSError], object] | None) -> Iterator[Path]:
    for folder, below, files in os.walk(root, onerror=on_error):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if STATE_FILE in files and "index.html" in files:
            below.clear()
        elif RECORDS_FILE in files:
            yield Path(folder) / RECORDS_FILE


def _load_run(stamp: Stamp, name: str) -> RunData:
    if not stamp.path.is_file():
        raise RecordsError(" is no regular file, and reading it might never end.")
    if stamp.size > MAX_BYTES:
        raise RecordsError(f" has {stamp.size:,} bytes; a site takes runs of up to {MAX_BYTES:,}.")
    try:
        with stamp.path.open("rb") as file:
            digest, lines_here = hashlib.sha256(), 0
            while piece := file.read(PIECE):
                digest.update(piece)
                lines_here += piece.count(b"\n")
        if lines_here > MAX_POINTS:
            raise RecordsError(f" has {lines_here:,} records; a site takes {MAX_POINTS:,}.")
        read = read_run(stamp.path, skip_bad_lines=True)
    except OSError as e:
        raise RecordsError(f" cannot be read ({e.strerror}).") from e
    except RecursionError as e:
        raise RecordsError(": a line is nested deeper than any record.") from e
    if not read.records:
        raise RecordsError(" holds no whole record.")
    found = _make_run_data(name, stamp.path, digest.hexdigest(), read.records)
    return dataclasses.replace(found, cut_short=is_last_line_cut_short(stamp.path), bad_lines=read.bad_lines)


def _make_run_data(name: str, path: Path, digest: str, records: Sequence[Record]) -> RunData:
    try:
        entries = series.collect_lines(records)
    except (ArithmeticError, ValueError, TypeError) as e:
        raise RecordsError(f": a record holds values that none of ours has ({e}).") from e
    environments = [r.environment for r in records if r.environment]
    commits = dict.fromkeys(series.fit_label(e.git_commit or "", COMMIT + 1).rstrip("…")[:COMMIT] for e in environments)
    return RunData(
        name=series.fit_label(name),
        slug=_make_slug(name),
        path=path,
        sha256=digest,
        date=min(filter(None, (_parse_date(r.started_at) for r in records)), default=None),
        commit=", ".join(filter(None, commits)),
        hardware=_join_names(format_hardware(e) for e in environments),
        driver=_join_names(e.driver or "" for e in environments),
        version=_join_names(e.dcpbench for e in environments),
        workloads=_join_names(str(series.describe_line(line)["workload"]) for line in entries),
        models=_join_names(line.example.model for line in entries),
        outcomes=dict(sorted(Counter(entry.outcome for entry in entries.values()).items())),
        cpu=any(line.cpu for line in entries),
        headline=_format_headline(entries),
        entries=entries,
    )


def _format_headline(entries: dict[Line, Entry]) -> str:
    """Return a description of the point with the highest output throughput per GPU."""
    timed = {line: e.values[HEADLINE] for line, e in entries.items() if HEADLINE in e.values and not e.wrong}
    if not timed and (ran := [e for e in entries.values() if e.outcome == "ok"]):
        return "all results are wrong" if all(e.wrong for e in ran) else "output per GPU is not known"
    if not timed:
        return "no point finished"
    if all(line.cpu for line in timed):
        return "functional run on a CPU: its times say nothing about performance"
    line = max((line for line in timed if not line.cpu), key=lambda line: timed[line].median)
    described = series.describe_line(line)
    known = " × ".join(f"{described[name]:,}" for name in ("concurrency", "context") if described[name])
    load = described["load"] or known
    emulated = next(axis for axis in AXES if axis.name == "emulate").format_value(line.example.emulate)
    parts = (f"{described['model']} {described['layout']}", str(load), emulated, entries[line].layers_held)
    return f"highest {timed[line].median:,.0f} tok/s/GPU: {', '.join(filter(None, parts))}"


def _join_names(names: Iterator[str]) -> str:
    return series.fit_label(", ".join(filter(None, dict.fromkeys(names))))


def _parse_date(text: str) -> str | None:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    try:
        return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):
        return None


def _make_name(root: Path, path: Path) -> str:
    below = path.parent.relative_to(root)
    name = str(below) if below.parts else (root.resolve().name or "run")
    return name.encode(errors="replace").decode()  # a file's name may be no text


def _make_slug(name: str) -> str:
    """Return a name of letters, digits and `._~-` only; a digest makes it unique if that changed the name."""
    safe = re.sub(r"[^A-Za-z0-9._~-]+", "-", name.replace("/", "~")).strip(".-")[:MAX_SLUG_CHARS]
    if safe == name.replace("/", "~"):
        return safe
    return f"{safe or 'run'}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}"
