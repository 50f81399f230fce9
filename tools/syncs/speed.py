"""Measure the time and memory with which `scan` reads a trace of a given size, compared with HTA's loader."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dcpbench.errors import TraceError, UsageError
from dcpbench.syncs.nsys.schema import EVENTS
from dcpbench.syncs.nsys.sqlite_export import MAGIC
from dcpbench.syncs.traces.other_formats import GZIP_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ID_FIELDS = (
    "correlation",
    "External id",
    "external id",
    "Python id",
    "Python parent id",
    "Ev Idx",
    "Record function id",
)
"""Fields of `args` with numbers that identify an event."""
SCAN = "scan"
PAUSE_US = 100.0  # time between two copies of a trace

_SCAN = """
import json, resource, sys, time
from pathlib import Path
from dcpbench.syncs.scan import scan_traces
before = resource.getrusage(resource.RUSAGE_SELF)
wall, cpu = time.perf_counter(), time.process_time()
report = scan_traces([Path(sys.argv[1])], root=Path("."))
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak, "base_bytes": before.ru_maxrss * 1024,
                  "found": report.totals.syncs}))
"""
_HTA = """
import json, logging, os, resource, sys, time
logging.disable(logging.CRITICAL)
from hta.common.trace import Trace
folder, name = os.path.split(os.path.abspath(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF)
wall, cpu = time.perf_counter(), time.process_time()
trace = Trace(trace_files={0: name}, trace_dir=folder)
trace.parse_traces(max_ranks=1, use_multiprocessing=False)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak, "base_bytes": before.ru_maxrss * 1024,
                  "found": len(trace.get_trace(0))}))
