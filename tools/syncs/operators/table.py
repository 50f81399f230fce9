"""Write the tables of measured operators and calls: `python -m tools.syncs.operators.table operators|calls MEASURED …`.

MEASURED are records that measure.py writes. `operators` prints dcpbench/syncs/dry_run/measured_operators.txt, `calls` the table
of calls that torch's documentation or profiles of engines name, including those without a measurement.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.syncs.operators.compare import Measurement, read_measurement
from tools.syncs.operators.documentation import UNMEASURED
from tools.syncs.operators.documented import list_documented

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SLOW_ON_HOST = frozenset({"aten::_cudnn_rnn_backward"})  # operators that take milliseconds on the host without a wait
CORPUS_OPERATORS = (
    "aten::_assert_async",
    "aten::randperm",
)  # operators of programs in tools/syncs/corpus, with measured waits
HEAD = (
    "# Operators whose waits were measured: {device}, torch {torch}. Of those that wait: calls that waited, of all; the copies and runtime calls recorded.",
    "# Written by `python -m tools.syncs.operators.table operators` of the records of results/syncs-graphs_H200, which `make unpack` unpacks.",
    "# Some operators are in programs of tools/syncs/corpus alone.",
)
WAITS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
)  # names of waiting calls in the table


COPY = re.compile(r"Memcpy (?P<way>DtoH|HtoD) \((?:Device -> )?(?P<memory>Pageable|Pinned)(?: -> Device)?\)")


def name_waits(call: dict[str, Any]) -> list[str]:
    """Return the CUDA calls by which a call waited.

    torch's debug mode warns at cudaStreamSynchronize. A device synchronisation counts only if no other wait was recorded, because it may
    be the synchronisation between two calls, unless the record links events to operators.
    """
    events = call.get("events", {})
    named = [name for name in WAITS if name in events or (name == WAITS[0] and call["warned"])]
    if named:
        return named
    if "Event Sync" in events:
        return ["cudaEventQuery"]
    if any(name.startswith("Memcpy") and "Pageable" in name for name in events):
        return ["cudaMemcpyAsync"]
    return ["cudaDeviceSynchronize"] if "cudaDeviceSynchronize" in events else []


def _name_copies(call: dict[str, Any]) -> Iterator[str]:
    """Yield the copies between host and GPU, such as `DtoH-pinned`, which the recorded calls waited for."""
    for name in call["events"]:
        found = COPY.fullmatch(name)
        if found:
            yield f"{found['way']}-{found['memory'].lower()}"


def format_operators(records: Sequence[Measurement]) -> str:
    """Format the operators in alphabetical order, one per line, below a comment."""
    calls: collections.Counter[str] = collections.Counter()
    waited: collections.Counter[str] = collections.Counter()
    named: dict[str, set[str]] = collections.defaultdict(set)
    for record in records:
        for call in record.iter_operator_calls():
            name = "::".join(call["what"].split(".")[:2])
            calls[name] += 1
            if record.has_waited(call) and name not in SLOW_ON_HOST:
                waited[name] += 1
                named[name].update(_name_copies(call))
                # The synchronisation may belong to the call before or after, unless the record has margins.
                named[name].update(
                    call_name for call_name in WAITS if "margin_ms" in record.head and call_name in call["events"]
                )
    lines = [
        f"{name} {waited[name]}/{calls[name]} {','.join(sorted(named[name]))}".rstrip() if waited[name] else name
        for name in sorted({*calls, *CORPUS_OPERATORS})
    ]
    head = "\n".join(HEAD).format(**records[0].head)
    return "\n".join([head, *lines]) + "\n"


def format_calls(records: Sequence[Measurement]) -> str:
    """Format a table with a row for each documented call: its source, its waits, and the reports of the debug mode."""
    measured: dict[str, tuple[Measurement, dict[str, Any]]] = {}
    for record in records:
        for group in record.groups:
            if group["group"].startswith("documented:"):
                measured.update({call["what"]: (record, call) for call in group["calls"] if not call["leaf"]})
    lines = ["| call | named by | waits | by | debug mode |", "|---|---|---|---|--:|"]
    for name, case in list_documented().items():
        for row in (name, f"{name} backward"):
            if row in measured:
                lines.append(f"| {row} | {case.named_by} | {_format_measured(*measured[row])} |")
            elif row == name:
                lines.append(f"| {row} | {case.named_by} | not measured | | |")
    lines += [f"| {name} | docstring | not measured: {reason} | | |" for name, reason in sorted(UNMEASURED.items())]
    return "\n".join(lines) + "\n"


def _format_measured(record: Measurement, call: dict[str, Any]) -> str:
    by = ", ".join(name_waits(call)) or "not recorded"
    return f"yes | {by} | {call['warned']}" if record.is_held_up(call) else f"no | | {call['warned']}"


FORMATS = {"operators": format_operators, "calls": format_calls}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=FORMATS)
    parser.add_argument("records", nargs="+", type=Path, metavar="MEASURED")
    args = parser.parse_args()
    sys.stdout.write(FORMATS[args.table]([read_measurement(path) for path in args.records]))
