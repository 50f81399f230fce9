"""Export the Bencher Metric Format: a value for each measure of each benchmark, with bounds if an interval is known.

Measures have slugs of dcpbench's own, with the unit in the name: Bencher's `latency` is in nanoseconds and its
`throughput` in operations per second, and a new slug is created with its first report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.exports import Rendered, as_object, measured
from dcpbench.show.text import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured import Measured
    from dcpbench.records.metrics import Value

FILE = "bmf.json"
MOST_IN_A_NAME = 1024
"""Maximum number of characters of a benchmark's name."""


def render(points: Sequence[Measured]) -> Rendered:
    """Return one file with every point."""
    kept, left_out = measured.sieve(points, measured.DID_NOT_RUN)
    groups = measured.by_point(kept)
    found = {
        short(name, MOST_IN_A_NAME): {v.metric.name.replace("_", "-"): _metric(v) for v in measured.values(group)}
        for name, group in zip(measured.names(groups), groups, strict=True)
    }
    return Rendered({FILE: as_object(found)} if found else {}, left_out)


def _metric(v: Value) -> dict[str, float]:
    metric = {"value": v.median}
    if v.low is not None and v.high is not None:
        metric |= {"lower_value": v.low, "upper_value": v.high}
    return metric
