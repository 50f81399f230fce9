"""Whether what a line of records says can have been measured. Types are checked by msgspec; this checks the values.

Reports divide by these numbers, order them and draw them; one that cannot be is refused with its name, before it does
harm far from where it came from.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized
    from pathlib import Path

    from dcpbench.records import Interval, Kv, Metrics, Point, Record
    from dcpbench.serve_records import ServeMetrics

LARGEST = 1e15
"""No number of a record is larger: a petabyte, or 31,000 years in ms."""
MOST_ENTRIES = 4096
"""Phases, marks, sites, candidates and settings of one record."""
LARGE_NUMBER = re.compile(rb"[:,\[]\s*-?(?:[0-9][0-9.]*[eE]\+?[0-9]{2}|[0-9]{16})")
"""Where a line may hold one: only such lines are walked number by number."""


def problem(record: Record, line: bytes) -> str:
    """What of a record cannot be, by the name of its field; empty where all can."""
    if LARGE_NUMBER.search(line) and (found := _too_large(msgspec.json.decode(line), "")):
        return found
    parts = (
        _point(record.point),
        _metrics(record.metrics) if record.metrics else "",
        _serve(record.serve) if record.serve else "",
        _kv(record.kv) if record.kv else "",
        _entries(record),
    )
    return next((part for part in parts if part), "")


class OtherVersionError(msgspec.ValidationError):
    """A record of another version, whatever else is in it."""


def why(line: bytes, error: Exception) -> str:
    """What is wrong with a line that cannot be read, and what to do about it."""
    if isinstance(error, OtherVersionError):
        return f"{error}. Not written by this version of dcpbench: read it with the version that wrote it."
    if not line.lstrip().startswith(b"{"):
        return "it is no record, as it is no JSON object; name a run's folder, or its records.jsonl."
    said = "its brackets are nested too deep" if isinstance(error, RecursionError) else str(error)[:300]
    return f"{said}. Not written by this version of dcpbench; take the line out, and measure its point again."


def last_line(path: Path, block: int = 1 << 20) -> bytes:
    """What follows the last newline of a file, read from its end; a whole file has nothing there."""
    with path.open("rb") as f:
        end = f.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - block)
            f.seek(start)
            tail, end = f.read(end - start) + tail, start
    return tail.rpartition(b"\n")[2]


def _point(point: Point) -> str:
    names = ("tp", "dp", "dcp", "concurrency", "context", "page_size", "interleave", "repeat")
    return _first(_not_negative(f"point.{name}", getattr(point, name)) for name in names)


def _metrics(metrics: Metrics) -> str:
    named = {"step_ms": metrics.step_ms, "output_tok_s": metrics.output_tok_s}
    latencies = [_not_negative(f"metrics.itl_ms.{p}", getattr(metrics.itl_ms, p)) for p in PERCENTILES]
    rates = [
        _positive(f"metrics.{name}", getattr(metrics, name)) for name in ("output_tok_s_per_gpu", "tok_s_per_user")
    ]
    return _first([*(_interval(f"metrics.{name}", value) for name, value in named.items()), *latencies, *rates])


def _serve(serve: ServeMetrics) -> str:
    counts = ("submitted", "finished", "rejected", "cancelled", "input_tokens", "output_tokens", "preemptions", "steps")
    return _first(
        [
            _positive("serve.output_tok_s", serve.output_tok_s),
            *(_not_negative(f"serve.{name}", getattr(serve, name)) for name in (*counts, "wall_s", "goodput_s")),
            *(
                _not_negative(f"serve.{name}.{p}", getattr(getattr(serve, name), p))
                for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")
                for p in PERCENTILES
            ),
        ]
    )


def _kv(kv: Kv) -> str:
    names = ("pool_bytes_per_gpu", "bytes_per_token_per_gpu", "capacity_tokens", "capacity_requests")
    return _first(_not_negative(f"kv.{name}", getattr(kv, name)) for name in names)


PERCENTILES = ("p50", "p90", "p95", "p99")


def _entries(record: Record) -> str:
    many: dict[str, Sized] = {
        "marks": record.marks, "sync_sites": record.sync_sites, "detail": record.detail,
        "phases.phase_us": record.phases.phase_us if record.phases else (),
        "choice.candidates": record.choice.candidates if record.choice else (),
    }  # fmt: skip
    over = [name for name, found in many.items() if len(found) > MOST_ENTRIES]
    return f"{over[0]} has {len(many[over[0]]):,} entries, more than {MOST_ENTRIES:,}" if over else ""


def _interval(name: str, value: Interval) -> str:
    if not 0 < value.low <= value.median <= value.high:
        return f"{name}: 0 < low {value.low:g} ≤ median {value.median:g} ≤ high {value.high:g} does not hold"
    return ""


def _positive(name: str, value: float | None) -> str:
    return f"{name} is {value:g}, not above 0" if value is not None and not value > 0 else ""


def _not_negative(name: str, value: float | None) -> str:
    return f"{name} is {value:g}, below 0" if value is not None and value < 0 else ""


def _first(found: Iterable[str]) -> str:
    return next((text for text in found if text), "")


def _too_large(value: object, name: str) -> str:
    if isinstance(value, dict):
        return _first(_too_large(v, f"{name}.{k}".lstrip(".")[:80]) for k, v in value.items())
    if isinstance(value, list):
        return _first(_too_large(v, name) for v in value)
    if isinstance(value, int | float) and abs(value) > LARGEST:
        return f"{name} is above {LARGEST:g}"
    return ""
