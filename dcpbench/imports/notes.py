"""Describe an import in sentences: its contents, the facts read from file names, and the parts left out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dcpbench.imports import identity, imported_metrics
from dcpbench.imports.selection import MAX_NAMED, format_first
from dcpbench.points.names import AIPERF, CLOSED, SGLANG, TOOLS, VLLM
from dcpbench.show.text import fit_line, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.errors import RecordsError
    from dcpbench.imports.result import Result
    from dcpbench.records.record import Record

DETAILED = {VLLM: "--save-detailed", SGLANG: "--output-details", AIPERF: "profile_export.jsonl in the same folder"}
"""The option that keeps the times of each request."""


def describe_records(records: Sequence[Record], engine: str) -> list[str]:
    """Return what a reader must know about all records."""
    warnings = Counter(warning for record in records for warning in record.warnings)
    count = len(records)
    found = [f"{format_count(count, 'result')} of {TOOLS[engine]}."]
    if n := warnings[imported_metrics.SUMMARY_ONLY]:
        computed = f" With details ({DETAILED[engine]}) ours are computed." if engine in DETAILED else ""
        found.append(f"{n} of {count} without times of requests: means and percentiles are the tool's own.{computed}")
    if n := warnings[imported_metrics.NOMINAL]:
        found.append(
            f"{n} of {count} shown by the requested lengths, while their requests were on average more than 5 % shorter "
            "or longer."
        )
    if n := warnings[imported_metrics.CHUNK_GAPS]:
        found.append(
            f"{n} of {count} with several tokens in a stream chunk: ITL is the gap between chunks, and tok/s/user is "
            "1000 / median TPOT."
        )
    if n := sum(not record.point.tp for record in records):
        found.append(
            f"{n} of {count} with an unknown layout: nothing is known per GPU. Add --tp, and --dp, --dcp, --pp, --pcp "
            "where they are not 1."
        )
    if any(r.point.load and r.point.load.arrival != CLOSED and r.serve and r.serve.ttft_ms.samples for r in records):
        found.append("TTFT of these open loops counts from when a request was sent, ours from when it was due.")
    return found


def describe_repeats(records: Sequence[Record], results: Sequence[Result]) -> list[str]:
    """Return which results count as repeats of one point, because nothing distinguishes their servers and loads.

    The runs of a sweep are repeats by their own fields, and are not named.
    """
    pairs = [(r.point, result.where) for r, result in zip(records, results, strict=True) if not result.swept]
    repeats = identity.list_repeats([point for point, _ in pairs], [where for _, where in pairs])
    if not repeats:
        return []
    count = format_count(sum(len(places) for places in repeats), "result")
    sentence = (
        f"{count} are repeats of {format_count(len(repeats), 'point')}, as nothing distinguishes their servers: "
        f"{format_first(repeats[0])}. Import results of another server into another run."
    )
    return [sentence]


def describe_names(from_names: Mapping[str, Sequence[str]], count: int) -> list[str]:
    """Return the facts read from names of files and folders, with the number of results of each."""
    read = "; ".join(f"{what} ({len(files):,} of {count:,})" for what, files in from_names.items())
    return [f"Read from names of files and folders: {read}."] if read else []


def describe_unread(results: Sequence[Result]) -> list[str]:
    """Return the fields that are not read, and the number of results that have them."""
    counts = Counter(name for result in results for name in result.unread)
    if not counts:
        return []
    names = format_first([f"{name} (in {n:,} of {len(results):,})" for name, n in counts.items()])
    return [f"Not read, as no field of ours means the same: {names}."]


def describe_errors(errors: Sequence[RecordsError]) -> list[str]:
    """Return a sentence for each of the first results that could not be read, and the number of the others."""
    found = [f"Left out: {fit_line(str(error))}" for error in errors[:MAX_NAMED]]
    if len(errors) > MAX_NAMED:
        found.append(f"Left out for similar reasons: {len(errors) - MAX_NAMED:,} more.")
    return found