"""


class Timing(msgspec.Struct, kw_only=True):
    """Hold the timing of one program on one trace, in a separate process, on one core, in seconds and bytes."""

    tool: Literal["scan", "HTA loader"]
    wall_s: float  # seconds of the fastest run, without the start of Python and imports
    cpu_s: float
    runs_wall_s: list[float]
    peak_bytes: int
    base_bytes: int  # memory of the process before, Python and its packages included
    found: int  # synchronisations by scan; rows of HTA's table


class Speed(msgspec.Struct, kw_only=True):
    """Hold the timings of all programs on one trace."""

    source: str
    trace_bytes: int
    events: int
    copies: int
    timings: list[Timing]


def repeat_trace(source: Path, target: Path, size: int) -> tuple[int, int]:
    """Write a trace of about `size` bytes with repeated events of `source`; return the numbers of events and copies.

    Each copy follows the previous one in time and has new ids, as in a longer run of the same program.

    Raises:
        TraceError: The source is not a trace.
    """
    try:
        raw = source.read_bytes()
        if raw[:2] == GZIP_MAGIC:
            import gzip

            raw = gzip.decompress(raw)
        trace = json.loads(raw)
        events = trace.pop("traceEvents")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as e:
        raise TraceError(
            f"{source} is not a trace that can be repeated{_format_reason(e)}; name one that torch.profiler wrote"
        ) from None
    timed = [e for e in events if isinstance(e.get("ts"), (int, float))]
    if not timed:
        raise TraceError(f"{source} has no events with a time; name one that torch.profiler wrote")
    span = max(e["ts"] + e.get("dur", 0.0) for e in timed) - min(e["ts"] for e in timed) + PAUSE_US
    ids = max((v for e in timed for v in _list_ids(e)), default=0) + 1
    written = copies = 0
    with target.open("w") as f:
        f.write(json.dumps(trace)[:-1] + (", " if trace else "") + '"traceEvents": [\n')
        while written < size:
            body = ",\n  ".join(json.dumps(_shift_event(e, copies, span, ids)) for e in events)
            written += f.write((",\n  " if copies else "  ") + body)
            copies += 1
        f.write("\n]}\n")
    return copies * len(events), copies


def repeat_export(source: Path, target: Path, size: int) -> tuple[int, int]:
    """Write an SQLite export of nsys of about `size` bytes with repeated events; return the numbers of events and copies.

    Raises:
        TraceError: The source is not an SQLite export of nsys.
    """
    shutil.copyfile(source, target)
    try:
        with contextlib.closing(sqlite3.connect(target)) as db:
            names = {str(name) for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            tables = {t: [str(row[1]) for row in db.execute(f"PRAGMA table_info({t})")] for t in EVENTS if t in names}
            bounds = [db.execute(f'SELECT min(start), max("end") FROM {t}').fetchone() for t in tables]  # noqa: S608
            span = max(end for _, end in bounds) - min(start for start, _ in bounds) + round(PAUSE_US * 1000)
            of_ids = [f"SELECT max(correlationId) FROM {t}" for t, c in tables.items() if "correlationId" in c]  # noqa: S608
            ids = 1 + max(found for query in of_ids if (found := db.execute(query).fetchone()[0]) is not None)
            shifts, rows = {"start": span, "end": span, "correlationId": ids}, _count_rows(db, tables)
            before = target.stat().st_size
            _repeat_rows(db, tables, rows, shifts, 1, 1)
            grown = max(target.stat().st_size - before, 1)
            copies = max(2, 1 - (before - size) // grown)
            _repeat_rows(db, tables, rows, shifts, 2, copies - 1)
            events = sum(_count_rows(db, tables).values())
    except (sqlite3.Error, ValueError, TypeError) as e:
        raise TraceError(
            f"{source} is not an export that can be repeated ({e}); name one of nsys export --type sqlite"
        ) from None
    return events, copies


def _count_rows(db: sqlite3.Connection, tables: Iterable[str]) -> dict[str, int]:
    return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}  # noqa: S608


def _repeat_rows(
    db: sqlite3.Connection,
    tables: dict[str, list[str]],
    rows: dict[str, int],
    shifts: dict[str, int],
    first: int,
    last: int,
) -> None:
    """Add the copies `first` to `last` of the first rows of each table."""
    numbers = "WITH RECURSIVE n(copy) AS (SELECT ? UNION ALL SELECT copy + 1 FROM n WHERE copy < ?)"
    for table, columns in tables.items() if first <= last else ():
        values = [f'"{name}" + copy * {shifts[name]}' if name in shifts else f'"{name}"' for name in columns]
        rest = f"SELECT {', '.join(values)} FROM n CROSS JOIN {table} WHERE {table}.rowid <= ?"  # noqa: S608
        db.execute(f"INSERT INTO {table} {numbers} {rest}", [first, last, rows[table]])
    db.commit()


def _format_reason(error: Exception) -> str:
    return f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""


def _list_ids(event: dict[str, Any]) -> Iterator[int]:
    values = [event.get("id"), *((event.get("args") or {}).get(name) for name in ID_FIELDS)]
    return (v for v in values if isinstance(v, int))


def _shift_event(event: dict[str, Any], copies: int, span: float, ids: int) -> dict[str, Any]:
    """Return the event of a copy, with shifted time and ids."""
    if copies == 0 or not isinstance(event.get("ts"), (int, float)):
        return event
    later = {**event, "ts": event["ts"] + copies * span}
    if isinstance(later.get("id"), int):
        later["id"] += copies * ids
    args = later.get("args")
    if args:
        later["args"] = {k: v + copies * ids if k in ID_FIELDS and isinstance(v, int) else v for k, v in args.items()}
    return later


def measure_programs(
    source: Path,
    size: int,
    *,
    hta: Path | None = None,
    runs: int = 3,
    keep: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Speed:
    """Measure `scan`, and HTA's loader if `hta` is given, in turns on the same trace.

    Args:
        source: A real trace, or an SQLite export of nsys.
        size: Bytes of the repeated trace.
        hta: A Python interpreter with HolisticTraceAnalysis installed.
        runs: Runs of each program; the fastest one is reported.
        keep: File that keeps the repeated trace; None removes it.
        progress: Function that gets messages on the progress.

    Raises:
        TraceError: The source is not a trace.
        UsageError: The disk is too full for that size, or a measured program fails.
    """
    report = progress or (lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        target = keep or Path(folder) / "repeated.json"
        free = shutil.disk_usage(target.parent).free
        if size > free:
            raise UsageError(
                f"{target.parent} has {free / 1e9:.0f} GB free, and the trace needs {size / 1e9:.0f}; give a "
                "smaller --size, or a file on another disk with --keep"
            )
        report(f"writing {size / 1e6:.0f} MB")
        events, copies = (repeat_export if _is_database(source) else repeat_trace)(source, target, size)
        programs = [(SCAN, sys.executable, _SCAN)] + ([("HTA loader", str(hta), _HTA)] if hta else [])
        results: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in programs}
        for run in range(runs):
            for name, python, code in programs:
                report(f"{name}, run {run + 1} of {runs}")
                results[name].append(_run_program(name, [*_list_core_prefix(), python, "-c", code, str(target)]))
        return Speed(
            source=str(source),
            trace_bytes=target.stat().st_size,
            events=events,
            copies=copies,
            timings=[_make_timing(name, each) for name, each in results.items()],
        )


def _is_database(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def _list_core_prefix() -> list[str]:
    """Return a prefix that keeps a command on one core; empty without taskset."""
    return ["taskset", "-c", "0"] if shutil.which("taskset") else []


def _run_program(name: str, command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        hta = "name a Python with `pip install HolisticTraceAnalysis` by --hta"
        needs = "name another trace" if name == SCAN else hta
        raise UsageError(f"{name} failed: {last}; {needs}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _make_timing(name: str, runs: list[dict[str, Any]]) -> Timing:
    best = min(runs, key=lambda r: r["wall_s"])
    return msgspec.convert({**best, "tool": name, "runs_wall_s": [r["wall_s"] for r in runs]}, Timing)
