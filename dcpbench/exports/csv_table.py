"""Export the tidy table as CSV: one row per record, units in the names, the same columns for every run.

An absent value is empty, and text that a spreadsheet would execute starts with an apostrophe.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import TYPE_CHECKING

from dcpbench.exports import RenderedFiles
from dcpbench.points.axes import Role
from dcpbench.points.point import AXES, LOAD_AXES
from dcpbench.records import metrics
from dcpbench.records.record import format_reason
from dcpbench.show.text import format_spreadsheet_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.exports.measured_points import MeasuredPoint
    from dcpbench.points.axes import Axis

FILE = "points.csv"
Cell = str | int | float | bool | None
LARGEST = 2**63 - 1  # maximum of an integer in a 64-bit column; no value that dcpbench writes is larger
NOT_EXPORTED = ("mode", "prefix_groups", "trace_sha256", "prefix_cache", "prefill", "seed")
"""Fields of a load that are not exported: they have another column, or were never part of the tables."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Describe one column, and its value for a record."""

    name: str
    kind: type
    read_value: Callable[[MeasuredPoint], Cell]


def build_rows(points: Sequence[MeasuredPoint]) -> list[dict[str, Cell]]:
    """Return a row for every point, with outcome and reason for those that did not run; absent values are None."""
    return [{column.name: _convert_cell(column, m) for column in COLUMNS} for m in points]


def _convert_cell(column: Column, m: MeasuredPoint) -> Cell:
    value = column.read_value(m)
    if value is None or value == "":
        return None
    if column.kind is str and isinstance(value, float):  # of a field that may also be text, as the think time
        return f"{value:g}"
    if column.kind is int:
        return int(value) if abs(float(value)) <= LARGEST and float(value).is_integer() else None
    return value


def _make_point_column(axis: Axis) -> Column:
    """Return the column of a field of a point; 0 means unknown in an import, except for the repeat."""
    unknown = 0 if axis.kind is int and axis.role is not Role.REPEAT else ""

    def read_value(m: MeasuredPoint) -> Cell:
        value: Cell = getattr(m.record.point, axis.name)
        return None if value == unknown else value

    return Column(axis.name, axis.kind, read_value)


def _make_load_column(axis: Axis) -> Column:
    return Column(f"load_{axis.name}", axis.kind, lambda m: getattr(m.record.point.load, axis.name, None))


def _make_environment_column(name: str, kind: type) -> Column:
    return Column(name, kind, lambda m: getattr(m.record.environment, name, None))


def _make_metric_column(metric: metrics.Metric) -> Column:
    return Column(metric.name, int if metric.whole else float, lambda m: metrics.get_finite_value(metric, m.record))


def _make_interval_column(metric: metrics.Metric, name: str, place: int) -> Column:
    """Return the column of one end of a metric's interval."""

    def read_value(m: MeasuredPoint) -> float | None:
        interval = metric.get_interval(m.record)
        return None if interval is None else interval[place]

    return Column(f"{metric.name}_{name}", float, read_value)


COLUMNS: tuple[Column, ...] = (
    Column("run", str, lambda m: m.run),
    Column("point", str, lambda m: m.point_id),
    Column("origin", str, lambda m: m.origin),
    Column("standing", str, lambda m: m.standing or "measured"),
    Column("outcome", str, lambda m: m.record.outcome),
    Column("reason", str, lambda m: format_reason(m.record) or None),
    Column("warnings", str, lambda m: ", ".join(m.record.warnings)),
    Column("started_at_utc", str, lambda m: m.record.started_at),
    Column("layout", str, lambda m: m.record.point.layout_name),
    Column("precision", str, lambda m: m.record.point.precision),
    Column("mode", str, lambda m: m.record.point.load.mode if m.record.point.load else None),
    *map(_make_point_column, AXES),
    *(_make_load_column(axis) for axis in LOAD_AXES if axis.name not in NOT_EXPORTED),
    *map(_make_metric_column, metrics.list_exported_metrics()),
    *(
        _make_interval_column(m, name, place)
        for m in metrics.list_exported_metrics()
        if m.ranged
        for place, name in enumerate(("low", "high"))
    ),
    Column("step_samples", int, lambda m: m.record.metrics.step_ms.samples if m.record.metrics else None),
    Column("ttft_samples", int, lambda m: m.record.serve.ttft_ms.samples if m.record.serve else None),
    Column("itl_samples", int, lambda m: m.record.serve.itl_ms.samples if m.record.serve else None),
    _make_environment_column("device", str),
    _make_environment_column("device_count", int),
    *(
        _make_environment_column(name, str)
        for name in ("driver", "cuda", "torch", "triton", "nccl", "flashinfer", "git_commit")
    ),
    Column("dcpbench_version", str, lambda m: m.record.environment.dcpbench if m.record.environment else None),
    _make_environment_column("host_hash", str),
    Column("seconds", float, lambda m: m.record.seconds),
)


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file with every point."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in COLUMNS])
    writer.writerows([_format_cell(row[column.name]) for column in COLUMNS] for row in build_rows(points))
    return RenderedFiles({FILE: out.getvalue().encode("utf-8", "backslashreplace")})


def _format_cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return format_spreadsheet_cell(value)
    return repr(value)
