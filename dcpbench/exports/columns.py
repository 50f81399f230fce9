"""The tidy table behind CSV and Parquet: one row per record, units in the names, the same columns for every run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from dcpbench.records import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.exports.measured import Measured

Kind = Literal["text", "whole", "number", "yes"]
Cell = str | int | float | bool | None
LARGEST = 2**63 - 1
"""Of a whole number in a column of 64 bits; a record may hold any, and one that is larger is none of ours."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column, and what it holds of a record."""

    name: str
    kind: Kind
    of: Callable[[Measured], Cell]


def rows(points: list[Measured]) -> list[dict[str, Cell]]:
    """Every point, those that did not run with their outcome and reason. Absent values are None."""
    return [{column.name: _cell(column, m) for column in COLUMNS} for m in points]


def _cell(column: Column, m: Measured) -> Cell:
    value = column.of(m)
    if value is None or value == "":
        return None
    if column.kind == "whole":
        return int(value) if abs(float(value)) <= LARGEST and float(value).is_integer() else None
    return value


def _point(name: str, kind: Kind, *, unknown: Cell = "") -> Column:
    def of(m: Measured) -> Cell:
        value: Cell = getattr(m.record.point, name)
        return None if not isinstance(value, bool) and value == unknown else value

    return Column(name, kind, of)


def _load(name: str, kind: Kind) -> Column:
    return Column(f"load_{name}", kind, lambda m: getattr(m.record.point.load, name, None))


def _env(name: str, kind: Kind) -> Column:
    return Column(name, kind, lambda m: getattr(m.record.environment, name, None))


def _metric(metric: metrics.Metric) -> Column:
    return Column(metric.name, "whole" if metric.whole else "number", lambda m: metrics.known(metric, m.record))


def _end(metric: metrics.Metric, name: str, place: int) -> Column:
    """One end of its interval."""

    def of(m: Measured) -> float | None:
        interval = metric.interval(m.record)
        return None if interval is None else interval[place]

    return Column(f"{metric.name}_{name}", "number", of)


COLUMNS: tuple[Column, ...] = (
    Column("run", "text", lambda m: m.run),
    Column("point", "text", lambda m: m.point_id),
    Column("origin", "text", lambda m: m.origin),
    Column("standing", "text", lambda m: m.standing or "measured"),
    Column("outcome", "text", lambda m: m.record.outcome),
    Column("reason", "text", lambda m: m.record.reason),
    Column("marks", "text", lambda m: ", ".join(m.record.marks)),
    Column("started_at_utc", "text", lambda m: m.record.started_at),
    _point("repeat", "whole"),
    _point("model", "text"),
    Column("layout", "text", lambda m: m.record.point.layout_name),
    *(_point(name, "whole", unknown=0) for name in ("tp", "dp", "dcp")),
    _point("workload", "text"),
    Column("mode", "text", lambda m: m.record.point.load.mode if m.record.point.load else None),
    _point("concurrency", "whole"),
    _point("context", "whole", unknown=0),
    _point("exchange", "text"),
    *(_point(name, "yes") for name in ("q_replicate", "project_first", "overlap")),
    *(_point(name, "text") for name in ("all_reduce", "backend", "dtype", "weights")),
    *(_point(name, "whole", unknown=0) for name in ("page_size", "interleave")),
    _load("requests", "whole"),
    _load("arrival", "text"),
    _load("request_rate", "number"),
    _load("burstiness", "number"),
    _load("input_tokens", "text"),
    _load("output_tokens", "text"),
    _load("prefix_share", "number"),
    _load("trace", "text"),
    _point("settings", "text"),
    _load("policy", "text"),
    _load("chunk", "whole"),
    *map(_metric, metrics.exported()),
    *(_end(m, name, place) for m in metrics.exported() if m.ranged for place, name in enumerate(("low", "high"))),
    Column("step_samples", "whole", lambda m: m.record.metrics.step_ms.samples if m.record.metrics else None),
    Column("ttft_samples", "whole", lambda m: m.record.serve.ttft_ms.samples if m.record.serve else None),
    Column("itl_samples", "whole", lambda m: m.record.serve.itl_ms.samples if m.record.serve else None),
    _env("device", "text"),
    _env("device_count", "whole"),
    *(_env(name, "text") for name in ("driver", "cuda", "torch", "triton", "nccl", "flashinfer", "git_commit")),
    Column("dcpbench_version", "text", lambda m: m.record.environment.dcpbench if m.record.environment else None),
    _env("host_hash", "text"),
    Column("seconds", "number", lambda m: m.record.seconds),
)
