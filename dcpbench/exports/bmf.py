"""Export the Bencher Metric Format: a value for each measure of each benchmark, with bounds if an interval is known.

Measures have slugs of dcpbench's own, with the unit in the name: Bencher's `latency` is in nanoseconds and its
`throughput` in operations per second, and a new slug is created with its first report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.exports import RenderedFiles, encode_json_object, measured_points
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured_points import MeasuredPoint
    from dcpbench.records.metrics import Value

FILE = "bmf.json"
MAX_NAME_CHARS = 1024  # maximum number of characters of a benchmark's name


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file with every point."""
    kept, left_out = measured_points.filter_points(points, measured_points.DID_NOT_RUN)
    groups = measured_points.group_repeats(kept)
    found = {
        fit_name(name, MAX_NAME_CHARS): {
            v.metric.name.replace("_", "-"): _build_metric(v) for v in measured_points.collect_values(group)
        }
        for name, group in zip(measured_points.make_names(groups), groups, strict=True)
    }
    return RenderedFiles({FILE: encode_json_object(found)} if found else {}, left_out)


def _build_metric(v: Value) -> dict[str, float]:
    metric = {"value": v.median}
    if v.low is not None and v.high is not None:
        metric |= {"lower_value": v.low, "upper_value": v.high}
    return metric
