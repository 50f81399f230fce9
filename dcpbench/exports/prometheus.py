"""Prometheus' text format for the textfile collector of node_exporter: gauges, a series per point.

No timestamps, which that collector refuses; base units (seconds, bytes); every label escaped.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from dcpbench.exports import measured
from dcpbench.exports.files import Rendered
from dcpbench.exports.metrics import METRICS, TIMES, Metric, values
from dcpbench.show.text import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured import Measured

FILE = "dcpbench.prom"
LATENCY = re.compile(rf"({'|'.join(TIMES)})_(mean|p\d+)_ms")
RENAMED = {
    "output_tok_s": "output_tokens_per_second",
    "output_tok_s_per_gpu": "output_tokens_per_second_per_gpu",
    "tok_s_per_user": "output_tokens_per_second_per_user",
    "total_tok_s": "input_and_output_tokens_per_second",
    "steady_tok_s": "steady_output_tokens_per_second",
    "request_s": "requests_per_second",
    "goodput_s": "goodput_requests_per_second",
    "idle_fraction": "gpu_idle_ratio",
    "submitted": "submitted_requests",
    "finished": "finished_requests",
    "rejected": "rejected_requests",
    "cancelled": "cancelled_requests",
    "decode_batch": "decode_batch_requests",
    "wall_s": "wall_seconds",
}
"""Names that the rules for units do not make."""
SCALES = {"_ms": 1e-3, "_us": 1e-6}


@dataclasses.dataclass(frozen=True)
class Gauge:
    """Where a metric goes."""

    name: str
    help: str
    scale: float = 1.0
    statistic: str = ""
    """Label that tells the statistics of one latency apart."""


def gauge(metric: Metric) -> Gauge:
    """`itl_p99_ms` as `dcpbench_itl_seconds{statistic="p99"}`, `host_plan_us` as `dcpbench_host_plan_seconds`."""
    if found := LATENCY.fullmatch(metric.name):
        name, statistic = found.groups()
        return Gauge(
            f"dcpbench_{name}_seconds", f"{TIMES[name]}; percentiles only with enough samples", 1e-3, statistic
        )
    for suffix, scale in SCALES.items():
        if metric.name.endswith(suffix):
            return Gauge(f"dcpbench_{metric.name.removesuffix(suffix)}_seconds", metric.help, scale)
    return Gauge(f"dcpbench_{RENAMED.get(metric.name, metric.name)}", metric.help)


GAUGES = {metric.name: gauge(metric) for metric in METRICS}


def render(points: Sequence[Measured]) -> Rendered:
    """One file; the value of a point is the median of its repeats."""
    kept, left_out = measured.sieve(points, measured.DID_NOT_RUN)
    families: dict[str, list[str]] = {}
    for group in measured.by_point(kept):
        labels = _told(labels_of(group[0]))
        for v in values(group):
            to = GAUGES[v.metric.name]
            statistic = f',statistic="{to.statistic}"' if to.statistic else ""
            series = f"{to.name}{{{labels}{statistic}}} {v.value * to.scale!r}\n"
            families.setdefault(to.name, []).append(series)
    lines = []
    for to in GAUGES.values():
        if found := families.pop(to.name, None):
            lines += [f"# HELP {to.name} {_help(to.help)}\n", f"# TYPE {to.name} gauge\n", *found]
    return Rendered({FILE: "".join(lines).encode("utf-8", "backslashreplace")} if lines else {}, left_out)


def labels_of(m: Measured) -> dict[str, str]:
    """What a series is of. `point` alone tells apart any two points of a run."""
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
        "exchange": point.exchange_label(),
        "backend": point.backend,
        "dtype": point.dtype,
        "workload": point.workload,
        "concurrency": str(point.concurrency),
        "context": str(point.context),
        "request_rate": "" if load is None or load.request_rate is None else f"{load.request_rate:g}",
        "input_tokens": "" if load is None else load.input_tokens,
        "output_tokens": "" if load is None else load.output_tokens,
    }


def _told(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(short(text))}"' for name, text in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
