"""What is said of records whose numbers cannot be, and what metrics read off records, whole, as tests/data/said/ has it.

`SAID=write` writes the files anew, as for test_whole_outputs.py.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.records import metrics
from dcpbench.records.checks import ImpossibleValueError
from dcpbench.records.file import decode_record
from dcpbench.records.record import (
    decode_throttle_reasons,
    format_hardware,
    get_origin,
    is_functional,
    is_rejected_for_memory,
)
from tests.unit import record_builder, serve_record_builder
from tests.unit.test_whole_outputs import RUNS, hold, rounded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLAIN = record_builder.ok(record_builder.point(record_builder.Layout(4, 1, 2)), steps=7)
SERVED = serve_record_builder.served(serve_record_builder.point())
ODD = (0, -1, -0.5, 1, 3, 513, 1e15, 1.1e15, 1e18, 1.1e18)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers of a record are; of a list the first."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, (*path, name))
    elif isinstance(value, list):
        if value:
            yield from places(value[0], (*path, 0))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def said_of(told: dict[str, Any]) -> str:
    """Return what is wrong with it, that it is no record, or nothing."""
    try:
        decode_record(msgspec.json.encode(told))
    except ImpossibleValueError as e:
        return str(e)
    except msgspec.ValidationError as e:
        return f"no record: {e}"
    return ""


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    """Each number of a record in turn 0, below it, or too large: only those of which something is said."""
    lines = []
    for record in (PLAIN, SERVED):
        told = msgspec.to_builtins(record)
        for path in places(told):
            for odd in ODD:
                changed = copy.deepcopy(told)
                at = changed
                for name in path[:-1]:
                    at = at[name]
                at[path[-1]] = odd
                if (said := said_of(changed)) and not said.startswith("no record"):
                    lines.append(f"{'.'.join(map(str, path))} = {odd}: {said}")
    hold("odd-records.txt", "\n".join(lines), tmp_path)


def test_records_that_cannot_be(tmp_path: Path) -> None:
    """By their outcome, degrees, intervals and numbers of entries; at the limit they can."""
    plain = msgspec.to_builtins(PLAIN)
    many = {f"x{n}": 1.0 for n in range(4097)}
    changes: list[dict[str, Any]] = [
        {"outcome": "fine"},
        {"outcome": "x" * 50},
        *({"point": {**plain["point"], "tp": tp, "dp": dp, "dcp": dcp}} for tp, dp, dcp in ((4, 3, 1), (8, 2, 3), (8, 2, 4), (0, 0, 0), (0, 1, 1), (1 << 20, 1, 1))),
        {"outcome": "rejected", "point": {**plain["point"], "tp": 4, "dp": 3}},
        *({"point": {**plain["point"], "disaggregate": of, "transfer_gb_s": at}} for of, at in (("1:2", 0.0), ("1:2", 1e15), ("1:2", 50.0), ("x:y", 50.0), ("2", 0.0))),
        *({name: [{}] * 4097 if name == "sync_sites" else ["x"] * 4097} for name in ("marks",)),
        {"marks": ["x"] * 4096},
        {"detail": dict.fromkeys(many, "v"), "marks": ["x"] * 4097},
        {"phases": {**plain["phases"], "phase_us": many}},
        *({"metrics": {**plain["metrics"], "step_ms": {"median": m, "low": low, "high": high, "samples": 3}}} for low, m, high in ((1, 1, 1), (2, 1, 3), (1, 2, 1.5), (0, 1, 2))),
        {"metrics": {**plain["metrics"], "step_samples_ms": [1.0, 0.0]}},
        {"metrics": {**plain["metrics"], "step_samples_ms": [1.0, -1.0]}},
        {"metrics": {**plain["metrics"], "step_samples_ms": [0.5, 2e15]}},
        {"metrics": {**plain["metrics"], "step_samples_ms": [0.5]}, "seconds": -1.0},
    ]  # fmt: skip
    lines = [f"{json.dumps(change)[:110]}: {said_of({**plain, **change})}" for change in changes]
    hold("odd-whole-records.txt", "\n".join(lines), tmp_path)


def test_what_metrics_read_off_records(tmp_path: Path) -> None:
    """Of each kind of run all metrics of its first points, alone and over repeats: values, intervals, and how they are shown."""
    lines = []
    for name, made in RUNS.items():
        found = [record for record in made() if record.outcome == "ok"][:3]
        for several in (found[:1], found):
            for one in metrics.merge_values(several, metrics.METRICS, derived=True):
                numbers = [(v.median, v.low, v.high, list(v.each)) for v in (one, one.convert_to_shown_unit())]
                lines.append(f"{name} {len(several)} {one.metric.name}: {json.dumps(rounded([*map(list, numbers)]))}")
        of = found[0]
        about = (
            get_origin(of),
            format_hardware(of.environment) if of.environment else "",
            is_rejected_for_memory(of),
            is_functional(of),
        )
        lines.append(f"{name}: {about}")
    lines += [f"{bits:#x}: {decode_throttle_reasons(bits)}" for bits in (0, 1, 2, 0x44, 0xFFFF)]
    for workload in ("decode", "serve"):
        lines.append(f"{workload}: {[m.name for m in metrics.list_compared_metrics(workload)]}")
        lines += [
            f"{option}: {metric.name if (metric := metrics.find_compared_metric(option, workload)) else None}"
            for option in metrics.OPTIONS
        ]
    hold("metrics-of-records.txt", "\n".join(lines), tmp_path)
