"""Export Prometheus' text format for the textfile collector of node_exporter: gauges, a series per point.

There are no timestamps, which that collector refuses; units are base units (seconds, bytes), and every label is
escaped.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.exports import RenderedFiles, measured_points
from dcpbench.records.metrics import LATENCIES, Metric, list_exported_metrics
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured_points import MeasuredPoint

FILE = "dcpbench.prom"
WARNING = "dcpbench_point_warning"  # has a series of value 1 for each warning of a point, as Prometheus' ALERTS
WARNING_HELP = "1 for each warning of a point, by the label warning; a point without warnings has no series"
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}  # units of time in seconds


@dataclasses.dataclass(frozen=True)
class Gauge:
    """Describe the gauge of a metric."""

    name: str
    help: str
    scale: float = 1.0
    statistic: str = ""  # label that distinguishes the statistics of one latency


def make_gauge(metric: Metric) -> Gauge:
    """Return the gauge of a metric, such as `dcpbench_itl_seconds{statistic="p99"}` for `itl_p99_ms`."""
    if metric.latency:
        help_ = f"{LATENCIES[metric.latency].help}; percentiles only with enough samples"
        return Gauge(f"dcpbench_{metric.latency}_seconds", help_, SECONDS[metric.unit], metric.statistic)
    if scale := SECONDS.get(metric.unit):
        return Gauge(f"dcpbench_{metric.name.rpartition('_')[0]}_seconds", metric.help, scale)
    counted = "_requests" if metric.unit == "requests" and not metric.name.endswith("requests") else ""
    return Gauge(f"dcpbench_{metric.gauge or metric.name + counted}", metric.help)


GAUGES = {metric.name: make_gauge(metric) for metric in list_exported_metrics()}


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file; the value of a point is the median of its repeats."""
    kept, left_out = measured_points.filter_points(points, measured_points.DID_NOT_RUN)
    families: dict[str, list[str]] = {}
    marked: list[str] = []
    for group in measured_points.group_repeats(kept):
        labels = _format_labels(collect_labels(group[0]))
        for v in measured_points.collect_values(group):
            to = GAUGES[v.metric.name]
            statistic = f',statistic="{to.statistic}"' if to.statistic else ""
            series = f"{to.name}{{{labels}{statistic}}} {v.median * to.scale!r}\n"
            families.setdefault(to.name, []).append(series)
        warnings = sorted({fit_name(warning) for m in group for warning in m.record.warnings})
        marked += [f"{WARNING}{{{labels},{_format_labels({'warning': warning})}}} 1\n" for warning in warnings]
    lines = []
    for to in GAUGES.values():
        if found := families.pop(to.name, None):
            lines += _format_family(to.name, to.help, found)
    if lines:
        lines += _format_family(WARNING, WARNING_HELP, marked)
    return RenderedFiles({FILE: "".join(lines).encode("utf-8", "backslashreplace")} if lines else {}, left_out)


def _format_family(name: str, help_: str, series: Sequence[str]) -> list[str]:
    return [f"# HELP {name} {_encode_text(help_)}\n", f"# TYPE {name} gauge\n", *series]


def collect_labels(m: MeasuredPoint) -> dict[str, str]:
    """Return the labels of a series; `point` alone distinguishes any two points of a run.

    Labels exclude everything that may differ when the same point is measured again, which would end a series and begin
    another: warnings are series of their own.
    """
    point = m.record.point
    load = point.load
    return {
        "run": m.run,
        "point": m.point_id,
        "origin": m.origin,
        "standing": m.standing or "measured",
        "device": m.device,
        "model": point.model,
        "layout": point.layout_name,
        "tp": str(point.tp),
        "dp": str(point.dp),
        "dcp": str(point.dcp),
        "ep": str(point.ep_degree or ""),
        "exchange": point.format_exchange_label(),
        "backend": point.backend,
        "precision": point.precision,
        "workload": point.workload,
        "concurrency": str(point.concurrency),
        "context": str(point.context),
        "request_rate": "" if load is None or load.request_rate is None else f"{load.request_rate:g}",
        "input_tokens": "" if load is None else load.input_tokens,
        "output_tokens": "" if load is None else load.output_tokens,
    }


def _format_labels(labels: dict[str, str]) -> str:
    quoted = {name: _encode_text(fit_name(text)).replace('"', '\\"') for name, text in labels.items()}
    return ",".join(f'{name}="{text}"' for name, text in quoted.items())


def _encode_text(text: str) -> str:
    """Escape a help text; in a label quotes are escaped, too."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")
