"""Write the tables of measured operators and calls: `python -m tools.syncs.operators.table operators|calls MEASURED …`.

MEASURED are records that measure.py writes. `operators` prints dcpbench/syncs/dry_run/measured_operators.txt, `calls` the table
of calls that torch's documentation or profiles of engines name, with those that the records do not hold.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.syncs.operators.compare import Measurement, read_measurement
from tools.syncs.operators.documentation import UNMEASURED
from tools.syncs.operators.documented import documented

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IN_CORPUS = (
    "aten::_assert_async",
    "aten::randperm",
)  # used by programs of tools/syncs/corpus, with measured waits
HEAD = (
    "# Operators whose waits were measured: {device}, torch {torch}. Of those that wait: calls that waited, of all; how they waited.",
    "# Written by `python -m tools.syncs.operators.table operators` of the records of results/syncs-graphs_H200, which `make unpack` unpacks.",
    "# Some operators are in programs of tools/syncs/corpus alone.",
)
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree")
"""Runtime calls that wait, as named in a table."""
LIBRARY = {"Stream Sync": "cuStreamSynchronize", "Event Sync": "cuEventSynchronize", "Context Sync": "cuCtxSynchronize"}
"""Events of synchronisation without a runtime call, from libraries that call the driver."""


def name_waits(events: Iterable[str]) -> list[str]:
    """Return the CUDA calls by which a call waited, from the names of its events."""
    events = set(events)
    named = [name for name in WAITS if name in events]
    if named:
        return named
    driver = [call for event, call in LIBRARY.items() if event in events]
    return driver or (["cudaMemcpyAsync"] if any(name.startswith("Memcpy") for name in events) else [])


def format_operators(records: Sequence[Measurement]) -> str:
    """Return the operators in alphabetical order, one in a line, below a comment."""
    calls: collections.Counter[str] = collections.Counter()
    waited: collections.Counter[str] = collections.Counter()
    named: dict[str, set[str]] = collections.defaultdict(set)
    for record in records:
        for call in record.operator_calls():
            name = "::".join(call["what"].split(".")[:2])
            calls[name] += 1
            if record.waited(call):
                waited[name] += 1
                # Without margins an event may belong to the call before or after it.
                named[name].update(name_waits(call["events"]) if record.has_margins else ())
    lines = [
        f"{name} {waited[name]}/{calls[name]} {','.join(sorted(named[name]))}".rstrip() if waited[name] else name
        for name in sorted({*calls, *IN_CORPUS})
    ]
    head = "\n".join(HEAD).format(**records[0].head)
    return "\n".join([head, *lines]) + "\n"


def format_calls(records: Sequence[Measurement]) -> str:
    """Return a row for each documented call: where it is named, whether it waits, by what, and what the debug mode reports."""
    measured: dict[str, tuple[Measurement, dict[str, Any]]] = {}
    for record in records:
        for group in record.groups:
            if group["group"].startswith("documented:"):
                measured.update({call["what"]: (record, call) for call in group["calls"] if not call["leaf"]})
    lines = ["| call | named by | waits | by | debug mode |", "|---|---|---|---|--:|"]
    for name, case in documented().items():
        for row in (name, f"{name} backward"):
            if row in measured:
                lines.append(f"| {row} | {case.named_by} | {_format_measured(*measured[row])} |")
            elif row == name:
                lines.append(f"| {row} | {case.named_by} | not measured | | |")
    lines += [f"| {name} | docstring | not measured: {reason} | | |" for name, reason in sorted(UNMEASURED.items())]
    return "\n".join(lines) + "\n"


def _format_measured(record: Measurement, call: dict[str, Any]) -> str:
    waited = record.waited(call)
    by = ", ".join(name_waits(call.get("events", ()))) if waited else ""
    return f"{'yes' if waited else 'no'} | {by} | {call['warned']}"


FORMATS = {"operators": format_operators, "calls": format_calls}


if __name__ == "__main__":
    sys.stdout.write(FORMATS[sys.argv[1]]([read_measurement(Path(name)) for name in sys.argv[2:]]))
